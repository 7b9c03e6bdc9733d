"""What decides in the training loop of a warm-up: when it ends, and what each epoch sees."""

from __future__ import annotations

from itertools import islice

import pytest

from trainer import warmup_training
from trainer.warmup_training import Plateau, shuffled_batches


def test_flat_measurements_end_the_training() -> None:
    """Catches a patience that is off by one, and noise that counts as progress."""
    plateau = Plateau(patience=2)
    assert [plateau.observe(value, 0.1) for value in (2.0, 2.05, 2.2, 2.25, 2.1)] == [False] * 4 + [True]


def test_slow_progress_is_progress() -> None:
    """Catches a comparison with the last measurement only: steady growth below the noise would end the training."""
    plateau = Plateau(patience=3)
    assert not any(plateau.observe(2.0 + 0.04 * index, 0.1) for index in range(30))


def test_every_row_once_per_epoch_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rows that are dropped at the end of an epoch, and an order that repeats."""
    monkeypatch.setattr(warmup_training, "collate", list)
    rows = list(range(7))
    batches = list(islice(shuffled_batches(rows, 4, seed=3), 7))  # four epochs
    assert {len(batch) for batch in batches} == {4}
    flat = [row for batch in batches for row in batch]
    epochs = [flat[start : start + 7] for start in range(0, 28, 7)]
    assert all(sorted(epoch) == rows for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert list(islice(shuffled_batches(rows, 4, seed=3), 7)) == batches
