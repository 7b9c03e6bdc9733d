"""Which step pays for which drafts.

A scheduler step verifies the drafts of the step before and then drafts anew::

    step t      verify drafts of t-1    draft K_t
    step t+1    verify drafts of t      draft K_t+1
                        ^ tokens               arm of t: tokens of t+1 / (draft time of t + verify time of t+1)

So nothing is known about K_t before step t+1 is over, and the times that belong to one arm come from two steps.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    """What one scheduler step did, as the engine sees it."""

    batch: int
    """Requests that the step advanced."""
    k: int
    """Tokens per request that the step drafted at its end, to be verified by the next one."""
    num_tokens: int
    """Tokens that the step emitted, drafts that it accepted included."""
    draft_s: float
    """Seconds of drafting at its end."""
    verify_s: float
    """Seconds of everything else: target forward, sampling, bookkeeping."""
    has_prefill: bool
    """Prompt tokens were part of it, so its times say little about decoding."""
    num_drafted: tuple[int, ...] = ()
    """Per position: requests whose draft at that position the step verified."""
    num_accepted: tuple[int, ...] = ()
    """Per position: requests that accepted their drafts up to and including it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedStep:
    """One arm with all that it cost and gave.

    Example:
        >>> step = VerifiedStep(batch=2, k=1, num_tokens=3, draft_s=0.002, verify_s=0.010,
        ...                     num_drafted=(2,), num_accepted=(1,))
        >>> round(step.tokens_per_s)
        250
    """

    batch: int
    """Requests in the verifying step."""
    k: int
    """Tokens per request that had been drafted: the arm."""
    num_tokens: int
    """Tokens that the verifying step emitted."""
    draft_s: float
    """Seconds that drafting took, in the step before the verifying one."""
    verify_s: float
    """Seconds of the verifying step without its own drafting."""
    num_drafted: tuple[int, ...]
    """Per position: requests with a draft at that position."""
    num_accepted: tuple[int, ...]
    """Per position: requests that accepted their drafts up to and including it."""

    @property
    def tokens_per_s(self) -> float:
        """The reward of the arm."""
        return self.num_tokens / (self.draft_s + self.verify_s)


class RewardAttributor:
    """Turns the sequence of engine steps into rewards of arms."""

    def __init__(self) -> None:
        self._before: EngineStep | None = None

    def push(self, step: EngineStep) -> VerifiedStep | None:
        """Take the newest step; returns the reward of the arm of the step before, if it counts.

        A pair with prefill in either half does not count: the first half's drafting then ran over prompt tokens, the
        second half's time is mostly prefill.
        """
        before, self._before = self._before, step
        if before is None or before.has_prefill or step.has_prefill or step.batch == 0:
            return None
        return VerifiedStep(
            batch=step.batch,
            k=before.k,
            num_tokens=step.num_tokens,
            draft_s=before.draft_s,
            verify_s=step.verify_s,
            num_drafted=step.num_drafted,
            num_accepted=step.num_accepted,
        )

    def reset(self) -> None:
        """The chain is broken (drafter swapped, weights changed, engine slept): the next step has no step before."""
        self._before = None
