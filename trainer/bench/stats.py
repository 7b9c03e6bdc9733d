"""Ratios of paired measurements and how sure they are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Median of paired ratios, with a 95 % percentile bootstrap interval."""

    value: float
    low: float
    high: float


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0) -> Ratio:
    """Median over pairs of numerator / denominator.

    The pairs are resampled, never the two sides apart: drift of the machine hits both sides of a pair.

    Example:
        >>> paired_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
        Ratio(value=2.0, low=2.0, high=2.0)
    """
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    rng = random.Random(seed)
    medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    return Ratio(value=median(ratios), low=medians[int(0.025 * _RESAMPLES)], high=medians[int(0.975 * _RESAMPLES) - 1])
