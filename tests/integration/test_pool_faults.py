"""The pool on real Ray with a scripted engine: exactly-once under deaths, hangs and failed starts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rollout.fake_engine import FakeEngineFactory
from rollout.pool import RolloutPool
from tlt.config.schema import RolloutSection
from tlt.errors import PlacementError, TltError, WorkerLostError, WorkerStartError
from tlt.types import Response, RolloutRequest, SamplingSpec

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

LENGTHS = {f"p{i}": 1 + (37 * i) % 90 for i in range(24)}
SECTION = RolloutSection(max_num_seqs=4, worker_timeout_s=3.0, start_timeout_s=120.0)


def requests(tag: str = "r") -> list[RolloutRequest]:
    return [
        RolloutRequest(
            request_id=f"{tag}{i}-{sample}",
            prompt_key=key,
            prompt_token_ids=(1, 2, 3),
            sampling=SamplingSpec(max_tokens=100),
        )
        for i, key in enumerate(LENGTHS)
        for sample in range(2)
    ]


def factories(num: int, faulty: FakeEngineFactory | None = None) -> list[FakeEngineFactory]:
    healthy = FakeEngineFactory(lengths=LENGTHS, max_num_seqs=4)
    return [healthy] * (num - 1) + [faulty or healthy]


def check_complete(asked: Sequence[RolloutRequest], responses: Sequence[Response]) -> None:
    assert [r.request_id for r in responses] == [r.request_id for r in asked]
    assert [len(r.token_ids) for r in responses] == [LENGTHS[r.prompt_key] for r in asked]


def test_uneven_lengths_on_three_workers_come_back_exactly_once() -> None:
    """Catches lost, repeated or reordered responses; and workers that all look busy to the very end."""
    section = SECTION.model_copy(update={"num_workers": 3})
    with RolloutPool.start(section, factories(3)) as pool:
        asked = requests()
        check_complete(asked, pool.generate(asked))
        record = pool.last_rollout
        assert record is not None
        for worker in range(3):
            busy = sum(end - begin for begin, end in record.busy[worker])
            assert busy + record.idle_s(worker) == pytest.approx(record.end_s - record.begin_s)


def test_responses_carry_the_version_of_the_weights() -> None:
    """Catches responses stamped with the version that the driver wants instead of the one that generated them."""
    with RolloutPool.start(SECTION, factories(2)) as pool:
        assert {r.policy_version for r in pool.generate(requests("a"))} == {0}
        assert pool.sync_weights({"w": _tensor()}) == 1
        responses = pool.generate(requests("b"))
        assert {r.policy_version for r in responses} == {1}
        # The fake engine writes its version into the tokens themselves.
        assert all(token // 1000 == 1 for r in responses for token in r.token_ids)


@pytest.mark.parametrize("fault", ["die_at_step", "hang_at_step"])
def test_one_failure_is_survived_with_the_current_weights(fault: str, tmp_path: Path) -> None:
    """Catches lost requests of a dead or stuck worker, and a replacement that starts from the old weights."""
    faulty = FakeEngineFactory(lengths=LENGTHS, max_num_seqs=4, fault_marker=str(tmp_path / "fault"), **{fault: 5})
    with RolloutPool.start(SECTION, factories(2, faulty)) as pool:
        pool.sync_weights({"w": _tensor()})
        asked = requests()
        check_complete(asked, pool.generate(asked))
        assert pool.num_restarts == 1
        pool.sync_weights({"w": _tensor()})
        again = pool.generate(requests("again"))
        assert {r.policy_version for r in again} == {2}
        assert pool.score((1, 2, 3)) == [[-0.5, -0.5]] * 2


def test_a_second_failure_ends_the_rollout_in_bounded_time() -> None:
    """Catches endless restarts of a worker that cannot work."""
    faulty = FakeEngineFactory(lengths=LENGTHS, max_num_seqs=4, die_at_step=2)
    with RolloutPool.start(SECTION.model_copy(update={"num_workers": 1}), [faulty]) as pool:
        begin = time.monotonic()
        with pytest.raises(WorkerLostError, match="worker 0 failed again"):
            pool.generate(requests())
        assert time.monotonic() - begin < 60.0


def test_an_engine_that_cannot_start_says_why() -> None:
    """Catches a pool that waits for its time-out, or hides the engine's own message."""
    broken = FakeEngineFactory(fail_start="no memory for the key-value cache")
    with (
        pytest.raises(WorkerStartError, match="worker 1 failed to start: .*no memory for the key-value cache"),
        RolloutPool.start(SECTION, factories(2, broken)),
    ):
        pass


class Unloadable(FakeEngineFactory):
    """Cannot be unpickled in the worker's process."""

    def __reduce__(self) -> tuple[object, ...]:
        return _raise_missing_module, ()


def _raise_missing_module() -> None:
    raise ModuleNotFoundError("No module named 'my_engine'")


def test_a_start_that_fails_before_the_loop_begins_says_why() -> None:
    """Catches a driver that waits for ever for the readiness of a worker whose arguments could not even be read."""
    with (
        pytest.raises(WorkerStartError, match="my_engine"),
        RolloutPool.start(SECTION, factories(2, Unloadable())),
    ):
        pass


def test_a_refused_request_names_the_rule() -> None:
    """Catches a request that an engine refuses and the pool waits for for ever."""
    too_long = RolloutRequest(
        request_id="x", prompt_key="x", prompt_token_ids=(1,), sampling=SamplingSpec(max_tokens=5000)
    )
    with RolloutPool.start(SECTION, factories(2)) as pool:
        with pytest.raises(TltError, match="max_model_len"):
            pool.generate([*requests(), too_long])
        # The pool is as good as new: nothing of the failed rollout is left in its engines.
        pool.sync_weights({"w": _tensor()})
        asked = requests()
        check_complete(asked, pool.generate(asked))


def test_more_devices_than_the_cluster_has_is_refused_at_once() -> None:
    """Catches an endless wait for a placement group that can never be."""
    section = SECTION.model_copy(update={"num_workers": 64})
    begin = time.monotonic()
    with (
        pytest.raises(PlacementError, match="64 workers need 64 CPU"),
        RolloutPool.start(section, factories(64)),
    ):
        pass
    assert time.monotonic() - begin < 10.0


def _tensor():  # type: ignore[no-untyped-def]
    import torch

    return torch.from_numpy(np.zeros(4, dtype=np.float32))
