"""Scores a batch of responses in processes of its own, with a hard time-out per answer."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

from tlt.config.schema import RewardSection
from tlt.errors import ConfigError, TltError
from trainer.data.prompts import PromptItem
from trainer.rewards.functions import Answer, function_name
from trainer.rewards.process import START_TIMEOUT_S, Job, ProcessSetup, Scored, ScoringProcess, Started

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardBatch:
    """Scores of a batch, in the order in which it was given."""

    total: tuple[float, ...]
    """Weighted sum over the functions, per answer."""
    by_function: dict[str, tuple[float, ...]]
    """Function name -> score per answer, without its weight; 0 where it raised or timed out."""
    errors: dict[str, int]
    """Function name -> answers on which it raised, ended its process or returned no finite number."""
    timeouts: dict[str, int]
    """Function name -> answers that took longer than ``rewards.timeout_s``."""
    seconds: float
    """Wall time of the batch."""


class RewardRunner:
    """Worker processes that live as long as the run. Use it from one thread, and close it.

    Args:
        section: Functions, weights, time-out, number of processes.
        tasks: reasoning-gym task name -> parameters (``data.source.tasks``), for the reward of that name.

    Raises:
        ConfigError: a function is named twice, or a user's function cannot be imported or called.
    """

    def __init__(self, section: RewardSection, *, tasks: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.names = tuple(function_name(spec) for spec in section.functions)
        for name in self.names:
            if self.names.count(name) > 1:
                raise ConfigError(f"rewards.functions: '{name}' is listed twice; list it once with the summed weight")
        self._weights = tuple(spec.weight for spec in section.functions)
        self._timeout_s = section.timeout_s
        self._setup = ProcessSetup(specs=section.functions, tasks=tasks or {}, timeout_s=section.timeout_s)
        self._processes = [ScoringProcess(self._setup) for _ in range(section.num_processes)]
        try:
            while not all(process.started for process in self._processes):
                self._wait()
        except BaseException:
            self.close()
            raise

    def score(self, items: Sequence[PromptItem], completions: Sequence[str]) -> RewardBatch:
        """Score ``completions[i]``, a response to ``items[i]``, with every function.

        Raises:
            TltError: a process that had to be replaced cannot be started again.
        """
        begin = time.monotonic()
        answers = [_answer(item, completion) for item, completion in zip(items, completions, strict=True)]
        queue = deque(
            Job(answer=answer, function=function)
            for answer in range(len(answers))
            for function in range(len(self.names))
        )
        outcomes: dict[Job, Scored] = {}
        try:
            while queue or any(process.job is not None for process in self._processes):
                self._dispatch(queue, answers)
                outcomes.update(self._wait())
        except BaseException:
            # An interrupt leaves jobs in flight, and their results would be taken for the next batch's.
            self.close()
            raise
        return self._collect(outcomes, num_answers=len(answers), seconds=time.monotonic() - begin)

    def close(self) -> None:
        """End the processes. May be called again."""
        while self._processes:
            self._processes.pop().kill()

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _dispatch(self, queue: deque[Job], answers: Sequence[Answer]) -> None:
        for slot, process in enumerate(self._processes):
            if not queue:
                return
            if process.idle:
                job = queue.popleft()
                try:
                    process.send(job, answers[job.answer])
                except OSError:  # it died between two jobs; this one is not to blame
                    queue.appendleft(job)
                    self._replace(slot)

    def _wait(self) -> dict[Job, Scored]:
        """Wait for a message or a deadline of the processes that are not idle; the jobs that this ends."""
        slots = [slot for slot, process in enumerate(self._processes) if not process.idle]
        deadline = min(self._processes[slot].deadline for slot in slots)
        ready = wait(
            [self._processes[slot].connection for slot in slots],
            timeout=max(0.0, deadline - time.monotonic()),
        )
        now = time.monotonic()
        ended: dict[Job, Scored] = {}
        for slot in slots:
            process = self._processes[slot]
            job = process.job
            if process.connection in ready:
                message = process.receive()
            elif now >= process.deadline:
                message = None
            else:
                continue
            if job is None:
                _check_started(message)
            elif isinstance(message, Scored):
                ended[job] = message
            else:
                timed_out = now >= process.deadline
                error = f"took more than {self._timeout_s} s" if timed_out else "ended its process"
                ended[job] = Scored(value=0.0, error=error, timed_out=timed_out)
                self._replace(slot)
        return ended

    def _replace(self, slot: int) -> None:
        self._processes[slot].kill()
        self._processes[slot] = ScoringProcess(self._setup)

    def _collect(self, outcomes: Mapping[Job, Scored], *, num_answers: int, seconds: float) -> RewardBatch:
        by_function: dict[str, tuple[float, ...]] = {}
        errors: dict[str, int] = {}
        timeouts: dict[str, int] = {}
        for function, name in enumerate(self.names):
            scored = [outcomes[Job(answer=answer, function=function)] for answer in range(num_answers)]
            by_function[name] = tuple(outcome.value for outcome in scored)
            failed = [outcome for outcome in scored if outcome.error is not None]
            timeouts[name] = sum(outcome.timed_out for outcome in failed)
            errors[name] = len(failed) - timeouts[name]
            if failed:
                logger.warning(
                    "reward '%s': %d errors and %d time-outs among %d answers, which score 0; the first: %s",
                    name,
                    errors[name],
                    timeouts[name],
                    num_answers,
                    failed[0].error,
                )
        total = tuple(
            sum(weight * by_function[name][answer] for name, weight in zip(self.names, self._weights, strict=True))
            for answer in range(num_answers)
        )
        return RewardBatch(total=total, by_function=by_function, errors=errors, timeouts=timeouts, seconds=seconds)


def _check_started(message: Started | Scored | None) -> None:
    if not isinstance(message, Started):
        raise TltError(
            f"a reward process ended, or did nothing for {START_TIMEOUT_S:.0f} s, while importing the reward "
            "functions; look above for its own message, and for the machine running out of memory"
        )
    if message.invalid is not None:
        raise ConfigError(message.invalid)


def _answer(item: PromptItem, completion: str) -> Answer:
    return Answer(
        prompt=item.messages,
        completion=completion,
        reference=item.answer,
        task=item.task,
        metadata=item.metadata,
    )
