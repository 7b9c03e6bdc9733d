"""Wall time of the driver by phase: every second is charged to exactly one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum


class Phase(StrEnum):
    """What the driver is doing. The last three are shown live; in a breakdown they count as ``other``."""

    GENERATE = "generate"
    REWARD = "reward"
    LEARN = "learn"
    SYNC = "sync"
    START = "start"
    EVAL = "eval"
    SAVE = "save"


BREAKDOWN_PHASES = (Phase.GENERATE, Phase.REWARD, Phase.LEARN, Phase.SYNC)


class PhaseClock:
    """Charges time to the innermost open phase, and to ``other`` while none is open. For one thread.

    A phase that opens inside another stops the outer one's clock, so nothing is counted twice: the rollout inside
    a training step counts as ``generate`` and only the rest of the step as ``learn``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts counting now; ``clock`` gives seconds that never go back."""
        self._clock = clock
        self._mark_s = clock()
        self._open: list[Phase] = []
        self._spent_s: dict[str, float] = dict.fromkeys([*BREAKDOWN_PHASES, "other"], 0.0)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Charge the time inside the ``with`` block, also when it raises."""
        self._charge()
        self._open.append(phase)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def breakdown_s(self) -> dict[str, float]:
        """Seconds so far: generate, reward, learn, sync, other. They add up to the time since the start."""
        self._charge()
        return {str(name): spent for name, spent in self._spent_s.items()}

    def _charge(self) -> None:
        now = self._clock()
        name = self._open[-1] if self._open and self._open[-1] in BREAKDOWN_PHASES else "other"
        self._spent_s[name] += now - self._mark_s
        self._mark_s = now
