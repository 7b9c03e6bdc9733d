"""Both engines keep the promises of :mod:`rollout.engine`; what the pool relies on is checked on each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.engine import EngineSpec, Generated, RolloutEngine
from rollout.fake_engine import FakeEngineFactory
from rollout.weight_sync import pack_weights
from tlt.config.schema import RolloutSection
from tlt.errors import StaleWeightsError
from tlt.types import FinishReason, RolloutRequest, SamplingSpec

MAX_LEN = 256


@pytest.fixture(scope="module", params=["fake", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request: pytest.FixtureRequest, tiny_llama_dir: Path) -> Iterator[RolloutEngine]:
    if request.param == "fake":
        yield FakeEngineFactory(max_model_len=MAX_LEN, max_num_seqs=4).build()
        return
    section = RolloutSection(enforce_eager=True, max_model_len=MAX_LEN, max_num_seqs=4, kv_cache_gib=0.1)
    spec = EngineSpec(model_path=str(tiny_llama_dir), dtype="float32", trust_remote_code=False, seed=0, section=section)
    built = spec.build()
    yield built
    built.close()


def request(name: str, *, max_tokens: int, ignore_eos: bool = True) -> RolloutRequest:
    return RolloutRequest(
        request_id=name,
        prompt_key=name,
        prompt_token_ids=(5, 6, 7, 8),
        sampling=SamplingSpec(max_tokens=max_tokens, ignore_eos=ignore_eos),
    )


def run(engine: RolloutEngine) -> list[Generated]:
    finished = []
    while engine.num_running + engine.num_waiting:
        finished += engine.step().finished
    return finished


def weights(tiny_llama_dir: Path) -> dict:  # type: ignore[type-arg]
    from transformers import AutoModelForCausalLM

    state = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype="float32").state_dict()
    return {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}


def test_every_request_finishes_once_with_a_logprob_per_token(engine: RolloutEngine) -> None:
    """Catches lost or repeated responses when more requests than batch slots are given, and misaligned logprobs."""
    lengths = {f"r{i}": 3 + 2 * i for i in range(7)}
    for name, length in lengths.items():
        engine.add(request(name, max_tokens=length))
    assert engine.num_running + engine.num_waiting == 7
    finished = run(engine)
    assert {g.request_id: len(g.token_ids) for g in finished} == lengths
    assert len(finished) == 7
    for generated in finished:
        assert len(generated.logprobs) == len(generated.token_ids)
        assert all(value <= 0.0 for value in generated.logprobs)
        assert generated.finish_reason is FinishReason.LENGTH


def test_steps_count_every_token(engine: RolloutEngine) -> None:
    """Catches tokens/s figures that miss the tokens of requests that finish in a step."""
    for name in ("a", "b"):
        engine.add(request(name, max_tokens=5))
    total = 0
    while engine.num_running + engine.num_waiting:
        total += engine.step().num_new_tokens
    assert total == 10


def test_a_step_without_work_is_empty(engine: RolloutEngine) -> None:
    """Catches an engine that blocks, or fails, when the loop turns with nothing to do."""
    result = engine.step()
    assert result.finished == ()
    assert result.num_new_tokens == 0


def test_abort_drops_a_request_and_ignores_unknown_ids(engine: RolloutEngine) -> None:
    """Catches an aborted request that still answers, and an abort that races with a finished request."""
    engine.add(request("keep", max_tokens=4))
    engine.add(request("drop", max_tokens=200))
    engine.step()
    engine.abort(["drop", "never-existed"])
    assert [g.request_id for g in run(engine)] == ["keep"]


def test_impossible_and_repeated_requests_are_refused(engine: RolloutEngine) -> None:
    """Catches a request that overruns max_model_len or overwrites a running one."""
    with pytest.raises(ValueError, match="max_model_len"):
        engine.add(request("long", max_tokens=MAX_LEN))
    engine.add(request("twin", max_tokens=2))
    with pytest.raises(ValueError, match="already running"):
        engine.add(request("twin", max_tokens=2))
    run(engine)


def test_weights_are_versioned_and_refused_mid_response(engine: RolloutEngine, tiny_llama_dir: Path) -> None:
    """Catches responses that mix two policies, and an old update that overtakes a new one."""
    state = weights(tiny_llama_dir)
    version = engine.policy_version + 1
    engine.add(request("open", max_tokens=4))
    with pytest.raises(StaleWeightsError, match="unfinished"):
        engine.load_weights(pack_weights(version, state, "float32"))
    run(engine)
    engine.load_weights(pack_weights(version, state, "float32"))
    assert engine.policy_version == version
    with pytest.raises(StaleWeightsError, match="not newer"):
        engine.load_weights(pack_weights(version, state, "float32"))


def test_score_has_a_value_for_each_token_after_the_first(engine: RolloutEngine) -> None:
    """Catches an off-by-one between tokens and their log-probabilities, which would break the weight probe."""
    assert len(engine.score((5, 6, 7, 8, 9))) == 4
