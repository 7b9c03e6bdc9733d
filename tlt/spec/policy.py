"""The policy that chooses how many tokens to draft at every engine step.

A bandit per batch-size bucket, as in BEG-MAB (TLT paper, section 4), whose arms are numbers of draft tokens; 0 is an
arm. The reward of an arm is tokens per second: tokens of the step that verified its drafts over the time of drafting
and verifying them. Both sides are estimated where they can be learned fastest:

    value(batch, k) = batch * expected_tokens(k) / (model_s(batch, k) * correction(bucket, k))

- ``expected_tokens`` belongs to the drafter, whatever the batch, so every bucket's verifications teach all of them;
- ``model_s`` is the machine's step-time model, calibrated before or fitted on the way: arms that it shows to be
  hopeless are never tried;
- ``correction`` is the median over a window of measured over modelled time of that very arm and bucket, so that one
  step that was five times too slow changes nothing.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tlt.spec.acceptance import AcceptancePrior, AcceptanceStats, geometric_rate
from tlt.spec.attribution import VerifiedStep
from tlt.spec.buckets import bucket_of
from tlt.spec.step_time import StepSample, StepTimeModel


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecPolicySettings:
    """What a user may turn; the defaults are tested on simulated machines (tests/unit/test_spec_policy.py)."""

    arms: tuple[int, ...] = (0, 1, 2, 3, 5, 7)
    probe: float = 0.25
    """Share of steps in which an arm is tried whose later drafts were hardly ever tested, as long as it would be the
    best one if acceptance were one standard error higher than estimated."""
    probe_until: float = 30.0
    """Tests of a position after which it counts as known."""
    hysteresis: float = 0.01
    """An arm takes over only if it promises this share more than the one in use."""
    explore: float = 0.02
    """Share of steps in which another arm that comes near the best is tried."""
    explore_margin: float = 0.85
    """Near means at least this share of the best value."""
    explore_when_off: float = 0.005
    """Share of steps in which drafting is tried although it does not pay; bounds what a useless drafter costs."""


class SpecPolicy:
    """Chooses K; learns from :class:`VerifiedStep`. Deterministic for a given ``rng`` and history."""

    def __init__(self, settings: SpecPolicySettings, model: StepTimeModel | None, rng: random.Random) -> None:
        self._settings = settings
        self._rng = rng
        self._model = model
        self._acceptance = AcceptanceStats(max(settings.arms), prior=_UNKNOWN)
        self._corrections: dict[tuple[int, int], _WindowMedian] = {}
        self._current: dict[int, int] = {}
        self._fitter = _Fitter(settings.arms) if model is None else None

    @property
    def model(self) -> StepTimeModel | None:
        """The step-time model in use."""
        return self._model

    @property
    def expected_tokens(self) -> list[float]:
        """Entry k: expected tokens per verification of k drafts, as learned so far."""
        return [self._acceptance.expected_tokens(k) for k in range(max(self._settings.arms) + 1)]

    def choose(self, batch: int) -> int:
        """Draft tokens per request for a batch of running requests (0: none)."""
        if self._model is None:
            assert self._fitter is not None
            return self._fitter.next_arm()
        bucket = bucket_of(batch)
        arms = self._settings.arms
        seconds = {k: self._seconds(batch, k) for k in arms}
        values = {k: self._acceptance.expected_tokens(k) / seconds[k] for k in arms}
        best = max(values, key=values.__getitem__)
        current = self._current.get(bucket, best)
        if values[best] > values[current] * (1.0 + self._settings.hysteresis):
            current = best
        self._current[bucket] = current
        return self._probe(current, values[current], seconds) or self._explore(current, values)

    def value(self, batch: int, k: int) -> float:
        """Expected tokens per second of an arm. Needs a model."""
        return batch * self._acceptance.expected_tokens(k) / self._seconds(batch, k)

    def observe(self, step: VerifiedStep) -> None:
        """Learn from a step."""
        if step.num_drafted:
            self._acceptance.observe(step.num_drafted, step.num_accepted)
        if step.k not in self._settings.arms:
            return
        seconds = step.draft_s + step.verify_s
        if self._fitter is not None:
            sample = StepSample(batch=step.batch, k=step.k, draft_s=step.draft_s, verify_s=step.verify_s)
            model = self._fitter.add(sample)
            if model is not None:
                # Corrections belong to the model that they correct.
                self._model, self._corrections = model, {}
                for old in self._fitter.samples:
                    self._correct(old.batch, old.k, old.draft_s + old.verify_s)
                return
        if self._model is not None:
            self._correct(step.batch, step.k, seconds)

    def on_new_drafter(self, expected_acceptance_length: float | None, k: int = 3) -> None:
        """The drafter was replaced: acceptance starts anew, from what is expected of it at ``k`` if that is known."""
        known = expected_acceptance_length is not None
        prior = AcceptancePrior(rate=geometric_rate(expected_acceptance_length or 1.0, k)) if known else _UNKNOWN
        self._acceptance.reset(prior)
        self._current.clear()

    def on_weights_changed(self) -> None:
        """The target has new weights: what is known of acceptance still holds roughly, and is open to revision."""
        self._acceptance.discount(_KEPT_TESTS)

    def to_json(self) -> dict[str, Any]:
        """What holds for this model on this machine with any drafter: step times."""
        return {
            "model": None if self._model is None else self._model.to_json(),
            "corrections": [
                {"bucket": bucket, "k": k, "median": window.median, "count": len(window)}
                for (bucket, k), window in sorted(self._corrections.items())
            ],
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any], settings: SpecPolicySettings, rng: random.Random) -> SpecPolicy:
        """Continue with an earlier policy's step times. Raises ``KeyError`` or ``TypeError`` for other content."""
        model = None if state["model"] is None else StepTimeModel.from_json(state["model"])
        policy = cls(settings, model, rng)
        for entry in state["corrections"]:
            count = min(int(entry["count"]), _PRIOR_STEPS)
            policy._corrections[int(entry["bucket"]), int(entry["k"])] = _WindowMedian([float(entry["median"])] * count)
        return policy

    def _seconds(self, batch: int, k: int) -> float:
        assert self._model is not None
        return _step_s(self._model, batch, k) * self._correction(bucket_of(batch), k)

    def _probe(self, current: int, value: float, seconds: Mapping[int, float]) -> int | None:
        """The next larger arm, if too little is known of its drafts and it could be better."""
        above = next((k for k in self._settings.arms if k > current), None)
        if above is None or self._acceptance.trials(above - 1) >= self._settings.probe_until:
            return None
        could_be_better = self._acceptance.optimistic_tokens(above) / seconds[above] > value
        return above if could_be_better and self._rng.random() < self._settings.probe else None

    def _explore(self, current: int, values: Mapping[int, float]) -> int:
        draw = self._rng.random()
        if current == 0 and draw < self._settings.explore_when_off:
            return self._settings.arms[1]
        if draw < self._settings.explore:
            bound = values[current] * self._settings.explore_margin
            near = [k for k, value in values.items() if k != current and value >= bound]
            if near:
                return self._rng.choice(near)
        return current

    def _correct(self, batch: int, k: int, seconds: float) -> None:
        assert self._model is not None
        key = bucket_of(batch), k
        window = self._corrections.get(key)
        if window is None:
            window = self._corrections[key] = _WindowMedian()
        window.add(seconds / _step_s(self._model, batch, k))

    def _correction(self, bucket: int, k: int) -> float:
        window = self._corrections.get((bucket, k))
        if window is None or not len(window):
            return 1.0
        weight = len(window) / (len(window) + _PRIOR_STEPS)
        return weight * window.median + (1.0 - weight)


