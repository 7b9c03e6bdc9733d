"""Which tokens a head can draft."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tlt.errors import ConfigError


def choose_draft_vocab(
    counts: Tensor,  # [vocab]
    size: int,
    always: Sequence[int] = (),
) -> Tensor:
    """The ``size`` most frequent tokens with all of ``always`` among them, ascending, int64 [size].

    Ties go to the lower id, and so does what is left when fewer than ``size`` tokens occur.

    Raises:
        ConfigError: ``size`` is larger than the vocabulary or has no room for ``always``, or an id is out of range.
    """
    num_tokens = len(counts)
    required = sorted(set(always))
    if not 1 <= size <= num_tokens:
        raise ConfigError(f"draft vocabulary: size {size} must be from 1 to the vocabulary's {num_tokens} tokens")
    if len(required) > size:
        raise ConfigError(
            f"draft vocabulary: size {size} has no room for the {len(required)} tokens that are always in it; raise it"
        )
    if required and (required[0] < 0 or required[-1] >= num_tokens):
        raise ConfigError(f"draft vocabulary: the ids {required} must be from 0 to {num_tokens - 1}")
    order = torch.sort(counts.cpu(), descending=True, stable=True).indices  # [vocab]
    ids = torch.tensor(required, dtype=torch.int64)
    others = order[~torch.isin(order, ids)]
    return torch.cat([ids, others[: size - len(ids)]]).sort().values
