"""One worker as the pool sees it: its actor, whether it is usable, and when it last made progress."""

from __future__ import annotations

import logging
import time
from enum import StrEnum
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from rollout.actors import CONTROL_GROUP, LOOP_GROUP, Location, remote_worker
from rollout.engine import EngineFactory
from tlt.config.schema import RolloutSection
from tlt.errors import WorkerStartError
from tlt.spec.totals import SpecTotals
from tlt.types import WorkerReport

logger = logging.getLogger(__name__)

_GRACE_S = 5.0
"""A call that has ended, or is about to, comes back within this."""
POLL_S = 0.2
"""How long a worker holds a poll open when it has no response to report."""


_REASON_LINES = 4
"""vLLM's configuration errors say what is wrong from their second line on."""


class MemberState(StrEnum):
    """Life of a worker process."""

    STARTING = "starting"
    READY = "ready"
    STOPPED = "stopped"


class Member:
    """A worker's actor and the pending calls to it."""

    def __init__(self, rank: int, section: RolloutSection, group: PlacementGroup, factory: EngineFactory) -> None:
        self.rank = rank
        self.state = MemberState.STOPPED
        self.restarts = 0
        self.num_generated_tokens = 0
        """In the life of the pool, restarts included."""
        self.spec = SpecTotals()
        """Likewise."""
        self._section = section
        self._group = group
        self._factory = factory
        self._actor: Any = None
        self._turns = -1
        self._last_report: WorkerReport | None = None
        self._progress_s = 0.0
        self._deadline_s = 0.0
        self.loop_ref: ray.ObjectRef | None = None
        self.start_ref: ray.ObjectRef | None = None
        self.poll_ref: ray.ObjectRef | None = None
        self.submit_refs: list[ray.ObjectRef] = []

    def create(self) -> None:
        """Start the process; returns before it is up."""
        self._actor = remote_worker(self.rank, self._section, self._group)
        self.state = MemberState.STARTING
        self._deadline_s = time.monotonic() + self._section.start_timeout_s

    def locate(self) -> Location:
        """Where the process runs; blocks until it is up.

        Raises:
            WorkerStartError: it did not come up in time.
        """
        left = max(self._deadline_s - time.monotonic(), 0.0)
        try:
            location: Location = ray.get(self.call("locate"), timeout=left)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise WorkerStartError(f"the process of worker {self.rank} did not come up: {error}") from error
        return location

    def serve(
        self, cores: tuple[int, ...] | None, packet_ref: ray.ObjectRef | None, draft_ref: ray.ObjectRef | None = None
    ) -> None:
        """Build the engine in the process and load the current weights and drafter; returns before that is done."""
        self.loop_ref = self._actor.serve.options(concurrency_group=LOOP_GROUP).remote(self._factory, cores)
        self.start_ref = self.call("wait_ready", packet_ref, draft_ref)

    def finish_start(self) -> None:
        """The start call has come back: take its result and open the first poll.

        Raises:
            WorkerStartError: the engine could not be built, with the reason that it gave.
        """
        assert self.start_ref is not None
        try:
            # If the loop could not even begin, the start call waits for ever and the loop's own end has the reason.
            ready, _ = ray.wait([self.start_ref], timeout=_GRACE_S)
            ray.get(self.start_ref if ready else self.loop_ref, timeout=_GRACE_S)
        except ray.exceptions.RayError as error:
            raise WorkerStartError(f"worker {self.rank} failed to start: {reason(error)}") from error
        self.state = MemberState.READY
        self.start_ref = None
        self._turns = -1
        self._last_report = None
        self.touch()
        self.poll()

    def poll(self) -> None:
        """Ask for the next report."""
        self.poll_ref = self.call("poll", POLL_S)

    def take_report(self, report: WorkerReport) -> None:
        """Book what the worker says it has done since its last report."""
        last = self._last_report
        self.num_generated_tokens += report.num_generated_tokens - (last.num_generated_tokens if last else 0)
        self.spec += report.spec - (last.spec if last else SpecTotals())
        if report.turns != self._turns:
            self.touch()
        self._turns = report.turns
        self._last_report = report

    def touch(self) -> None:
        """Progress happened, or could not be expected before now."""
        self._progress_s = time.monotonic()

    def is_stuck(self, now: float) -> bool:
        """No progress for ``worker_timeout_s``; only meaningful while the worker has work."""
        return now - self._progress_s > self._section.worker_timeout_s

    def start_is_late(self, now: float) -> bool:
        """Still starting after ``start_timeout_s``."""
        return self.state is MemberState.STARTING and now > self._deadline_s

    def call(self, method: str, *args: Any) -> ray.ObjectRef:
        """Call a control method of the worker."""
        ref: ray.ObjectRef = getattr(self._actor, method).options(concurrency_group=CONTROL_GROUP).remote(*args)
        return ref

    def refs(self) -> list[ray.ObjectRef]:
        """Every pending call whose end means something."""
        single = (self.loop_ref, self.start_ref, self.poll_ref)
        return [ref for ref in single if ref is not None] + self.submit_refs

    def kill(self) -> None:
        """End the process now."""
        if self._actor is not None:
            ray.kill(self._actor, no_restart=True)
        self._actor = None
        self.state = MemberState.STOPPED
        self.loop_ref = self.start_ref = self.poll_ref = None
        self.submit_refs = []


def reason(error: BaseException) -> str:
    """What a person needs of a Ray error: the first lines of its cause, not the remote traceback."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {' / '.join(lines[:_REASON_LINES]) or 'no message'}"
