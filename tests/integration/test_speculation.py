"""Drafting on a real engine: outputs stay what they are, limits hold, heads are swapped while requests run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from rollout.engine import EngineSpec, Generated
from rollout.weight_sync import DraftPacket, pack_weights
from tlt.config.schema import DraftSection, RolloutSection
from tlt.errors import DraftRefusedError
from tlt.types import FinishReason, RolloutRequest, SamplingSpec

pytestmark = pytest.mark.vllm

SECTION = RolloutSection(enforce_eager=True, max_model_len=256, max_num_seqs=8, kv_cache_gib=0.1)
PROMPTS = [[5, 6, 7, 8], [9, 9, 9], [40, 41, 42, 43, 44, 45], [100, 3, 100, 3, 100, 3, 100]]


def request(name: str, prompt: Sequence[int], **sampling: object) -> RolloutRequest:
    values: dict = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True} | sampling  # type: ignore[type-arg]
    return RolloutRequest(
        request_id=name, prompt_key=name, prompt_token_ids=tuple(prompt), sampling=SamplingSpec(**values)
    )


def run(engine, requests: Sequence[RolloutRequest]) -> dict[str, Generated]:  # type: ignore[no-untyped-def]
    finished: dict[str, Generated] = {}
    for one in requests:
        engine.add(one)
    while engine.num_running + engine.num_waiting:
        finished |= {generated.request_id: generated for generated in engine.step().finished}
    return finished


@pytest.fixture(scope="module")
def head_dir(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head: its drafts are almost never accepted."""
    from transformers import AutoConfig

    from tlt.draft.checkpoint import save_head
    from tlt.draft.config import make_head_config
    from tlt.draft.model import Eagle3Head

    folder = tmp_path_factory.mktemp("head") / "random"
    torch.manual_seed(0)
    config = make_head_config(AutoConfig.from_pretrained(tiny_target_dir), draft_vocab_size=250)
    save_head(folder, Eagle3Head(config, torch.arange(9, 259)), info={"target": {"name": "tiny", "sha256": "tiny"}})
    return folder


@pytest.fixture(scope="module")
def plain(tiny_target_dir: Path) -> Iterator[dict[str, Generated]]:
    """Greedy responses of an engine without a drafter."""
    engine = EngineSpec(model_path=str(tiny_target_dir), dtype="float32", section=SECTION).build()
    yield run(engine, [request(f"p{i}", prompt) for i, prompt in enumerate(PROMPTS)])
    engine.close()


@pytest.fixture(scope="module")
def drafting(tiny_target_dir: Path, head_dir: Path):  # type: ignore[no-untyped-def]
    """An engine with the random head."""
    draft = DraftSection(kind="eagle3", path=str(head_dir), arms=(0, 1, 3))
    spec = EngineSpec(
        model_path=str(tiny_target_dir), dtype="float32", section=SECTION, draft=draft, draft_path=str(head_dir)
    )
    engine = spec.build()
    yield engine
    engine.close()


@pytest.mark.parametrize("k", [0, 1, 3, None])
def test_greedy_tokens_are_those_without_a_drafter(plain, drafting, k: int | None) -> None:  # type: ignore[no-untyped-def]
    """Catches verification that accepts a wrong draft or misplaces the token behind it, for every K and the policy."""
    drafting.force_k(k)
    got = run(drafting, [request(f"p{i}", prompt) for i, prompt in enumerate(PROMPTS)])
    assert {name: g.token_ids for name, g in got.items()} == {name: g.token_ids for name, g in plain.items()}
    for name, generated in got.items():
        assert generated.logprobs == pytest.approx(plain[name].logprobs, abs=1e-3)


def test_limits_hold_with_drafts(drafting) -> None:  # type: ignore[no-untyped-def]
    """Catches max_tokens overrun by accepted drafts, min_tokens ignored, and a response past max_model_len."""
    drafting.force_k(3)
    to_the_end = SECTION.max_model_len - 4
    got = run(
        drafting,
        [
            request("one", PROMPTS[0], max_tokens=1),
            request("two", PROMPTS[0], max_tokens=2),
            request("least", PROMPTS[1], max_tokens=30, min_tokens=30, ignore_eos=False, temperature=1.0),
            request("end", PROMPTS[0], max_tokens=to_the_end),
        ],
    )
    assert {name: len(g.token_ids) for name, g in got.items()} == {"one": 1, "two": 2, "least": 30, "end": to_the_end}
    assert got["end"].finish_reason is FinishReason.LENGTH
    for generated in got.values():
        assert len(generated.logprobs) == len(generated.token_ids)


