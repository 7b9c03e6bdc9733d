"""One reward process: started with spawn, fed one answer at a time, killed when an answer takes too long.

Why a loop of our own and not a process pool: time-outs of pools are per batch or none, and those of pebble
end in SIGTERM plus seconds of waiting and break the pool when an idle process dies.
"""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import numbers
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tlt.config.schema import RewardSpec
from tlt.errors import ConfigError
from trainer.rewards.functions import Answer, RewardFunction, load_function

START_TIMEOUT_S = 120.0
"""Importing the libraries takes 1-10 s, more on a busy machine."""
_ORPHAN_GRACE_S = 1.0
"""How much later than the runner's own time-out a process ends itself, should the runner be gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSetup:
    """What a reward process needs to load its functions."""

    specs: tuple[RewardSpec, ...]
    tasks: Mapping[str, Mapping[str, Any]]
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One answer to be scored by one function, both known to the caller by their position."""

    answer: int
    function: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """First message of a process. ``invalid`` says what is wrong with a user's function, if anything is."""

    invalid: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The reward, or why there is none (then ``value`` is 0)."""

    value: float
    error: str | None
    timed_out: bool = False


class ScoringProcess:
    """The runner's end: one process, the job it has, and the time by which its next message is due."""

    def __init__(self, setup: ProcessSetup) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._timeout_s = setup.timeout_s
        self._process = context.Process(target=_serve, args=(theirs, setup), name="tlt-reward", daemon=True)
        self._process.start()
        theirs.close()
        self.started = False
        self.job: Job | None = None
        self.deadline = time.monotonic() + START_TIMEOUT_S

    @property
    def idle(self) -> bool:
        """Whether it can take a job."""
        return self.started and self.job is None

    def send(self, job: Job, answer: Answer) -> None:
        """Hand over a job; its time starts now. Raises ``OSError`` if the process is gone."""
        self.connection.send((job.function, answer))
        self.job = job
        self.deadline = time.monotonic() + self._timeout_s

    def receive(self) -> Started | Scored | None:
        """The next message, which ends the job; None if the process has died."""
        try:
            message: Started | Scored = self.connection.recv()
        except (EOFError, OSError):
            return None
        if isinstance(message, Started):
            self.started = True
        self.job = None
        return message

    def kill(self) -> None:
        """End it at once, together with the children that a function may have started."""
        pid = self._process.pid
        assert pid is not None
        # Also when it has died by itself: its children may live. There is no such group while the process has not
        # come as far as making it, or when nothing of it is left.
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self.connection.close()


def _serve(connection: Connection, setup: ProcessSetup) -> None:
    """Main function of the process: ends when the runner closes its end, or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    os.setpgid(0, 0)  # so that kill() reaches children too
    with Path(os.devnull).open("w") as sink:

        def end_after(seconds: float) -> None:
            # A thread in C: it ends the process even while a regular expression holds the GIL, so that
            # nothing outlives a driver that was killed.
            faulthandler.dump_traceback_later(seconds + _ORPHAN_GRACE_S, exit=True, file=sink)

        end_after(START_TIMEOUT_S)
        try:
            functions = [load_function(spec, setup.tasks) for spec in setup.specs]
        except ConfigError as error:
            connection.send(Started(invalid=str(error)))
            return
        connection.send(Started(invalid=None))
        while True:
            faulthandler.cancel_dump_traceback_later()
            try:
                position, answer = connection.recv()
                end_after(setup.timeout_s)
                connection.send(_score(functions[position], answer))
            except (EOFError, BrokenPipeError):  # from recv or send: the runner is gone
                return


def _score(function: RewardFunction, answer: Answer) -> Scored:
    try:
        value = function(answer)
    except Exception as error:  # noqa: BLE001 a scorer may raise anything; the runner counts and logs it
        return Scored(value=0.0, error=f"{type(error).__name__}: {error}")
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        return Scored(value=0.0, error=f"returned {value!r:.80}, which is not a finite number")
    return Scored(value=float(value), error=None)
