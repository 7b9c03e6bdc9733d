"""What a rollout looks like from outside: live progress, and the record of who worked when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tlt.spec.totals import SpecTotals

Interval = tuple[float, float]
"""Begin and end, readings of ``time.monotonic()`` on the driver, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutProgress:
    """State of a rollout under way."""

    num_done: int
    num_total: int
    num_tokens: int
    """Generated so far in this rollout."""
    num_busy: int
    """Workers that hold requests."""
    num_idle: int
    elapsed_s: float
    spec: SpecTotals = SpecTotals()
    """Speculative decoding so far in this rollout."""


OnProgress = Callable[[RolloutProgress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """When each worker had work in a finished rollout."""

    begin_s: float
    end_s: float
    num_tokens: int
    busy: tuple[tuple[Interval, ...], ...]
    """Per worker rank: the intervals in which it held requests."""
    spec: SpecTotals = SpecTotals()
    """Speculative decoding in this rollout, all workers together."""

    def idle(self, worker: int) -> list[Interval]:
        """The gaps of a worker: device time with nothing scheduled. With ``busy`` they add up to the rollout."""
        edges = [self.begin_s, *(edge for interval in self.busy[worker] for edge in interval), self.end_s]
        gaps = zip(edges[::2], edges[1::2], strict=True)
        return [(begin, end) for begin, end in gaps if end > begin]

    def idle_s(self, worker: int) -> float:
        """Total length of a worker's gaps in seconds."""
        return sum(end - begin for begin, end in self.idle(worker))


class BusyTracker:
    """Builds the busy intervals from repeated looks at who holds requests."""

    def __init__(self, num_workers: int, begin_s: float) -> None:
        self._begin_s = begin_s
        self._since: list[float | None] = [None] * num_workers
        self._intervals: list[list[Interval]] = [[] for _ in range(num_workers)]

    @property
    def num_busy(self) -> int:
        """Workers that held requests at the last look."""
        return sum(since is not None for since in self._since)

    def look(self, worker: int, holds_requests: bool, now: float) -> None:
        """Note whether a worker holds requests now."""
        since = self._since[worker]
        if holds_requests and since is None:
            self._since[worker] = now
        elif not holds_requests and since is not None:
            self._intervals[worker].append((since, now))
            self._since[worker] = None

    def finish(self, now: float, num_tokens: int, spec: SpecTotals | None = None) -> RolloutRecord:
        """Close what is open."""
        for worker in range(len(self._since)):
            self.look(worker, False, now)
        busy = tuple(tuple(intervals) for intervals in self._intervals)
        return RolloutRecord(
            begin_s=self._begin_s, end_s=now, num_tokens=num_tokens, busy=busy, spec=spec or SpecTotals()
        )
