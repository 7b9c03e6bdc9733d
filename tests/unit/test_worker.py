"""The worker loop with a scripted engine: commands, reports and errors cross threads without being lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rollout.fake_engine import FakeEngineFactory
from rollout.weight_sync import WeightPacket
from rollout.worker import RolloutWorker
from tlt.errors import StaleWeightsError, WorkerLostError
from tlt.types import RolloutRequest, SamplingSpec

NEVER_S = 60.0
"""A time-out that a passing test does not reach."""


def request(name: str, num_tokens: int) -> RolloutRequest:
    return RolloutRequest(
        request_id=name, prompt_key=name, prompt_token_ids=(1,), sampling=SamplingSpec(max_tokens=num_tokens)
    )


def packet(version: int) -> WeightPacket:
    return WeightPacket(version=version, dtype="float32", arrays={"w": np.zeros(1, dtype=np.float32)})


@pytest.fixture
def worker() -> Iterator[RolloutWorker]:
    running = RolloutWorker(rank=3)
    thread = threading.Thread(target=running.run, args=(FakeEngineFactory().build,), daemon=True)
    thread.start()
    running.wait_ready()
    yield running
    if thread.is_alive():
        running.stop()
    thread.join(timeout=NEVER_S)
    assert not thread.is_alive()


def test_an_idle_worker_wakes_up_and_reports_each_response_once(worker: RolloutWorker) -> None:
    """Catches a loop that sleeps through a submit, and a report that repeats or loses responses."""
    worker.submit([request("a", 2), request("b", 5)])
    seen = []
    while len(seen) < 2:
        seen += [(r.request_id, len(r.token_ids), r.worker) for r in worker.poll(NEVER_S).responses]
    assert sorted(seen) == [("a", 2, 3), ("b", 5, 3)]
    report = worker.poll(0.0)
    assert report.responses == ()
    assert report.num_generated_tokens == 7


def test_a_refused_command_raises_in_its_caller_and_the_loop_goes_on(worker: RolloutWorker) -> None:
    """Catches an engine's refusal that kills the loop, or is swallowed by it."""
    worker.load_weights(packet(2))
    with pytest.raises(StaleWeightsError, match="not newer"):
        worker.load_weights(packet(1))
    with pytest.raises(ValueError, match="max_model_len"):
        worker.submit([request("long", 10_000)])
    worker.submit([request("a", 1)])
    [response] = worker.poll(NEVER_S).responses
    assert response.policy_version == 2


def test_after_the_end_every_caller_is_told(worker: RolloutWorker) -> None:
    """Catches a caller that waits for ever for a loop that has left, and a poll that sleeps out its time-out."""
    with ThreadPoolExecutor(1) as pool:
        polling = pool.submit(worker.poll, NEVER_S)
        worker.stop()
        assert polling.result(timeout=NEVER_S / 2).responses == ()
    with pytest.raises(WorkerLostError, match="worker 3 has left its loop"):
        worker.submit([request("a", 1)])


def test_a_failed_start_reaches_whoever_waits() -> None:
    """Catches a start that fails silently while the pool waits for readiness."""
    broken = RolloutWorker(rank=0)
    with pytest.raises(RuntimeError, match="no memory"):
        broken.run(FakeEngineFactory(fail_start="no memory").build)
    with pytest.raises(RuntimeError, match="no memory"):
        broken.wait_ready()
