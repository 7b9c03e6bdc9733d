"""The rollout pool: N worker actors, one rollout at a time, each request answered exactly once.

    generate(requests)                                         worker actors (one engine each)
      Router: longest expected first  -- submit, on demand -->   loop: engine.step() ...
      responses, by request           <-- poll (long poll) ---   finished responses
      watch: dead or stuck worker     -- kill, start anew --->   its requests go back into the queue

The driver waits in one place only (``ray.wait`` on all pending calls); a worker waits for commands. Nobody else waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup

from rollout.actors import Location
from rollout.engine import EngineFactory
from rollout.member import Member, MemberState, reason
from rollout.placement import reserve
from rollout.record import BusyTracker, OnProgress, RolloutProgress, RolloutRecord
from rollout.weight_sync import DraftPacket, WeightPacket, pack_weights
from tlt.config.schema import RolloutSection
from tlt.errors import StaleWeightsError, TltError, WorkerLostError, WorkerStartError
from tlt.routing import LengthHistory, Router
from tlt.spec.totals import SpecTotals
from tlt.types import Response, RolloutRequest

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_WAIT_S = 0.25
"""Longest time between two looks at progress and health."""
MAX_RESTARTS = 1
"""Restarts of one worker in the life of a pool: a second failure is no accident."""


class RolloutPool:
    """N rollout workers behind one call. Use :meth:`start` as a context manager."""

    def __init__(self, section: RolloutSection, group: PlacementGroup, factories: Sequence[EngineFactory], dtype: str):
        self._section = section
        self._dtype = dtype
        self._members = [Member(rank, section, group, factory) for rank, factory in enumerate(factories)]
        self._history = LengthHistory()
        self._packet: WeightPacket | None = None
        self._packet_ref: ray.ObjectRef | None = None
        self._draft_ref: ray.ObjectRef | None = None
        self._cores: dict[int, tuple[int, ...]] = {}
        self.last_rollout: RolloutRecord | None = None

    @classmethod
    @contextmanager
    def start(
        cls, section: RolloutSection, factories: Sequence[EngineFactory], *, dtype: str = "bfloat16"
    ) -> Iterator[RolloutPool]:
        """Reserve devices, start one worker per factory, wait until all are ready; stop them at the end.

        Ray must be initialised (:func:`rollout.placement.ray_session`, or your own ``ray.init``).

        Raises:
            PlacementError: the cluster cannot give the devices.
            WorkerStartError: an engine failed to start, or took longer than ``start_timeout_s``.
        """
        with reserve(section, timeout_s=section.start_timeout_s) as group:
            pool = cls(section, group, factories, dtype)
            try:
                pool._launch_all()
                pool._await_ready()
                yield pool
            finally:
                pool.close()

    @property
    def num_workers(self) -> int:
        """Workers in the pool."""
        return len(self._members)

    @property
    def policy_version(self) -> int:
        """Version of the weights that every ready worker uses."""
        return self._packet.version if self._packet else 0

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated in the life of the pool, those of lost attempts included."""
        return sum(member.num_generated_tokens for member in self._members)

    @property
    def spec_totals(self) -> SpecTotals:
        """Speculative decoding in the life of the pool, all workers together."""
        return sum((member.spec for member in self._members), SpecTotals())

    @property
    def num_restarts(self) -> int:
        """Workers restarted so far."""
        return sum(member.restarts for member in self._members)

    def generate(self, requests: Sequence[RolloutRequest], *, on_progress: OnProgress | None = None) -> list[Response]:
        """One rollout: a response for every request, in the order of the requests.

        Raises:
            WorkerLostError: a worker failed for the second time.
            TltError: an engine refused a request.
        """
        router = Router(requests, self._history, capacity=self._section.max_num_seqs)
        begin, tokens_before, spec_before = time.monotonic(), self.num_generated_tokens, self.spec_totals
        tracker = BusyTracker(self.num_workers, begin)
        try:
            while not router.done:
                self._turn(router, tracker)
                if on_progress is not None:
                    on_progress(
                        RolloutProgress(
                            num_done=router.num_done,
                            num_total=len(requests),
                            num_tokens=self.num_generated_tokens - tokens_before,
                            num_busy=tracker.num_busy,
                            num_idle=self.num_workers - tracker.num_busy,
                            elapsed_s=time.monotonic() - begin,
                            spec=self.spec_totals - spec_before,
                        )
                    )
        except BaseException:
            self._abort(router)
            raise
        self.last_rollout = tracker.finish(
            time.monotonic(), self.num_generated_tokens - tokens_before, self.spec_totals - spec_before
        )
        return router.responses()

    def sync_weights(self, state: Mapping[str, torch.Tensor]) -> int:
        """Give every worker the weights ``state`` (checkpoint names) as the next policy version; returns it."""
        packet = pack_weights(self.policy_version + 1, state, self._dtype)
        self._packet, self._packet_ref = packet, ray.put(packet)
        self._broadcast("load_weights", self._packet_ref)
        return packet.version

    def load_draft(self, packet: DraftPacket) -> list[float]:
        """Replace every worker's drafter, also in the middle of a rollout; seconds per worker.

        Raises:
            DraftRefusedError: an engine refuses it; see :meth:`rollout.engine.RolloutEngine.load_draft`.
        """
        self._draft_ref = ray.put(packet)
        return self._broadcast("load_draft", self._draft_ref)

    def policy_states(self) -> list[Mapping[str, Any] | None]:
        """Per worker: what its speculation policy has learned."""
        return self._broadcast("policy_state")

    def score(self, token_ids: Sequence[int]) -> list[list[float]]:
        """Per worker: log-probabilities of ``token_ids[1:]`` under the weights that it uses."""
        return self._broadcast("score", tuple(token_ids))

    def close(self) -> None:
        """End every worker process; safe to call twice."""
        for member in self._members:
            member.kill()

    # ---- starting

    def _launch_all(self) -> None:
        """First start: see where each worker has landed, give it cores there, let it build its engine."""
        for member in self._members:
            member.create()
        located = [member.locate() for member in self._members]
        if self._section.device == "cpu":
            self._cores = _share_cores(located, self._section.cores_per_worker)
        for member in self._members:
            member.serve(self._cores.get(member.rank), self._packet_ref, self._draft_ref)

    def _relaunch(self, member: Member) -> None:
        """Start a lost worker anew, on the same bundle and cores; returns before it is up."""
        member.create()
        member.serve(self._cores.get(member.rank), self._packet_ref, self._draft_ref)

    def _await_ready(self) -> None:
        while starting := [member for member in self._members if member.state is MemberState.STARTING]:
            self._check_late(starting)
            refs = [ref for member in starting for ref in member.refs()]
            ready, _ = ray.wait(refs, num_returns=1, timeout=_WAIT_S)
            for member in starting:
                # A loop that ends before its engine is ready ends the start call too, with the reason.
                if member.start_ref in ready or member.loop_ref in ready:
                    member.finish_start()

    def _check_late(self, members: Sequence[Member]) -> None:
        late = [member.rank for member in members if member.start_is_late(time.monotonic())]
        if late:
            raise WorkerStartError(
                f"workers {late} were not ready after {self._section.start_timeout_s:g} s; "
                "raise rollout.start_timeout_s, or set rollout.enforce_eager=true (no compilation)"
            )

    # ---- one turn of a rollout

    def _turn(self, router: Router, tracker: BusyTracker) -> None:
        self._hand_out(router)
        self._track(tracker, router)
        self._collect(router)
        self._watch(router)
        self._track(tracker, router)

    def _abort(self, router: Router) -> None:
        """Drop what the workers still have of a rollout that failed, so that the pool can be used again."""
        for member in self._members:
            held = sorted(router.release(member.rank))
            if member.state is MemberState.READY and held:
                member.call("abort", held)

    def _hand_out(self, router: Router) -> None:
        ready = {member.rank: member for member in self._members if member.state is MemberState.READY}
        for assignment in router.assign(ready):
            member = ready[assignment.worker]
            if len(router.held(member.rank)) == len(assignment.requests):
                member.touch()  # it had nothing to do until now, so its clock starts here
            member.submit_refs.append(member.call("submit", assignment.requests))

    def _track(self, tracker: BusyTracker, router: Router) -> None:
        now = time.monotonic()
        for member in self._members:
            tracker.look(member.rank, bool(router.held(member.rank)), now)

    def _collect(self, router: Router) -> None:
        refs = [ref for member in self._members for ref in member.refs()]
        ready, _ = ray.wait(refs, num_returns=1, timeout=_WAIT_S)
        for member in self._members:
            try:
                self._take(member, ready, router)
            except ray.exceptions.RayError as error:
                self._lose(member, reason(error), router)

    def _take(self, member: Member, ready: Sequence[ray.ObjectRef], router: Router) -> None:
        for ref in [ref for ref in member.submit_refs if ref in ready]:
            member.submit_refs.remove(ref)
            self._get_submitted(ref)
        if member.poll_ref in ready:
            report = ray.get(member.poll_ref)
            member.take_report(report)
            member.poll()
            for response in report.responses:
                if router.record(response):
                    self._check_version(response)
        if member.start_ref in ready:
            member.finish_start()
        if member.loop_ref in ready:
            self._lose(member, _loop_end(member), router)

    def _get_submitted(self, ref: ray.ObjectRef) -> None:
        try:
            ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ValueError):
                raise TltError(f"an engine refused a request: {error.cause}") from error
            # Anything else ends the worker's loop too, and is dealt with there.

    def _check_version(self, response: Response) -> None:
        if response.policy_version != self.policy_version:
            raise StaleWeightsError(
                f"response {response.request_id} comes from policy version {response.policy_version}, "
                f"the rollout runs on {self.policy_version}"
            )

    def _watch(self, router: Router) -> None:
        now = time.monotonic()
        self._check_late(self._members)
        for member in self._members:
            if member.state is MemberState.READY and router.held(member.rank) and member.is_stuck(now):
                self._lose(member, f"made no progress for {self._section.worker_timeout_s:g} s", router)

    # ---- failure

    def _lose(self, member: Member, why: str, router: Router | None) -> None:
        """Replace a failed worker, once; its unfinished requests go back into the queue."""
        member.kill()
        if member.restarts >= MAX_RESTARTS:
            raise WorkerLostError(
                f"worker {member.rank} failed again after {MAX_RESTARTS} restart: {why}; its Ray log has more"
            )
        lost = router.release(member.rank) if router is not None else ()
        logger.warning(
            "worker %d lost (%s): starting it anew, %d unfinished requests go out again", member.rank, why, len(lost)
        )
        member.restarts += 1
        self._relaunch(member)

    def _broadcast(self, method: str, *args: Any) -> list[Any]:
        """Call a control method on every worker; a worker that fails is replaced, then asked again."""
        results: dict[int, Any] = {}
        while len(results) < len(self._members):
            self._await_ready()
            missing = [member for member in self._members if member.rank not in results]
            refs = {member.rank: member.call(method, *args) for member in missing}
            for member in missing:
                try:
                    results[member.rank] = ray.get(refs[member.rank], timeout=self._section.worker_timeout_s)
                except ray.exceptions.GetTimeoutError:
                    self._lose(member, f"did not answer {method} for {self._section.worker_timeout_s:g} s", None)
                except ray.exceptions.RayError as error:
                    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
                    if isinstance(cause, TltError) and not isinstance(cause, WorkerLostError):
                        raise cause from error
                    self._lose(member, reason(error), None)
                else:
                    continue
                if method in ("load_weights", "load_draft"):
                    results[member.rank] = None  # a new worker loads what is current as part of its start
        self._await_ready()
        return [results[member.rank] for member in self._members]


def _loop_end(member: Member) -> str:
    try:
        ray.get(member.loop_ref)
    except ray.exceptions.RayError as error:
        return reason(error)
    return "its loop ended"


def _share_cores(located: Sequence[Location], width: int) -> dict[int, tuple[int, ...]]:
    """``width`` cores for each worker, by rank; on a node with too few of them workers share, round robin."""
    next_core: dict[str, int] = {}
    shares = {}
    for rank, location in enumerate(located):
        first = next_core.get(location.node_id, 0)
        next_core[location.node_id] = first + width
        shares[rank] = tuple(location.cores[(first + i) % len(location.cores)] for i in range(width))
    return shares
