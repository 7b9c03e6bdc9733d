"""Seconds of a decode step on this machine, as a function of batch size and number of drafted tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from math import isfinite
from typing import Any, Self

import numpy as np

from tlt.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One measured step."""

    batch: int
    k: int
    draft_s: float
    verify_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeModel:
    """verify = base + a * batch + b * batch * k; draft = fixed + k * (c + d * batch), nothing for k = 0.

    The target is read once per step (base), each request and each draft token adds compute; the drafter runs k times
    in a row. Coefficients are seconds and never negative, so that no arm looks better for being deeper by noise.

    Example:
        >>> model = StepTimeModel(base_s=0.009, per_request_s=0.001, per_draft_token_s=0.0005, draft_base_s=0.002)
        >>> round(model.verify_s(4, 2), 4), model.draft_s(4, 2), model.draft_s(4, 0)
        (0.017, 0.004, 0.0)
    """

    base_s: float
    per_request_s: float
    per_draft_token_s: float
    """Of verifying, per request and draft token."""
    draft_base_s: float
    """Of one drafter forward."""
    draft_per_request_s: float = 0.0
    """Of one drafter forward, per request."""
    draft_fixed_s: float = 0.0
    """Of drafting at all, whatever k."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isfinite(value) or value < 0:
                raise ConfigError(f"{field.name}={value}: a step-time constant is a number of seconds >= 0; calibrate")
        if self.base_s + self.per_request_s == 0:
            raise ConfigError("base_s and per_request_s are both 0: a step takes time; calibrate again")

    def verify_s(self, batch: int, k: int) -> float:
        """Seconds of a step that verifies ``k`` drafts of each of ``batch`` requests."""
        return self.base_s + batch * (self.per_request_s + k * self.per_draft_token_s)

    def draft_s(self, batch: int, k: int) -> float:
        """Seconds of drafting ``k`` tokens for each of ``batch`` requests."""
        if k == 0:
            return 0.0
        return self.draft_fixed_s + k * (self.draft_base_s + batch * self.draft_per_request_s)

    @classmethod
    def fit(
        cls, samples: Sequence[StepSample], *, prior: StepTimeModel | None = None, prior_weight: float = 1e-6
    ) -> StepTimeModel:
        """Least squares of the relative error, coefficients >= 0, steps that took several times too long played down.

        Args:
            samples: measured steps, at least one.
            prior: what to assume where the samples leave it open (all of one batch size, say). Without it a typical
                machine, scaled to the samples.
            prior_weight: number of samples that the prior counts as.

        Raises:
            ConfigError: no samples.
        """
        if not samples:
            raise ConfigError("no step-time samples: run at least one decode step per arm before fitting")
        typical = prior or TYPICAL
        batch, k, draft, verify = (
            np.array([getattr(sample, name) for sample in samples], dtype=np.float64)  # [num_samples]
            for name in ("batch", "k", "draft_s", "verify_s")
        )
        verify = np.maximum(verify, _SHORTEST_S)
        verify_prior = np.array([typical.base_s, typical.per_request_s, typical.per_draft_token_s])
        draft_prior = np.array([typical.draft_fixed_s, typical.draft_base_s, typical.draft_per_request_s])
        design = np.stack([np.ones_like(batch), batch, batch * k], axis=1)  # [num_samples, 3]
        scale = 1.0 if prior else float(np.median(verify / (design @ verify_prior)))
        verify_fit = _fit_relative(design, verify, verify_prior * scale, prior_weight)
        draft_fit, drafting = draft_prior * scale, k > 0
        if drafting.any():
            batch, k = batch[drafting], k[drafting]
            draft = np.maximum(draft[drafting], _SHORTEST_S)
            design = np.stack([np.ones_like(batch), k, k * batch], axis=1)
            scale = 1.0 if prior else float(np.median(draft / (design @ draft_prior)))
            draft_fit = _fit_relative(design, draft, draft_prior * scale, prior_weight)
        return cls(
            base_s=float(verify_fit[0]),
            per_request_s=float(verify_fit[1]),
            per_draft_token_s=float(verify_fit[2]),
            draft_fixed_s=float(draft_fit[0]),
            draft_base_s=float(draft_fit[1]),
            draft_per_request_s=float(draft_fit[2]),
        )

    def to_json(self) -> dict[str, float]:
        """The constants by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        """The reverse of :meth:`to_json`; what is not such a state raises KeyError, TypeError or ValueError."""
        return cls(**{field.name: float(state[field.name]) for field in fields(cls)})


TYPICAL = StepTimeModel(
    base_s=0.010,
    per_request_s=0.0005,
    per_draft_token_s=0.0003,
    draft_base_s=0.0007,
    draft_per_request_s=0.00005,
    draft_fixed_s=0.0002,
)
"""Between a CPU and a GPU; only its proportions matter, and only where nothing has been measured."""

_SHORTEST_S = 1e-7
"""Times below clock resolution would get an unbounded weight in relative error."""

_CLIP = 0.15
"""Relative error from which on a sample counts by its sign only (Huber): a little above ordinary timing noise."""


def _fit_relative(design: Any, times: Any, prior: Any, prior_weight: float) -> Any:
    """Non-negative coefficients that minimise the Huber loss of ``design @ x / times - 1``.

    Args:
        design: [num_samples, num_coefficients]
        times: [num_samples]
        prior: [num_coefficients]
        prior_weight: samples that ``x / prior == 1`` counts as.
    """
    # A prior of zero says "small", not "impossible": the coefficient must stay free to grow.
    unit = np.maximum(prior, max(prior.max() * 1e-3, _SHORTEST_S))
    scaled = design * unit / times[:, None]  # [num_samples, num_coefficients]
    weights = np.ones(len(times))
    solution = prior / unit
    for _ in range(6):
        weighted = scaled * weights[:, None]
        gram = weighted.T @ scaled + prior_weight * np.eye(len(unit))
        moment = weighted.sum(axis=0) + prior_weight * (prior / unit)
        solution = _non_negative(gram, moment)
        weights = _CLIP / np.maximum(np.abs(scaled @ solution - 1.0), _CLIP)
    return solution * unit


def _non_negative(gram: Any, moment: Any) -> Any:
    """The x >= 0 that minimises ``x @ gram @ x / 2 - moment @ x``: exact, by trying each set of positive entries."""
    best, best_loss = np.zeros(len(moment)), 0.0
    for size in range(1, len(moment) + 1):
        for chosen in combinations(range(len(moment)), size):
            index = list(chosen)
            part = np.linalg.solve(gram[np.ix_(index, index)], moment[index])
            # At the minimum over a set the loss is -moment @ x / 2.
            loss = -float(moment[index] @ part) / 2
            if loss < best_loss and (part >= 0).all():
                best, best_loss = np.zeros(len(moment)), loss
                best[index] = part
    return best
