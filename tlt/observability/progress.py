"""What a person watches while a run goes on.

``Progress`` (the loop's side) -> ``ProgressState`` (plain data) -> ``render_line`` (pure) -> a view:
``LiveView`` redraws one line on a terminal, ``PlainView`` logs it now and then elsewhere. A line per finished
step is logged either way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tlt.observability.phases import Phase

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressState:
    """Where a run stands. Times are readings of one monotonic clock, in seconds."""

    num_steps: int
    num_workers: int
    started_s: float
    phase: Phase = Phase.START
    step: int = 0
    """Step in progress or last finished, from 1; 0 before the first."""
    step_started_s: float | None = None
    """None between steps."""
    num_timed_steps: int = 0
    """Steps finished by this process; fewer than ``step`` after a resume."""
    timed_steps_s: float = 0.0
    """Their total duration."""
    responses_done: int = 0
    responses_total: int = 0
    """Of the rollout in progress; 0 before it starts."""
    tokens_per_s: float | None = None
    """Generated tokens of all workers, latest figure."""
    acceptance_length: float | None = None
    """Of speculative decoding in the latest rollout; None without drafts."""
    workers_busy: int = 0
    reward: float | None = None
    """Mean of the last finished step."""


def time_left_s(state: ProgressState, now_s: float) -> float | None:
    """Estimate from the mean of the finished steps; None before the first. Evaluations are not in it."""
    if state.num_timed_steps == 0:
        return None
    mean_s = state.timed_steps_s / state.num_timed_steps
    current_s = 0.0 if state.step_started_s is None else max(0.0, mean_s - (now_s - state.step_started_s))
    return current_s + mean_s * (state.num_steps - state.step)


def render_line(state: ProgressState, now_s: float) -> str:
    """The state as one line of text.

    Example: ``step 3/30 · generate · responses 41/64 · workers 1 busy 1 idle · 512 tok/s · reward 0.412 ·
    0:01:33 elapsed · about 0:14:02 left``.
    """
    parts = [f"step {state.step}/{state.num_steps}", state.phase.value]
    if state.phase in (Phase.GENERATE, Phase.EVAL) and state.responses_total:
        parts.append(f"responses {state.responses_done}/{state.responses_total}")
        parts.append(f"workers {state.workers_busy} busy {state.num_workers - state.workers_busy} idle")
    return " · ".join(parts + _figures(state, now_s))


def render_finished_step(state: ProgressState, duration_s: float, now_s: float) -> str:
    """The line that a finished step leaves in the log."""
    head = f"step {state.step}/{state.num_steps} finished in {duration_s:.1f} s"
    return " · ".join([head, *_figures(state, now_s)])


def _figures(state: ProgressState, now_s: float) -> list[str]:
    figures = []
    if state.tokens_per_s is not None:
        figures.append(f"{state.tokens_per_s:.0f} tok/s")
    if state.acceptance_length is not None:
        figures.append(f"accept length {state.acceptance_length:.2f}")
    if state.reward is not None:
        figures.append(f"reward {state.reward:.3f}")
    figures.append(f"{_duration(now_s - state.started_s)} elapsed")
    left_s = time_left_s(state, now_s)
    if left_s is not None:
        figures.append(f"about {_duration(left_s)} left")
    return figures


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


class ProgressView(Protocol):
    """Shows states; on the screen from ``__enter__`` to ``__exit__``."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, state: ProgressState) -> None:
        """Take note of the newest state; cheap enough for every poll."""
        ...


class LiveView:
    """One line at the bottom of a terminal, redrawn twice a second, gone at the end.

    Log lines must go through the same console (see :func:`tlt.observability.logs.setup_logging`).
    """

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._state: ProgressState | None = None
        # stdout is left alone: it may be piped somewhere, and results go there after the display has ended.
        self._live = Live(
            get_renderable=self._render,
            console=console,
            refresh_per_second=2,
            transient=True,
            redirect_stdout=False,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, state: ProgressState) -> None:
        """Drawn at the next refresh."""
        self._state = state

    def _render(self) -> Text:
        return Text("" if self._state is None else render_line(self._state, self._clock()), style="cyan")


class PlainView:
    """Log lines, at most one every ``interval_s``: for files, pipes and job logs."""

    def __init__(self, interval_s: float = 5.0, clock: Clock = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._logged_s: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, state: ProgressState) -> None:
        """Log the state unless the last line is too recent."""
        now = self._clock()
        if self._logged_s is None or now - self._logged_s >= self._interval_s:
            self._logged_s = now
            logger.info("%s", render_line(state, now))


def open_view(console: Console) -> ProgressView:
    """A live line on a terminal, plain lines elsewhere."""
    return LiveView(console) if console.is_interactive else PlainView()


class Progress:
    """The training loop's side: keeps the state, shows it as it changes, logs each finished step.

    Example::

        with Progress(open_view(console), num_steps=30, num_workers=2) as progress:
            progress.begin_step(1)
            progress.enter(Phase.GENERATE)
            progress.rollout(done=41, total=64, busy=1, tokens_per_s=512.0)
            progress.end_step(reward=0.4)
    """

    def __init__(self, view: ProgressView, *, num_steps: int, num_workers: int, clock: Clock = time.monotonic) -> None:
        """The view must read the same ``clock``."""
        self._view = view
        self._clock = clock
        self.state = ProgressState(num_steps=num_steps, num_workers=num_workers, started_s=clock())

    def __enter__(self) -> Self:
        self._view.__enter__()
        self._view.show(self.state)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._view.__exit__(kind, error, trace)

    def enter(self, phase: Phase) -> None:
        """The driver turns to something else; figures of an earlier rollout are forgotten."""
        self._set(replace(self.state, phase=phase, responses_done=0, responses_total=0, workers_busy=0))

    def begin_step(self, step: int) -> None:
        """Step ``step`` starts, counted from 1."""
        self.state = replace(self.state, step=step, step_started_s=self._clock())

    def rollout(
        self,
        *,
        done: int,
        total: int,
        busy: int,
        tokens_per_s: float | None,
        acceptance_length: float | None = None,
    ) -> None:
        """The pool reports."""
        self._set(
            replace(
                self.state,
                responses_done=done,
                responses_total=total,
                workers_busy=busy,
                tokens_per_s=tokens_per_s,
                acceptance_length=acceptance_length,
            )
        )

    def end_step(self, reward: float | None) -> None:
        """The step in progress is finished, with this mean reward."""
        begun_s = self.state.step_started_s
        assert begun_s is not None, "end_step without begin_step"
        now = self._clock()
        self.state = replace(
            self.state,
            step_started_s=None,
            num_timed_steps=self.state.num_timed_steps + 1,
            timed_steps_s=self.state.timed_steps_s + now - begun_s,
            reward=reward,
        )
        logger.info("%s", render_finished_step(self.state, now - begun_s, now))

    def _set(self, state: ProgressState) -> None:
        self.state = state
        self._view.show(state)
