"""Between an engine's scheduler and the policy that chooses how many tokens to draft: times steps, keeps counts.

One engine step t verifies the drafts made at the end of step t-1, then drafts K_t tokens:

    schedule t:   choose K_t          verify drafts of t-1   |  draft K_t tokens
    update t:     reward of K_{t-1} = tokens of t / (draft time of t-1 + verify time of t)

so the reward of a choice is known one step later. Steps that contain prefill give no reward: their time says
nothing about drafting.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tlt.spec.attribution import EngineStep, RewardAttributor, VerifiedStep
from tlt.spec.totals import SpecTotals
from tlt.spec.watchdog import AcceptanceWatchdog

logger = logging.getLogger(__name__)


class DraftPolicy(Protocol):
    """Chooses the number of draft tokens of a step. Implementers: ``SpecPolicy`` and :class:`FixedK`."""

    def choose(self, batch: int) -> int:
        """Draft tokens per request for a batch of running requests."""
        ...

    def observe(self, step: VerifiedStep) -> None:
        """Learn what a choice has brought."""
        ...


@dataclass(frozen=True, slots=True)
class FixedK:
    """Always the same number, for measurements."""

    k: int

    def choose(self, batch: int) -> int:
        """See the protocol."""
        return self.k

    def observe(self, step: VerifiedStep) -> None:
        """Nothing to learn."""


class DraftClock:
    """Seconds that the drafter took in the last step; written where it runs, read where the step is booked."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0


@dataclass(frozen=True, slots=True)
class _Begun:
    begin_s: float
    k: int
    has_prefill: bool


class SpecController:
    """Books the steps of one engine. Times are readings of one monotonic clock, in seconds."""

    def __init__(self, policy: DraftPolicy, clock: DraftClock, max_draft_tokens: int) -> None:
        self._policy = policy
        self._clock = clock
        self._drafted = [0] * max_draft_tokens
        self._accepted = [0] * max_draft_tokens
        self._steps_by_k: dict[int, int] = {}
        self._draft_s = 0.0
        self._verify_s = 0.0
        self._num_collapses = 0
        self._attributor = RewardAttributor()
        self.watchdog = AcceptanceWatchdog()
        """Told by the engine what acceptance to expect; when it does not come, nothing is drafted any more."""
        self._begun: _Begun | None = None
        self.forced: int | None = None
        """K of every step, whatever policy and watchdog say, for a measurement. The policy learns nothing meanwhile."""

    def begin_step(self, now: float, *, batch: int, has_prefill: bool) -> int:
        """A step has been scheduled; returns how many tokens to draft at its end."""
        k = self._choose(batch) if self.forced is None else self.forced
        self._clock.seconds = 0.0
        self._begun = _Begun(now, k, has_prefill)
        return k

    def end_step(self, now: float, *, emitted: Sequence[tuple[int, int]]) -> None:
        """The step is done. ``emitted``: (drafts verified, tokens emitted) of each request in it."""
        begun = self._begun
        assert begun is not None
        draft_s = self._clock.seconds
        verify_s = now - begun.begin_s - draft_s
        self._steps_by_k[begun.k] = self._steps_by_k.get(begun.k, 0) + 1
        self._draft_s += draft_s
        self._verify_s += verify_s
        drafted, accepted = self._count(emitted)
        self._watch(drafted, accepted)
        reward = self._attributor.push(
            EngineStep(
                batch=len(emitted),
                k=begun.k,
                num_tokens=sum(num_tokens for _, num_tokens in emitted),
                draft_s=draft_s,
                verify_s=verify_s,
                has_prefill=begun.has_prefill,
                num_drafted=drafted,
                num_accepted=accepted,
            )
        )
        if reward is not None and self.forced is None:
            self._policy.observe(reward)

    def _choose(self, batch: int) -> int:
        return 0 if self.watchdog.collapsed else self._policy.choose(batch)

    def _watch(self, drafted: tuple[int, ...], accepted: tuple[int, ...]) -> None:
        if not drafted or self.watchdog.collapsed:
            return
        check = self.watchdog.observe(drafted, accepted)
        if check is not None and self.watchdog.collapsed:
            self._num_collapses += 1
            logger.warning(
                "drafter version %d: acceptance length %.2f where %.2f was expected, after %s; "
                "drafting is off for this version",
                check.version,
                check.measured,
                check.expected,
                check.event,
            )

    def forget_step(self) -> None:
        """Something other than a step happened (new weights, a pause): the next step rewards no choice."""
        self._attributor.reset()

    @property
    def totals(self) -> SpecTotals:
        """Counts since the engine started."""
        return SpecTotals(
            num_drafted=tuple(self._drafted),
            num_accepted=tuple(self._accepted),
            steps_by_k=dict(self._steps_by_k),
            draft_s=self._draft_s,
            verify_s=self._verify_s,
            num_collapses=self._num_collapses,
        )

    def _count(self, emitted: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        most = max((num_drafts for num_drafts, _ in emitted), default=0)
        drafted, accepted = [0] * most, [0] * most
        for num_drafts, num_tokens in emitted:
            for position in range(num_drafts):
                drafted[position] += 1
            for position in range(min(num_tokens - 1, num_drafts)):
                accepted[position] += 1
        for position in range(most):
            self._drafted[position] += drafted[position]
            self._accepted[position] += accepted[position]
        return tuple(drafted), tuple(accepted)
