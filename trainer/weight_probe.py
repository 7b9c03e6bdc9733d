"""Does the engine really use the weights that it was given? A question asked after every update.

An engine that keeps an old copy somewhere (a packed matrix, a captured graph) goes on producing fluent text, so
nothing fails; the run just trains on samples of another policy. The probe compares how the log-probabilities of one
fixed text *moved* since the last verdict: with m the learner's movement and e the engine's, the slope
<e, m> / <m, m> is 1 for an engine that follows and 0 for one that stands still.

Rounding (the engine's weights have fewer bits) moves the engine too, by about the gap between it and the learner.
So updates smaller than several gaps are not judged; they add up until they are larger, and the limit leaves room.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tlt.errors import StaleWeightsError, TltError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Logprobs = NDArray[np.float64]

_MIN_SLOPE = 0.25
_MIN_MOVEMENT = 4.0
"""Smallest movement that is judged, in units of the largest gap between engine and learner so far."""
_MAX_RMS_NATS = 2.0
"""Rounding differs by about 0.1 nats in bfloat16; other weights, or a wrong conversion, by several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Outcome for the worst worker."""

    rms_nats: float
    """Root mean square of engine minus learner log-probabilities."""
    slope: float | None
    """How far the engine followed the learner; None while the learner has not moved enough to tell."""


class WeightProbe:
    """Checks one pool against one learner on a fixed text."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        """``token_ids``: any text of some dozens of tokens; a prompt of the run will do."""
        self.token_ids = tuple(token_ids)
        self._learner: Logprobs | None = None
        self._engines: list[Logprobs] = []
        self._gap = 0.0
        """Largest root mean square of engine minus learner at any base."""

    def check(self, learner: Logprobs, engines: Sequence[Sequence[float]], version: int) -> ProbeResult:
        """Compare after an update; ``learner`` and each of ``engines`` (one per worker) are [num_tokens - 1].

        Raises:
            StaleWeightsError: a worker does not use the new weights.
            TltError: the learner itself computes no finite numbers.
        """
        if not np.isfinite(learner).all():
            raise TltError(
                f"the policy has diverged: with version {version} the learner's own log-probabilities are not finite; "
                "lower learner.learning_rate or learner.max_grad_norm"
            )
        values = [np.asarray(engine, dtype=np.float64) for engine in engines]
        rms = [_rms(engine - learner) for engine in values]
        for worker, worker_rms in enumerate(rms):
            if not worker_rms < _MAX_RMS_NATS:
                raise StaleWeightsError(
                    f"worker {worker} does not compute what the learner computes with policy version {version}: "
                    f"log-probabilities of the probe text differ by {worker_rms:.2f} nats (limit {_MAX_RMS_NATS})"
                )
        slopes = self._slopes(learner, values, version)
        if slopes is not None or self._learner is None:
            # An update too small to judge leaves the base as it is: movements add up until they can be judged.
            self._learner, self._engines, self._gap = learner, values, max(self._gap, *rms)
        return ProbeResult(rms_nats=max(rms), slope=None if slopes is None else min(slopes))

    def _slopes(self, learner: Logprobs, engines: list[Logprobs], version: int) -> list[float] | None:
        if self._learner is None:
            return None
        movement = learner - self._learner
        if _rms(movement) <= _MIN_MOVEMENT * self._gap:
            return None
        slopes = [
            float((engine - base) @ movement / (movement @ movement))
            for engine, base in zip(engines, self._engines, strict=True)
        ]
        for worker, slope in enumerate(slopes):
            if slope < _MIN_SLOPE:
                raise StaleWeightsError(
                    f"worker {worker} does not use the weights of policy version {version}: its log-probabilities of "
                    f"the probe text followed the learner's by {slope:.2f} (1 is right, under {_MIN_SLOPE} is an error)"
                )
        return slopes


def learner_logprobs(model: PreTrainedModel, token_ids: Sequence[int]) -> Logprobs:
    """The learner's log-probabilities of ``token_ids[1:]``, [num_tokens - 1], without gradient or dropout."""
    import torch

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            ids = torch.tensor([list(token_ids)], device=model.device)  # [1, num_tokens]
            logits = model(input_ids=ids).logits[0, :-1].float()  # [num_tokens - 1, vocab]
            logprobs = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    finally:
        model.train(was_training)
    values: Logprobs = logprobs.cpu().numpy().astype(np.float64)
    return values


def _rms(values: Logprobs) -> float:
    return math.sqrt(float(np.mean(values**2)))
