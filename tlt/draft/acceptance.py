"""Acceptance of a head as served; see :mod:`tlt.draft.loss` for why counts on responses are exactly that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import torch

from tlt.draft.data import PackedBatch
from tlt.draft.loss import FrozenTarget, ttt_loss
from tlt.draft.model import Eagle3Head


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAcceptance:
    """Counts per position of the chain; position j is the (j + 1)-th draft.

    Example:
        >>> ServedAcceptance(num_chains=(10, 10), num_accepted=(6, 3)).acceptance_length(2)
        1.9
    """

    num_chains: tuple[int, ...] = ()
    """Chains that could be drafted this far within their response."""
    num_accepted: tuple[int, ...] = ()
    """Of those, chains whose drafts up to and including this one are all accepted."""

    @property
    def per_position(self) -> tuple[float, ...]:
        """Chance that the drafts up to and including each position are all accepted."""
        return tuple(a / max(n, 1) for n, a in zip(self.num_chains, self.num_accepted, strict=True))

    def acceptance_length(self, k: int) -> float:
        """Mean accepted draft tokens per verification of ``k`` drafts, + 1."""
        return 1.0 + sum(self.per_position[:k])

    def stderr(self, k: int) -> float:
        """Standard error of :meth:`acceptance_length`.

        Taken as if chains were independent. The rates are nested, so var(sum) = sum over pairs of p_deeper (1 - p).
        """
        rates, count = self.per_position[:k], max(self.num_chains[0] if self.num_chains else 0, 1)
        variance = sum(
            rates[max(a, b)] * (1.0 - rates[min(a, b)]) for a in range(len(rates)) for b in range(len(rates))
        )
        return sqrt(variance / count)

    def __add__(self, other: ServedAcceptance) -> ServedAcceptance:
        """Pool two measurements of chains of the same length; an empty one adds nothing."""
        if not self.num_chains:
            return other
        return ServedAcceptance(
            num_chains=tuple(a + b for a, b in zip(self.num_chains, other.num_chains, strict=True)),
            num_accepted=tuple(a + b for a, b in zip(self.num_accepted, other.num_accepted, strict=True)),
        )


@torch.no_grad()
def evaluate_acceptance(
    head: Eagle3Head, target: FrozenTarget, batches: Sequence[PackedBatch], *, num_steps: int, bf16: bool = True
) -> ServedAcceptance:
    """Acceptance of greedy chains of ``num_steps`` drafts on the counted anchors of all batches."""
    total = ServedAcceptance()
    for batch in batches:
        with torch.autocast(batch.token_ids.device.type, torch.bfloat16, enabled=bf16):
            result = ttt_loss(head, target, batch, num_steps=num_steps, step_decay=1.0)
        total += ServedAcceptance(num_chains=result.num_chains, num_accepted=result.num_accepted)
    return total
