"""Whether two samples of tokens come from one distribution, and whether a difference would have been seen."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_MIN_EXPECTED = 5.0
"""Cochran's rule: smaller cells are pooled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Chi-square test of homogeneity."""

    p_value: float
    power: float
    """Chance to reject at ``alpha`` if the second distribution had 5 % of its mass moved from the likeliest token to
    the others."""


def compare(first: Sequence[int], second: Sequence[int], *, alpha: float, distortion: float = 0.05) -> Comparison:
    """Compare token ids at one position of two samples."""
    cells = _pooled(Counter(first), Counter(second))
    if len(cells) < 2:
        return Comparison(p_value=1.0, power=0.0)
    n, m = len(first), len(second)
    statistic = 0.0
    for a, b in cells:
        share = (a + b) / (n + m)
        statistic += (a - n * share) ** 2 / (n * share) + (b - m * share) ** 2 / (m * share)
    freedom = len(cells) - 1
    shares = sorted(((a + b) / (n + m) for a, b in cells), reverse=True)
    moved = [-distortion] + [distortion * share / (1.0 - shares[0]) for share in shares[1:]]
    per_pair = sum(delta**2 / share for delta, share in zip(moved, shares, strict=True))
    noncentrality = n * m / (n + m) * per_pair
    return Comparison(p_value=chi_square_tail(statistic, freedom), power=_power(freedom, noncentrality, alpha))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm-corrected p-values, in the order given.

    Example:
        >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
        [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = highest
    return corrected


def chi_square_tail(statistic: float, freedom: float) -> float:
    """P(X >= statistic) for chi-square with ``freedom`` degrees of freedom."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _power(freedom: int, noncentrality: float, alpha: float) -> float:
    """Tail of the noncentral chi-square behind the critical value: a Poisson mixture of central ones."""
    low, high = 0.0, 1000.0
    for _ in range(60):
        critical = (low + high) / 2
        low, high = (critical, high) if chi_square_tail(critical, freedom) > alpha else (low, critical)
    mean = noncentrality / 2
    terms = range(int(mean + 10 * math.sqrt(mean) + 20))
    weights = (math.exp(-mean + j * math.log(mean) - math.lgamma(j + 1)) if mean > 0 else float(j == 0) for j in terms)
    return sum(weight * chi_square_tail(critical, freedom + 2 * j) for j, weight in zip(terms, weights, strict=True))


def _pooled(first: Counter[int], second: Counter[int]) -> list[tuple[int, int]]:
    """Counts per token, tokens too rare for the test in one cell."""
    n, m = first.total(), second.total()
    cells, rest = [], (0, 0)
    for token in first.keys() | second.keys():
        pair = first[token], second[token]
        if sum(pair) * min(n, m) / (n + m) >= _MIN_EXPECTED:
            cells.append(pair)
        else:
            rest = rest[0] + pair[0], rest[1] + pair[1]
    if sum(rest) * min(n, m) / (n + m) >= _MIN_EXPECTED:
        cells.append(rest)
    return cells
