"""Does the engine really use the weights that it was given? A question asked after every update.

An engine that keeps an old copy somewhere (a packed matrix, a captured graph) goes on producing fluent text, so
nothing fails; the run just trains on samples of another policy. The probe compares how the log-probabilities of one
fixed text *moved*: in the learner, from the last checked weights to the new ones, and in the engine. With m the
learner's movement and e the engine's, the slope <e, m> / <m, m> is 1 for an engine that follows and 0 for one that
stands still. Movement, not value, because rounding differs between the two and would hide small updates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tlt.errors import StaleWeightsError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Logprobs = NDArray[np.float64]

_MIN_SLOPE = 0.5
"""Half way between following and standing still."""
_SIGMAS = 3.0
"""The slope must be below the limit by this many standard errors: no verdict on an update lost in rounding noise."""
_MAX_RMS_NATS = 2.0
"""Rounding differs by about 0.1 nats in bfloat16; other weights, or a wrong conversion, by several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Outcome for the worst worker."""

    rms_nats: float
    """Root mean square of engine minus learner log-probabilities."""
    slope: float | None
    """How far the engine followed the update; None while the update is too small to tell."""


class WeightProbe:
    """Checks one pool against one learner on a fixed text."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        """``token_ids``: any text of some dozens of tokens; a prompt of the run will do."""
        self.token_ids = tuple(token_ids)
        self._learner: Logprobs | None = None
        self._engines: list[Logprobs] = []

    def check(self, learner: Logprobs, engines: Sequence[Sequence[float]], version: int) -> ProbeResult:
        """Compare after an update; ``learner`` and each of ``engines`` (one per worker) are [num_tokens - 1].

        Raises:
            StaleWeightsError: a worker does not use the new weights.
        """
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
            self._learner, self._engines = learner, values
        return ProbeResult(rms_nats=max(rms), slope=None if slopes is None else min(slopes))

    def _slopes(self, learner: Logprobs, engines: list[Logprobs], version: int) -> list[float] | None:
        if self._learner is None:
            return None
        movement = learner - self._learner
        size = float(movement @ movement)
        if size == 0.0:
            return None
        slopes = []
        for worker, (engine, base) in enumerate(zip(engines, self._engines, strict=True)):
            followed = engine - base
            slope = float(followed @ movement) / size
            error = _rms(followed - slope * movement) / math.sqrt(size)
            if slope + _SIGMAS * error < _MIN_SLOPE:
                raise StaleWeightsError(
                    f"worker {worker} does not use the weights of policy version {version}: its log-probabilities "
                    f"followed the update by {slope:.2f} +- {error:.2f} of what the learner's did (1 is right)"
                )
            if _SIGMAS * error > _MIN_SLOPE:
                return None
            slopes.append(slope)
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
