"""The weight probe: tells a stale engine from a noisy one, and stays silent when it cannot."""

from __future__ import annotations

import numpy as np
import pytest

from tlt.errors import StaleWeightsError
from trainer.weight_probe import WeightProbe

NUM = 63
BASE = np.random.default_rng(0).normal(-3.0, 1.0, NUM)
MOVE = np.random.default_rng(1).normal(0.0, 0.05, NUM)
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
    """Catches the stale packed lm_head: its values are close to right (5 % off), only the movement gives it away."""
    with pytest.raises(StaleWeightsError, match=r"worker 0 .* followed the update by 0\.00"):
        fresh_probe().check(BASE + MOVE, [BASE + ROUNDING], 2)


def test_the_stale_worker_is_named_among_good_ones() -> None:
    """Catches a check of the first worker only."""
    probe = WeightProbe(range(NUM + 1))
    probe.check(BASE, [BASE, BASE], 1)
    with pytest.raises(StaleWeightsError, match="worker 1"):
        probe.check(BASE + MOVE, [BASE + MOVE, BASE], 2)


def test_updates_below_the_noise_add_up_until_they_can_be_judged() -> None:
    """A tiny update gives no verdict and keeps its base; a stale engine is caught once enough has moved."""
    probe = fresh_probe()
    noise = np.random.default_rng(3)
    caught_at = None
    for step in range(1, 60):
        engine = BASE + ROUNDING + noise.normal(0.0, 0.02, NUM)
        try:
            result = probe.check(BASE + MOVE * step * 0.05, [engine], step + 1)
        except StaleWeightsError:
            caught_at = step
            break
        assert result.slope is None
    assert caught_at is not None
    assert caught_at > 1


def test_wrong_weights_are_refused_outright() -> None:
    """Catches a conversion error (transposed, wrong shard) already at the first sync, where nothing has moved yet."""
    with pytest.raises(StaleWeightsError, match="does not compute what the learner computes"):
        WeightProbe(range(NUM + 1)).check(BASE, [BASE[::-1] - 5.0], 1)


def test_nan_is_refused() -> None:
    """Catches NaN log-probabilities slipping through comparisons that are all false."""
    with pytest.raises(StaleWeightsError):
        WeightProbe(range(NUM + 1)).check(BASE, [np.full(NUM, np.nan)], 1)
