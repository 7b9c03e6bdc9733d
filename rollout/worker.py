"""A rollout worker: one engine and the cooperative loop that drives it.

Two kinds of threads meet here. The loop thread (:meth:`RolloutWorker.run`) alone touches the engine. Every other
method is called from control threads; it puts a command into the inbox, or reads what the loop has published, and
never touches the engine itself. So nothing races with an engine step, and weights change only between two steps.

    control threads                     loop thread
    submit / abort / load_weights  ->   inbox   -> apply -> engine
    poll                           <-   outbox  <- finished responses
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rollout.engine import Generated, RolloutEngine
from rollout.weight_sync import DraftPacket, WeightPacket
from tlt.errors import WorkerLostError
from tlt.spec.totals import SpecTotals
from tlt.types import Response, RolloutRequest, WorkerReport

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Command:
    """Work for the loop thread; the future carries its result, or its error, back to the caller."""

    apply: Callable[[RolloutEngine], Any]
    future: Future[Any]


@dataclass(slots=True)
class _InFlight:
    request: RolloutRequest
    begin_s: float


class RolloutWorker:
    """One engine with its request table. A plain class; :mod:`rollout.actors` makes it a Ray actor."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._ready: Future[None] = Future()
        self._in_flight: dict[str, _InFlight] = {}
        self._stopping = False
        # Everything below is published by the loop and read by poll(), under this condition.
        self._published = threading.Condition()
        self._outbox: list[Response] = []
        self._turns = 0
        self._num_generated_tokens = 0
        self._spec = SpecTotals()
        self._closed = False

    # ---- loop thread

    def run(self, build_engine: Callable[[], RolloutEngine]) -> None:
        """Build the engine and drive it until :meth:`stop`. Errors rise, after every waiting caller has been told."""
        try:
            engine = build_engine()
            self._ready.set_result(None)
            while not self._stopping:
                self._turn(engine)
            engine.close()
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            raise
        finally:
            self._close()

    def _turn(self, engine: RolloutEngine) -> None:
        """One turn: commands first, then one engine step; an engine without work waits for a command.

        Idle work (drafter training) belongs between the two: it may take a turn whenever the engine has nothing to do.
        """
        has_work = engine.num_running + engine.num_waiting > 0
        self._apply_commands(engine, wait=not has_work)
        result = engine.step()
        now = time.monotonic()
        responses = [self._respond(engine, generated, now) for generated in result.finished]
        with self._published:
            self._turns += 1
            self._num_generated_tokens += result.num_new_tokens
            self._spec = engine.spec_totals
            self._outbox.extend(responses)
            if responses:
                self._published.notify_all()

    def _apply_commands(self, engine: RolloutEngine, *, wait: bool) -> None:
        try:
            command = self._inbox.get(block=wait)
            while True:
                self._apply(engine, command)
                command = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _apply(self, engine: RolloutEngine, command: _Command) -> None:
        try:
            result = command.apply(engine)
        except Exception as error:  # actor edge: the caller gets the error through the future
            logger.exception("worker %d: a command failed", self._rank)
            command.future.set_exception(error)
        else:
            command.future.set_result(result)

    def _respond(self, engine: RolloutEngine, generated: Generated, now: float) -> Response:
        in_flight = self._in_flight.pop(generated.request_id)
        return Response(
            request_id=generated.request_id,
            prompt_key=in_flight.request.prompt_key,
            token_ids=generated.token_ids,
            logprobs=generated.logprobs,
            finish_reason=generated.finish_reason,
            policy_version=engine.policy_version,
            worker=self._rank,
            generate_s=now - in_flight.begin_s,
            acceptance_length=generated.acceptance_length,
            draft_version=engine.draft_version,
        )

    def _close(self) -> None:
        with self._published:
            self._closed = True
            self._published.notify_all()
        try:
            while True:
                self._inbox.get_nowait().future.set_exception(self._gone())
        except queue.Empty:
            return

    # ---- control threads

    def wait_ready(self, packet: WeightPacket | None = None, draft: DraftPacket | None = None) -> None:
        """Block until the engine is up, with the given weights and drafter; raises what its construction raised."""
        self._ready.result()
        if packet is not None:
            self.load_weights(packet)
        if draft is not None:
            self.load_draft(draft)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Hand requests to the engine; raises ``ValueError`` if the engine refuses one."""

        def add(engine: RolloutEngine) -> None:
            for request in requests:
                engine.add(request)
                self._in_flight[request.request_id] = _InFlight(request, time.monotonic())

        self._call(add)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests; no response will come for them."""

        def drop(engine: RolloutEngine) -> None:
            engine.abort(request_ids)
            for request_id in request_ids:
                self._in_flight.pop(request_id, None)

        self._call(drop)

    def load_weights(self, packet: WeightPacket) -> float:
        """Install new policy weights between two steps; returns the seconds it took."""
        return self._time(lambda engine: engine.load_weights(packet))

    def load_draft(self, packet: DraftPacket) -> float:
        """Replace the drafter between two steps, while requests run; returns the seconds it took."""
        return self._time(lambda engine: engine.load_draft(packet))

    def policy_state(self) -> Mapping[str, Any] | None:
        """What the speculation policy has learned."""
        state: Mapping[str, Any] | None = self._call(lambda engine: engine.policy_state())
        return state

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of ``token_ids[1:]`` under the weights in use."""
        logprobs: list[float] = self._call(lambda engine: engine.score(token_ids))
        return logprobs

    def poll(self, timeout_s: float) -> WorkerReport:
        """Report at once if responses are waiting, else when one comes, else after ``timeout_s``."""
        with self._published:
            self._published.wait_for(lambda: self._outbox or self._closed, timeout_s)
            responses, self._outbox = tuple(self._outbox), []
            return WorkerReport(
                worker=self._rank,
                responses=responses,
                turns=self._turns,
                num_generated_tokens=self._num_generated_tokens,
                spec=self._spec,
            )

    def stop(self) -> None:
        """Let the loop end after the current turn; unfinished requests are dropped."""

        def leave(engine: RolloutEngine) -> None:
            self._stopping = True

        self._call(leave)

    def _call(self, apply: Callable[[RolloutEngine], Any]) -> Any:
        command = _Command(apply, Future())
        with self._published:
            if self._closed:
                raise self._gone()
            self._inbox.put(command)
        return command.future.result()

    def _time(self, apply: Callable[[RolloutEngine], None]) -> float:
        """Seconds that a command took on the loop thread, the wait for its turn not counted."""

        def timed(engine: RolloutEngine) -> float:
            begin = time.monotonic()
            apply(engine)
            return time.monotonic() - begin

        seconds: float = self._call(timed)
        return seconds

    def _gone(self) -> WorkerLostError:
        return WorkerLostError(f"worker {self._rank} has left its loop; it takes no more commands")
