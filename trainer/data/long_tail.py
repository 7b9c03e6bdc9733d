"""Task ``chain_sum_long_tail``: reasoning-gym's chain sums with an exponential number of terms.

reasoning-gym draws the number of terms evenly. Real reasoning workloads have many short responses and a few
very long ones; an exponential number of terms gives worked solutions with such a tail of lengths.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset
from reasoning_gym.factory import DATASETS, register_dataset

LONG_TAIL_TASK = "chain_sum_long_tail"


@dataclass
class LongTailChainSumConfig(ChainSumConfig):
    """Parameters of the task; the base class's, which reasoning-gym requires, and one more."""

    max_terms: int = 30
    min_digits: int = 2
    max_digits: int = 2
    mean_terms: float = 7.5
    """Before clipping to ``min_terms..max_terms``."""

    def validate(self) -> None:
        """Raises ``AssertionError``, which is how reasoning-gym reports bad parameters."""
        super().validate()
        assert self.mean_terms > self.min_terms, "mean_terms must be above min_terms"


class LongTailChainSum(ChainSumDataset):
    """The items are chain_sum's own and carry its name, so its scorer applies."""

    def __getitem__(self, idx: int) -> dict[str, Any]:
        """Item ``idx``, which depends on ``seed + idx`` alone."""
        config, item_seed = self.config, self.seed + idx
        # A text seed: the number itself seeds the terms below, and the two draws must not go together.
        rng = random.Random(f"num_terms {item_seed}")
        extra = round(rng.expovariate(1.0 / (config.mean_terms - config.min_terms)))
        num_terms = min(config.min_terms + extra, config.max_terms)
        fixed = ChainSumConfig(
            min_terms=num_terms,
            max_terms=num_terms,
            min_digits=config.min_digits,
            max_digits=config.max_digits,
            allow_negation=config.allow_negation,
            seed=item_seed,
            size=1,
        )
        item: dict[str, Any] = ChainSumDataset(fixed)[0]
        item["metadata"]["source_index"] = idx
        return item


def register_long_tail() -> None:
    """Make the task known to reasoning-gym; safe to call again."""
    if LONG_TAIL_TASK not in DATASETS:
        register_dataset(LONG_TAIL_TASK, LongTailChainSum, LongTailChainSumConfig)
