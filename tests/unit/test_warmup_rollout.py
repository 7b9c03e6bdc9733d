"""Which responses a warm-up uses, and when they are generated again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.conftest import save_byte_tokenizer
from tlt.config import load_config
from tlt.config.draft_schema import WarmupConfig
from tlt.errors import ConfigError, WorkerLostError
from tlt.types import FinishReason, Response, RolloutRequest
from trainer import warmup_rollout
from trainer.warmup_responses import ResponseReader
from trainer.warmup_rollout import ResponsePlan, ensure_responses, plan_responses

CONFIG = """\
data:
  source: {kind: reasoning_gym, tasks: {chain_sum: {max_terms: 3, max_digits: 2}}, num_train: 8}
rollout: {max_completion_length: 64}
responses: {num_prompts: 3, num_generations: 2, num_held_out: 2, num_held_out_generations: 4}
train: {max_steps: 1}
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def config(tmp_path: Path, *flags: str) -> WarmupConfig:
    path = tmp_path / "drafter.yaml"
    path.write_text(CONFIG)
    return load_config(path, flags, WarmupConfig)


def plan(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, *flags: str, target: str = "a") -> ResponsePlan:
    return plan_responses(config(tmp_path, *flags), tokenizer, target_sha256=target, folder=tmp_path)


class CountingPool:
    """Stands in for the pool: token 65, once more for each request before it; can fail."""

    def __init__(self) -> None:
        self.calls = 0
        self.fails = False

    def __call__(self, requests: Sequence[RolloutRequest], config: WarmupConfig, model_path: str) -> list[Response]:
        self.calls += 1
        if self.fails:
            raise WorkerLostError("lost")
        return [
            Response(
                request_id=request.request_id,
                prompt_key=request.prompt_key,
                token_ids=(65,) * (index + 1),
                logprobs=(-1.0,) * (index + 1),
                finish_reason=FinishReason.STOP,
                policy_version=0,
                worker=0,
                generate_s=1.0,
            )
            for index, request in enumerate(requests)
        ]


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> CountingPool:
    counting = CountingPool()
    monkeypatch.setattr(warmup_rollout, "generate_with_pool", counting)
    return counting


def test_requests_are_those_that_were_asked_for(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Catches wrong counts, repeated ids (the pool would refuse them) and sampling other than the run's."""
    made = plan(tmp_path, tokenizer, "rollout.temperature=0.7")
    assert (len(made.train), len(made.held_out)) == (6, 8)
    assert len({request.request_id for request in made.train + made.held_out}) == 14
    assert len({request.prompt_key for request in made.train}) == 3
    assert {request.prompt_key for request in made.train}.isdisjoint(r.prompt_key for r in made.held_out)
    assert {(r.sampling.temperature, r.sampling.max_tokens) for r in made.train + made.held_out} == {(0.7, 64)}


@pytest.mark.parametrize(
    "flag",
    ["rollout.temperature=0.5", "rollout.top_k=5", "rollout.max_completion_length=32", "run.seed=1",
     "data.system_prompt=Add.", "responses.num_prompts=2", "responses.num_generations=1",
     "responses.num_held_out_generations=1", "model.dtype=float32"],
)  # fmt: skip
def test_what_shapes_responses_makes_others(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, flag: str) -> None:
    """Catches a head that silently learns from responses of another temperature, prompt or target."""
    assert plan(tmp_path, tokenizer, flag).path != plan(tmp_path, tokenizer).path


def test_another_target_makes_others(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Catches responses of the model before its last training."""
    assert plan(tmp_path, tokenizer, target="b").path != plan(tmp_path, tokenizer).path


@pytest.mark.parametrize(
    "flag",
    ["run.name=x", "model.name=y", "rollout.num_workers=1", "rollout.max_num_seqs=4", "head.draft_vocab_size=7",
     "train.max_steps=9"],
)  # fmt: skip
def test_what_does_not_shape_responses_keeps_them(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, flag: str
) -> None:
    """Catches minutes of generation for another head recipe on the same responses."""
    assert plan(tmp_path, tokenizer, flag).path == plan(tmp_path, tokenizer).path


def test_generated_once_and_read_back(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, pool: CountingPool) -> None:
    """Catches responses paired with other prompts, held-out marks that slip, and generation for every head."""
    made = plan(tmp_path, tokenizer)
    for _ in range(2):
        ensure_responses(made, config(tmp_path), "target")
    assert pool.calls == 1
    responses = ResponseReader(tokenizer=tokenizer, data=None, vocab_size=259, max_length=512).read(made.path)
    assert [len(response.response_token_ids) for response in responses] == list(range(1, 15))
    assert [r.prompt_token_ids for r in responses] == [r.prompt_token_ids for r in made.train + made.held_out]
    assert [response.held_out for response in responses] == [False] * 6 + [True] * 8


def test_a_failed_pool_leaves_nothing(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, pool: CountingPool) -> None:
    """Catches a part of the responses that is taken for all of them at the next start."""
    made = plan(tmp_path, tokenizer)
    pool.fails = True
    with pytest.raises(WorkerLostError):
        ensure_responses(made, config(tmp_path), "target")
    assert not list(tmp_path.glob("*.jsonl"))


def test_a_file_is_known_by_what_is_in_it(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, pool: CountingPool
) -> None:
    """Catches an identity by path, in both directions, and generation beside a given file."""
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text("{}\n")
    second.write_text("{}\n")
    made = plan(tmp_path, tokenizer, f"responses.path={first}")
    assert made.key == plan(tmp_path, tokenizer, f"responses.path={second}").key
    assert made.key != plan(tmp_path, tokenizer, f"responses.path={second}", "data.system_prompt=Add.").key
    assert made.key != plan(tmp_path, tokenizer, f"responses.path={second}", "responses.num_held_out=1").key
    second.write_text("{}\n\n")
    assert made.key != plan(tmp_path, tokenizer, f"responses.path={second}").key
    ensure_responses(made, config(tmp_path), "target")
    assert pool.calls == 0


def test_too_few_prompts(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Catches a warm-up that quietly learns from less than was asked for."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{number}", "answer": "1"}}\n' for number in range(4)))
    source = "data.source={kind: jsonl, path: " + str(prompts) + "}"
    with pytest.raises(ConfigError, match=r"responses\.num_prompts=3, and the data section gives 2 prompts"):
        plan(tmp_path, tokenizer, source)


def test_a_missing_file_is_refused_before_anything_starts(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Catches an OSError that reaches the user."""
    with pytest.raises(ConfigError, match=r"responses\.path: cannot read .*none\.jsonl"):
        plan(tmp_path, tokenizer, f"responses.path={tmp_path / 'none.jsonl'}")