def test_a_stop_string_ends_a_response_inside_its_drafts(drafting, tiny_target_dir: Path) -> None:  # type: ignore[no-untyped-def]
    """Catches tokens behind a stop string that came with the same verification."""
    from transformers import AutoTokenizer

    drafting.force_k(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_dir)
    free = run(drafting, [request("free", PROMPTS[2])])["free"]
    text = next(text for token in free.token_ids[6:] if (text := tokenizer.decode([token])).isascii())
    expected = run(drafting, [request("off", PROMPTS[2], stop=(text,))])["off"]
    drafting.force_k(3)
    got = run(drafting, [request("on", PROMPTS[2], stop=(text,))])["on"]
    assert got.finish_reason is FinishReason.STOP
    assert got.token_ids == expected.token_ids
    assert len(got.logprobs) == len(got.token_ids)


def test_abort_in_the_middle_leaves_the_others_alone(plain, drafting) -> None:  # type: ignore[no-untyped-def]
    """Catches drafts of an aborted request that are verified for another one."""
    drafting.force_k(3)
    drafting.add(request("gone", PROMPTS[1]))
    drafting.add(request("p0", PROMPTS[0]))
    for _ in range(5):
        drafting.step()
    drafting.abort(["gone"])
    got = run(drafting, [])
    assert got["p0"].token_ids == plain["p0"].token_ids
    assert set(got) == {"p0"}


@pytest.fixture(scope="module")
def trained(plain, tiny_target_dir: Path, head_dir: Path):  # type: ignore[no-untyped-def]
    """The head after some training on the very responses that the tests generate."""
    from transformers import AutoModelForCausalLM

    from tlt.draft.checkpoint import load_head
    from tlt.draft.data import collate, pack
    from tlt.draft.loss import FrozenTarget
    from tlt.draft.trainer import DraftTrainer, DraftTrainSettings
    from trainer.hidden_states import collect_hidden_states
    from trainer.warmup_responses import TargetResponse

    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.float32).eval()
    head = load_head(head_dir)
    responses = [
        TargetResponse(prompt_token_ids=tuple(prompt), response_token_ids=plain[f"p{i}"].token_ids)
        for i, prompt in enumerate(PROMPTS)
    ]
    states = collect_hidden_states(model, responses, head.config.eagle_aux_hidden_state_layer_ids)
    weights = model.get_input_embeddings().weight
    settings = DraftTrainSettings(num_ttt_steps=3, learning_rate=5e-3, warmup_steps=10, total_steps=200, bf16=False)
    trainer = DraftTrainer(head, FrozenTarget(weights, weights), settings)
    batch = collate(pack(states, tokens_per_row=256))
    for _ in range(200):
        trainer.micro_step(batch)
    return head


def packet(head, version: int, *, target: str = "tiny", change=None) -> DraftPacket:  # type: ignore[no-untyped-def]
    from tlt.draft.checkpoint import trained_tensors

    tensors = trained_tensors(head, torch.float32)
    if change is not None:
        name, value = change
        tensors[name] = value
    return DraftPacket(target=target, weights=pack_weights(version, tensors, "float32"))


def test_a_head_that_does_not_fit_is_refused(drafting, trained) -> None:  # type: ignore[no-untyped-def]
    """Catches a swap that would break acceptance silently: stale version, other target, wrong shape, NaN."""
    with pytest.raises(DraftRefusedError, match="not newer"):
        drafting.load_draft(packet(trained, drafting.draft_version))
    with pytest.raises(DraftRefusedError, match="made for other"):
        drafting.load_draft(packet(trained, 1, target="other"))
    with pytest.raises(DraftRefusedError, match=r"fc.weight \(2, 2\)"):
        drafting.load_draft(packet(trained, 1, change=("fc.weight", torch.zeros(2, 2))))
    with pytest.raises(DraftRefusedError, match="not finite"):
        drafting.load_draft(packet(trained, 1, change=("norm.weight", torch.full((64,), float("nan")))))
    assert drafting.draft_version == 0


def test_a_better_head_takes_over_while_requests_run(plain, drafting, trained) -> None:  # type: ignore[no-untyped-def]
    """Catches a swap that changes outputs, needs requests to end, overwrites the embedding, or does not take effect."""
    drafting.force_k(3)
    before = drafting.spec_totals
    for index, prompt in enumerate(PROMPTS):
        drafting.add(request(f"p{index}", prompt))
    for _ in range(12):
        drafting.step()
    middle = drafting.spec_totals
    drafting.load_draft(packet(trained, drafting.draft_version + 1))
    assert drafting.num_running == len(PROMPTS)
    got = run(drafting, [])
    assert {name: g.token_ids for name, g in got.items()} == {name: g.token_ids for name, g in plain.items()}
    assert (middle - before).acceptance_length < 1.1
    swapped = drafting.spec_totals
    again = run(drafting, [request(f"p{i}", prompt) for i, prompt in enumerate(PROMPTS)])
    # Running requests keep the old head's keys and values, so they gain less than new ones.
    assert (swapped - middle).acceptance_length > 1.2
    assert (drafting.spec_totals - swapped).acceptance_length > 2.5
    assert {name: g.token_ids for name, g in again.items()} == {name: g.token_ids for name, g in plain.items()}
    assert again["p0"].acceptance_length is not None
    assert again["p0"].acceptance_length > 2.0
