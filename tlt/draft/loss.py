"""EAGLE-3's training objective with true test-time training, computed on packed rows.

Training-time test (arXiv 2503.01840, section 3.2): step 0 reads the target's aux states; step j >= 1 reads the head's
own output of step j - 1, as the served chain does. A query of step j at anchor i sees the step-0 keys of positions
<= i of its segment, and the keys of steps 1..j *of its own anchor*: the diagonal. Plain causal attention over each
step's keys instead would show it other chains' drafts, which it never meets when served.

Acceptance is measured on the way. For greedy drafts and responses sampled from the target, the chance that a draft
equals the token that was really sampled is exactly the chance that it would have been accepted, and a chain goes on
only where it matched. So teacher forcing on the response is the free-running chain, and counts are "as served".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.draft.data import PADDING, PackedBatch
from tlt.draft.model import Eagle3Head

_HIDDEN_FROM = -1e9
"""Score of a key that a query may not see; finite, so that rows of padding give no NaN."""


class FrozenTarget:
    """What training needs of the target: embedding and output projection, never changed."""

    def __init__(
        self,
        embedding: Tensor,  # [vocab, hidden]
        lm_head: Tensor,  # [vocab, hidden]
    ) -> None:
        self._embedding = embedding.detach()
        self._lm_head = lm_head.detach()

    def embed(self, token_ids: Tensor) -> Tensor:
        """[..., hidden] float32."""
        return torch.nn.functional.embedding(token_ids, self._embedding).float()

    def draft_logits(
        self,
        final_hidden: Tensor,  # [..., hidden]
        draft_token_ids: Tensor,  # [draft_vocab]
    ) -> Tensor:
        """The target's scores of the draft vocabulary, [..., draft_vocab] float32."""
        rows = self._lm_head[draft_token_ids]  # [draft_vocab, hidden]
        return torch.nn.functional.linear(final_hidden.to(rows.dtype), rows).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class TttResult:
    """Loss and, per step of the chain, what would have been accepted."""

    loss: Tensor  # []
    num_chains: tuple[int, ...]
    """Chains that reach the step within their response, whatever was accepted before."""
    num_accepted: tuple[int, ...]
    """Of those, chains whose drafts up to and including the step all match."""


class _DiagonalContext:
    """:class:`tlt.draft.model.AttentionContext` of test-time training."""

    def __init__(self, batch: PackedBatch) -> None:
        segments = batch.segments
        index = torch.arange(segments.shape[1], device=segments.device)
        same = (segments.unsqueeze(2) == segments.unsqueeze(1)) & (segments != PADDING).unsqueeze(1)
        visible = same & (index.unsqueeze(1) >= index.unsqueeze(0))  # [num_rows, query, key]
        self._bias = torch.where(visible, 0.0, _HIDDEN_FROM).unsqueeze(1)  # [num_rows, 1, query, key]
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See the protocol; the first call is step 0."""
        groups = query.shape[1] // key.shape[1]
        self._keys.append(key.repeat_interleave(groups, dim=1))
        self._values.append(value.repeat_interleave(groups, dim=1))
        query = query * query.shape[-1] ** -0.5
        scores = [(query @ self._keys[0].transpose(-1, -2)).float() + self._bias]
        scores += [(query * own).sum(-1, keepdim=True).float() for own in self._keys[1:]]
        weights = torch.cat(scores, dim=-1).softmax(dim=-1).to(value.dtype)  # [rows, heads, positions, positions + j]
        num_positions = key.shape[2]
        mixed = weights[..., :num_positions] @ self._values[0]
        for step, own in enumerate(self._values[1:]):
            mixed = mixed + weights[..., num_positions + step, None] * own
        return mixed


def ttt_loss(
    head: Eagle3Head, target: FrozenTarget, batch: PackedBatch, *, num_steps: int, step_decay: float
) -> TttResult:
    """Soft cross-entropy to the target over chains of ``num_steps`` drafts from every counted anchor.

    The target's distribution is restricted to the draft vocabulary and renormalised there; anchors whose true next
    token cannot be drafted bear no loss at that step, as no draft could be accepted there (EAGLE-3's reduced
    vocabulary, section 3.1). Each step's loss is a mean over its chains, weighted by ``step_decay ** step``.
    """
    draft_token_ids = head.draft_token_ids
    context = _DiagonalContext(batch)
    embeddings = target.embed(batch.token_ids)  # [num_rows, num_positions, hidden]
    hidden = head.combine(batch.aux_hidden)
    with torch.no_grad():
        teacher = _Teacher(target, batch, draft_token_ids, num_steps)
    matched = batch.counted
    loss = hidden.new_zeros(())
    num_chains, num_accepted = [], []
    total_weight = 0.0
    for step in range(num_steps):
        # The last ``step + 1`` positions have no such token; what is rolled in there is masked out below.
        normed, hidden = head(embeddings.roll(-1 - step, dims=1), hidden, batch.positions + step, context)
        chains = batch.counted & _reaches(batch, step + 2)
        logits = head.logits(normed[chains]).float()  # [num_chains, draft_vocab]
        labels = batch.token_ids.roll(-2 - step, dims=1)[chains]  # [num_chains]
        draftable = head.t2d[labels]
        if draftable.any():
            probs = teacher.probs(chains, step)[draftable]
            weight = step_decay**step
            loss = loss + weight * -(probs * logits[draftable].log_softmax(-1)).sum(-1).mean()
            total_weight += weight
        hits = torch.zeros_like(matched)
        hits[chains] = draft_token_ids[logits.argmax(-1)] == labels
        matched = matched & hits
        num_chains.append(int(chains.sum()))
        num_accepted.append(int(matched.sum()))
    return TttResult(
        loss=loss / max(total_weight, 1e-9), num_chains=tuple(num_chains), num_accepted=tuple(num_accepted)
    )


class _Teacher:
    """The target's distributions over the draft vocabulary, computed once and read by every step with a shift."""

    def __init__(self, target: FrozenTarget, batch: PackedBatch, draft_token_ids: Tensor, num_steps: int) -> None:
        needed = torch.zeros_like(batch.counted)
        for step in range(num_steps):
            needed |= (batch.counted & _reaches(batch, step + 2)).roll(1 + step, dims=1)
        self._rows = torch.full(needed.shape, -1, device=needed.device)
        self._rows[needed] = torch.arange(int(needed.sum()), device=needed.device)
        self._probs = target.draft_logits(batch.final_hidden[needed], draft_token_ids).softmax(-1)

    def probs(self, chains: Tensor, step: int) -> Tensor:
        """For each chain, the distribution of the token that its draft of this step stands for."""
        return self._probs[self._rows.roll(-1 - step, dims=1)[chains]]


def _reaches(batch: PackedBatch, distance: int) -> Tensor:
    """[num_rows, num_positions] bool: the token ``distance`` further on belongs to the same segment."""
    segments = batch.segments
    later = segments.roll(-distance, dims=1)
    later[:, max(segments.shape[1] - distance, 0) :] = PADDING
    return (segments == later) & (segments != PADDING)
