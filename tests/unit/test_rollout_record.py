"""Busy and idle intervals of a rollout: they must add up."""

from __future__ import annotations

from rollout.record import BusyTracker


def test_busy_and_idle_add_up_to_the_rollout() -> None:
    """Hand-computed: busy 10-14 and 16-19 of 10-20 leaves the gaps 14-16 and 19-20. Catches lost or double time."""
    tracker = BusyTracker(2, begin_s=10.0)
    for now, first, second in [(10.0, True, False), (14.0, False, False), (16.0, True, True), (19.0, False, True)]:
        tracker.look(0, first, now)
        tracker.look(1, second, now)
    record = tracker.finish(20.0, num_tokens=7)
    assert record.busy == (((10.0, 14.0), (16.0, 19.0)), ((16.0, 20.0),))
    assert record.idle(0) == [(14.0, 16.0), (19.0, 20.0)]
    assert record.idle(1) == [(10.0, 16.0)]
    for worker in (0, 1):
        busy_s = sum(end - begin for begin, end in record.busy[worker])
        assert busy_s + record.idle_s(worker) == record.end_s - record.begin_s


def test_a_worker_that_never_works_is_idle_throughout() -> None:
    """Catches a worker without intervals counting as busy."""
    record = BusyTracker(1, begin_s=0.0).finish(5.0, num_tokens=0)
    assert record.idle(0) == [(0.0, 5.0)]
