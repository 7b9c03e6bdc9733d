"""Drafting on a real engine: outputs stay what they are, limits hold, heads are swapped while requests run."""

from __future__ import annotations

import dataclasses
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
    config = make_head_config(AutoConfig.from_pretrained(tiny_target_dir), draft_vocab_size=200)
    save_head(folder, Eagle3Head(config, torch.arange(10, 210)), info={"target": {"name": "tiny", "sha256": "tiny"}})
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


def test_ngram_drafts_change_nothing_and_are_accepted(tiny_target_dir: Path, plain) -> None:  # type: ignore[no-untyped-def]
    """Catches a model-free drafter that is configured and never used, and one that changes outputs."""
    draft = DraftSection(kind="ngram", arms=(0, 1, 3), prompt_lookup_min=1, prompt_lookup_max=3)
    engine = EngineSpec(model_path=str(tiny_target_dir), dtype="float32", section=SECTION, draft=draft).build()
    engine.force_k(3)  # type: ignore[attr-defined]
    got = run(engine, [request(f"p{i}", prompt) for i, prompt in enumerate(PROMPTS)])
    assert {name: g.token_ids for name, g in got.items()} == {name: g.token_ids for name, g in plain.items()}
    assert sum(engine.spec_totals.num_drafted) > 0
    engine.close()


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
