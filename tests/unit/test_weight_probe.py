"""The weight probe: tells a stale engine from a noisy one, and stays silent when it cannot."""

from __future__ import annotations

import numpy as np
import pytest

from tlt.errors import StaleWeightsError
from trainer.weight_probe import WeightProbe

NUM = 63
BASE = np.random.default_rng(0).normal(-3.0, 1.0, NUM)
MOVE = np.random.default_rng(1).normal(0.0, 0.3, NUM)
ROUNDING = np.random.default_rng(2).normal(0.0, 0.05, NUM)


def fresh_probe() -> WeightProbe:
    probe = WeightProbe(range(NUM + 1))
    assert probe.check(BASE, [BASE + ROUNDING], 1).slope is None
    return probe


def test_an_engine_that_follows_has_slope_one() -> None:
    """Constant rounding error cancels: the slope is exactly 1, and the rms is that of the rounding alone."""
    result = fresh_probe().check(BASE + MOVE, [BASE + MOVE + ROUNDING], 2)
    assert result.slope == pytest.approx(1.0)
    assert result.rms_nats == pytest.approx(np.sqrt(np.mean(ROUNDING**2)))


def test_an_engine_that_stands_still_is_stale() -> None:
    """Catches the stale packed lm_head: its values are still close to right, only the movement gives it away."""
    with pytest.raises(StaleWeightsError, match=r"worker 0 .* followed the learner's by 0\.00"):
        fresh_probe().check(BASE + MOVE, [BASE + ROUNDING], 2)


def test_the_stale_worker_is_named_among_good_ones() -> None:
    """Catches a check of the first worker only."""
    probe = WeightProbe(range(NUM + 1))
    probe.check(BASE, [BASE, BASE], 1)
    with pytest.raises(StaleWeightsError, match="worker 1"):
        probe.check(BASE + MOVE, [BASE + MOVE, BASE], 2)


def test_updates_below_rounding_add_up_until_they_can_be_judged() -> None:
    """Small updates give no verdict and keep their base; a stale engine is caught once enough has moved.

    Hand-computed: the gap is rms(ROUNDING) = g, one update moves 1.6 g, so the third (4.8 g) is judged.
    """
    move = MOVE * (8 * np.sqrt(np.mean(ROUNDING**2)) / np.sqrt(np.mean(MOVE**2)))
    probe = fresh_probe()
    for step in (1, 2):
        assert probe.check(BASE + move * step / 5, [BASE + ROUNDING], step + 1).slope is None
    with pytest.raises(StaleWeightsError, match="followed the learner's by 0.00"):
        probe.check(BASE + move * 3 / 5, [BASE + ROUNDING], 4)


@pytest.mark.parametrize("seed", range(50))
def test_rounding_of_a_good_engine_never_raises_an_alarm(seed: int) -> None:
    """Catches false alarms that stop a good run: rounding that changes with every update, common to all tokens too."""
    rng = np.random.default_rng(seed)
    probe = WeightProbe(range(NUM + 1))
    learner = BASE
    judged = 0
    for step in range(1, 200):
        rounding = rng.normal(0.0, 0.05, NUM) + rng.normal(0.0, 0.05)
        result = probe.check(learner, [learner + rounding], step)
        judged += result.slope is not None
        learner = learner + rng.normal(0.0, 0.05, NUM) + rng.normal(0.0, 0.05)
    assert judged >= 1


def test_wrong_weights_are_refused_outright() -> None:
    """Catches a conversion error (transposed, wrong shard) already at the first sync, where nothing has moved yet."""
    with pytest.raises(StaleWeightsError, match="does not compute what the learner computes"):
        WeightProbe(range(NUM + 1)).check(BASE, [BASE[::-1] - 5.0], 1)


def test_nan_is_refused() -> None:
    """Catches NaN log-probabilities slipping through comparisons that are all false."""
    with pytest.raises(StaleWeightsError):
        WeightProbe(range(NUM + 1)).check(BASE, [np.full(NUM, np.nan)], 1)