_UNKNOWN = AcceptancePrior(rate=0.6)
"""Of a drafter that was never seen: good enough that it is tried."""
_KEPT_TESTS = 100.0
_PRIOR_STEPS = 16
"""Measured steps that the model is worth."""
_WINDOW = 128
_FEW = 5


def _step_s(model: StepTimeModel, batch: int, k: int) -> float:
    return model.verify_s(batch, k) + model.draft_s(batch, k)


class _WindowMedian:
    """Median of the last values, kept sorted so that reading it costs nothing."""

    __slots__ = ("_order", "_sorted")

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._order: deque[float] = deque()
        self._sorted: list[float] = []
        for value in values:
            self.add(value)

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, value: float) -> None:
        if len(self._order) == _WINDOW:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]
        self._order.append(value)
        insort(self._sorted, value)

    @property
    def median(self) -> float:
        """The smallest while there are few: two slow steps in a row must not condemn an arm for ever."""
        return self._sorted[(len(self._sorted) - 1) // 2 if len(self._sorted) >= _FEW else 0]


class _Fitter:
    """Fits a step-time model on the way, for a machine that was not calibrated.

    Tries a few arms in turn first, then fits again whenever the number of samples has doubled.
    """

    _TRIES = 3
    """Of each arm, so that one outlier does not make its median."""
    _KEPT = 512

    def __init__(self, arms: tuple[int, ...]) -> None:
        self.samples: deque[StepSample] = deque(maxlen=self._KEPT)
        self._left = dict.fromkeys((arms[0], arms[1], arms[len(arms) // 2]), self._TRIES)
        self._num_seen = 0
        self._next_fit = 0

    def next_arm(self) -> int:
        """Arms to try before there is a model: none, the fewest, and a middle number of drafts."""
        return next(arm for arm, left in self._left.items() if left > 0)

    def add(self, sample: StepSample) -> StepTimeModel | None:
        """Book a sample; returns a new model when it is time for one."""
        self.samples.append(sample)
        self._num_seen += 1
        if sample.k in self._left:
            self._left[sample.k] -= 1
        if max(self._left.values()) > 0 or self._num_seen < self._next_fit:
            return None
        self._next_fit = self._num_seen * 2
        return StepTimeModel.fit(self.samples)
