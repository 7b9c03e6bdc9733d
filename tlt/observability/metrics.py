"""Metrics as counts and sums that are merged first and reduced once.

Keys are ``family/name_unit``, for example ``rollout/generate_s`` or ``reward/timeouts_count``: lower case,
times in ``_s`` or ``_ms``, rates in ``_per_s``, parts of a whole in ``_share`` (0 to 1). Averaging averages
is wrong as soon as the parts differ in size, so parts travel as :class:`Mean` (sum and count) and only
:func:`reduce_metrics` divides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """Average of ``count`` values with this ``sum``; NaN when there are none.

    Example:
        >>> merge(Mean.of([1.0]), Mean.of([4.0, 4.0])).value
        3.0
    """

    sum: float
    count: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """From the values themselves."""
        items = list(values)
        return cls(sum=math.fsum(items), count=len(items))

    @property
    def value(self) -> float:
        """The average."""
        return self.sum / self.count if self.count else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """A total."""

    sum: float

    @property
    def value(self) -> float:
        """The total."""
        return self.sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Max:
    """The largest value seen."""

    max: float

    @property
    def value(self) -> float:
        """The largest value."""
        return self.max


Metric = Mean | Sum | Max


def merge(left: Metric, right: Metric) -> Metric:
    """Both parts as one. Raises ``TypeError`` for different kinds: one key means two things somewhere."""
    match left, right:
        case Mean(), Mean():
            return Mean(sum=left.sum + right.sum, count=left.count + right.count)
        case Sum(), Sum():
            return Sum(sum=left.sum + right.sum)
        case Max(), Max():
            return Max(max=max(left.max, right.max))
    raise TypeError(f"cannot merge {left} with {right}: use one kind of metric per key")


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge key by key; a key that only some parts have is kept."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for key, metric in part.items():
            merged[key] = merge(merged[key], metric) if key in merged else metric
    return merged


def reduce_metrics(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The one division: metrics -> plain numbers for :class:`tlt.observability.sinks.MetricsWriter`."""
    return {key: metric.value for key, metric in metrics.items()}
