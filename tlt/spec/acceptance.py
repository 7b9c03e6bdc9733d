"""How many drafted tokens the target accepts, by position, with old evidence fading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt


def geometric_rate(acceptance_length: float, k: int) -> float:
    """The constant acceptance rate p with ``1 + p + p**2 + ... + p**k == acceptance_length``.

    The sum grows with p, so bisection finds it; lengths outside [1, k + 1] give 0 and 1.
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if geometric_length(middle, k) < acceptance_length:
            low = middle
        else:
            high = middle
    return high


def geometric_length(rate: float, k: int) -> float:
    """Acceptance length of ``k`` drafts that are each accepted with ``rate``: ``1 + rate + ... + rate**k``."""
    return sum(rate**position for position in range(k + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptancePrior:
    """What is believed of a drafter before it has been seen at work."""

    rate: float = 0.5
    """Acceptance rate of the first position."""
    weight: float = 2.0
    """Number of verified drafts that this belief counts as."""
    chain_weight: float = 4.0
    """Verified drafts that the estimate of one position counts as for the next: drafts of similar depth fare alike."""


class AcceptanceStats:
    """Per-position counts with exponential forgetting, and what they predict.

    Position i is reached only where all before it were accepted, so what is estimated is the conditional rate: of the
    requests that accepted position i - 1 and had a draft at i, the share that accepted it.
    """

    def __init__(self, num_positions: int, *, prior: AcceptancePrior | None = None, memory: float = 2000.0) -> None:
        """``memory`` is the number of verified drafts per position over which evidence fades."""
        self._memory = memory
        self._prior = prior or AcceptancePrior()
        self._num_positions = num_positions
        self._clear()

    def _clear(self) -> None:
        self._trials = [0.0] * self._num_positions
        self._hits = [0.0] * self._num_positions
        self._expected: list[float] | None = None
        self._optimistic: list[float] = []

    def reset(self, prior: AcceptancePrior) -> None:
        """Another drafter: forget everything, believe ``prior``."""
        self._prior = prior
        self._clear()

    def discount(self, max_trials: float) -> None:
        """The target changed: keep each estimate, but with the weight of at most ``max_trials`` verified drafts."""
        for position in range(self._num_positions):
            if self._trials[position] > max_trials:
                self._hits[position] *= max_trials / self._trials[position]
                self._trials[position] = max_trials
        self._expected = None

    def observe(self, num_drafted_per_position: Sequence[int], num_accepted_per_position: Sequence[int]) -> None:
        """Learn from one step: per position, requests with a draft there and requests that accepted up to there."""
        reached = num_drafted_per_position[0] if num_drafted_per_position else 0
        if not reached:
            return
        for position, drafted in enumerate(num_drafted_per_position[: self._num_positions]):
            if not drafted:
                break
            accepted = num_accepted_per_position[position]
            tried = min(reached, drafted)
            if tried:
                keep = self._memory / (self._memory + tried)
                self._trials[position] = self._trials[position] * keep + tried
                self._hits[position] = self._hits[position] * keep + accepted
            reached = accepted
        self._expected = None

    def trials(self, position: int) -> float:
        """Verified drafts, faded, that the estimate of ``position`` (from 0) rests on."""
        return self._trials[position]

    def expected_tokens(self, k: int) -> float:
        """Tokens per request and step when ``k`` are drafted: 1 + the sum of products of conditional rates."""
        if self._expected is None:
            self._predict()
        assert self._expected is not None
        return self._expected[k]

    def optimistic_tokens(self, k: int) -> float:
        """As :meth:`expected_tokens`, with each rate one standard error up: high where little has been seen."""
        if self._expected is None:
            self._predict()
        return self._optimistic[k]

    def conditional_rates(self) -> tuple[float, ...]:
        """Estimated rate per position; one that was never tried takes over from the position before."""
        return tuple(rate for rate, _ in self._rates())

    def _rates(self) -> list[tuple[float, float]]:
        """Per position the estimated rate and the number of verified drafts it counts as."""
        rates = []
        rate, weight = self._prior.rate, self._prior.weight
        for trials, hits in zip(self._trials, self._hits, strict=True):
            rate = (hits + weight * rate) / (trials + weight)
            rates.append((rate, trials + weight))
            weight = self._prior.chain_weight
        return rates

    def _predict(self) -> None:
        expected, optimistic = [1.0], [1.0]
        product, upper_product = 1.0, 1.0
        for rate, weight in self._rates():
            product *= rate
            upper_product *= min(1.0, rate + sqrt(rate * (1.0 - rate) / (weight + 1.0)))
            expected.append(expected[-1] + product)
            optimistic.append(optimistic[-1] + upper_product)
        self._expected, self._optimistic = expected, optimistic
