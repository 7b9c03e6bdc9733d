"""Counts of speculative decoding: what was drafted and accepted, how often each K was chosen, where the time went.

Counts only grow, so a period is the difference of two readings, and workers are pooled by adding. Acceptance length
means everywhere: mean accepted draft tokens per verification + 1. A verification is one request in one engine step
that had drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecTotals:
    """Counts since an engine started.

    Example:
        >>> SpecTotals(num_drafted=(10, 10), num_accepted=(6, 3)).acceptance_length
        1.9
    """

    num_drafted: tuple[int, ...] = ()
    """Per position: verifications whose draft reached it."""
    num_accepted: tuple[int, ...] = ()
    """Per position: verifications that accepted it, and so everything before it."""
    steps_by_k: Mapping[int, int] = field(default_factory=dict)
    """Engine steps by the number of draft tokens that was chosen."""
    draft_s: float = 0.0
    """Seconds in the drafter."""
    verify_s: float = 0.0
    """Seconds of engine steps outside the drafter, prefill included."""
    num_collapses: int = 0
    """Times that the watchdog has switched drafting off."""

    @property
    def acceptance_length(self) -> float | None:
        """Mean accepted draft tokens per verification + 1; None before the first verification."""
        if not self.num_drafted or not self.num_drafted[0]:
            return None
        return 1.0 + sum(self.num_accepted) / self.num_drafted[0]

    def __add__(self, other: SpecTotals) -> SpecTotals:
        """Pool two workers."""
        return self._combine(other, 1)

    def __sub__(self, earlier: SpecTotals) -> SpecTotals:
        """What happened since an earlier reading of the same engine."""
        return self._combine(earlier, -1)

    def _combine(self, other: SpecTotals, sign: int) -> SpecTotals:
        keys = sorted(set(self.steps_by_k) | set(other.steps_by_k))
        steps = {k: self.steps_by_k.get(k, 0) + sign * other.steps_by_k.get(k, 0) for k in keys}
        return SpecTotals(
            num_drafted=_zip_add(self.num_drafted, other.num_drafted, sign),
            num_accepted=_zip_add(self.num_accepted, other.num_accepted, sign),
            steps_by_k={k: count for k, count in steps.items() if count},
            draft_s=self.draft_s + sign * other.draft_s,
            verify_s=self.verify_s + sign * other.verify_s,
            num_collapses=self.num_collapses + sign * other.num_collapses,
        )

    def metrics(self) -> dict[str, float]:
        """Under their names in ``metrics.jsonl``; positions count from 1."""
        metrics: dict[str, float] = {
            "spec/draft_s": self.draft_s,
            "spec/verify_s": self.verify_s,
            "spec/collapses_count": self.num_collapses,
        }
        num_steps = sum(self.steps_by_k.values())
        if num_steps:
            metrics["spec/mean_k"] = sum(k * count for k, count in self.steps_by_k.items()) / num_steps
            metrics |= {f"spec/share_k{k}": count / num_steps for k, count in self.steps_by_k.items()}
        if self.acceptance_length is not None:
            metrics["spec/acceptance_length"] = self.acceptance_length
            metrics["spec/num_verifications"] = self.num_drafted[0]
            for position, (drafted, accepted) in enumerate(zip(self.num_drafted, self.num_accepted, strict=True), 1):
                if drafted:
                    metrics[f"spec/acceptance_pos{position}"] = accepted / drafted
        return metrics


def _zip_add(a: tuple[int, ...], b: tuple[int, ...], sign: int) -> tuple[int, ...]:
    length = max(len(a), len(b))
    pad_a, pad_b = a + (0,) * (length - len(a)), b + (0,) * (length - len(b))
    return tuple(x + sign * y for x, y in zip(pad_a, pad_b, strict=True))
