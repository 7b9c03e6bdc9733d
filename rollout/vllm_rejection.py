"""Verification of drafts on a CPU: exact rejection sampling that draws one token per request.

vLLM's sampler draws, for every request of every step, a whole vocabulary of exponential noise on one thread, also
when nothing was drafted: 11 ms of a 43 ms step at batch 16. On a CPU it also reads per-token temperatures from
memory that was never written (see :func:`rollout.vllm_compat.repair_expand_kernel`). This one accepts and rejects
first; then each request needs exactly one more token, drawn by inverse transform with one uniform number.

Algorithm: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1; Chen et al. 2023 (arXiv 2302.01318), theorem 1.
"""

from __future__ import annotations

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

_CHUNK = 256
"""Tokens summed together before the search: one pass over the vocabulary instead of a sequential sum over it."""
_GREEDY = 1e-5
"""vLLM's bound: a temperature below it means greedy."""
NO_RANK = -1


class LeanRejectionSampler(RejectionSampler):
    """:class:`vllm.v1.sample.rejection_sampler.RejectionSampler` for the requests that rollouts make.

    Anything else (penalties, bad words, token masks, min_tokens, more than the sampled token's log-probability) is
    left to vLLM's own. Ranks of the sampled tokens are not computed and come back as ``NO_RANK``.
    """

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,  # [num_drafts, vocab], None for greedy drafts
        logits: torch.Tensor,  # [num_drafts + num_requests, vocab], request by request, the bonus row last
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Token ids ``[num_requests, max_spec_len + 1]``, -1 behind the last; log-probabilities if asked for."""
        in_processed_logprobs = self.is_processed_logprobs_mode and not self.is_logits_logprobs_mode
        # A grammar marks drafts that it forbids with -1.
        if not in_processed_logprobs or not _is_plain(sampling_metadata) or (metadata.draft_token_ids < 0).any():
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        counts = torch.tensor(metadata.num_draft_tokens)  # [num_requests]
        verdict = verify(
            logits=logits.to(torch.float32),
            counts=counts,
            draft_token_ids=metadata.draft_token_ids.long(),
            draft_probs=draft_probs,
            temperature=sampling_metadata.temperature,
            top_k=sampling_metadata.top_k,
            top_p=sampling_metadata.top_p,
            generators=sampling_metadata.generators,
            width=metadata.max_spec_len + 1,
        )
        logprobs = None
        if sampling_metadata.max_num_logprobs is not None:
            token_ids = verdict.token_ids.flatten().clamp(min=0).to(torch.int32)
            logprobs = LogprobsTensors(
                token_ids.unsqueeze(-1),
                verdict.logprobs.flatten().unsqueeze(-1),
                torch.full_like(token_ids, NO_RANK),
            )
        return SamplerOutput(sampled_token_ids=verdict.token_ids.to(torch.int32), logprobs_tensors=logprobs)


class Verdict:
    """What one verification emits."""

    __slots__ = ("logprobs", "token_ids")

    def __init__(self, token_ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        self.token_ids = token_ids  # [num_requests, width], -1 behind the last emitted token
        self.logprobs = logprobs  # [num_requests, width], under the distribution drawn from


def verify(
    *,
    logits: torch.Tensor,  # [num_rows, vocab] float32; per request its draft rows, then the bonus row
    counts: torch.Tensor,  # [num_requests] drafts per request
    draft_token_ids: torch.Tensor,  # [num_drafts] int64
    draft_probs: torch.Tensor | None,  # [num_drafts, vocab]
    temperature: torch.Tensor | None,  # [num_requests]; None: all greedy
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    generators: dict[int, torch.Generator],
    width: int,
) -> Verdict:
    """Accept each request's longest valid prefix of drafts and draw the token behind it."""
    num_requests = counts.shape[0]
    request_of_row = torch.repeat_interleave(torch.arange(num_requests), counts + 1)  # [num_rows]
    first_row = torch.cumsum(counts + 1, 0) - (counts + 1)  # [num_requests]
    first_draft = torch.cumsum(counts, 0) - counts  # [num_requests]
    request_of_draft = torch.repeat_interleave(torch.arange(num_requests), counts)  # [num_drafts]
    draft_rows = torch.arange(draft_token_ids.shape[0]) + request_of_draft  # one bonus row per earlier request

    is_greedy = torch.ones(num_requests, dtype=torch.bool) if temperature is None else temperature < _GREEDY
    # vLLM's own argmax, so that ties fall as they do without drafts.
    best = _argmax(logits) if is_greedy.any() else None  # [num_rows]
    if temperature is not None:
        logits = _shape_logits(logits, request_of_row, torch.where(is_greedy, 1.0, temperature), top_k, top_p)
    log_z = torch.logsumexp(logits, dim=-1)  # [num_rows]

    # min(1, p/q) of every draft; q is 1 for a draft that was taken greedily
    p = torch.exp(logits[draft_rows, draft_token_ids] - log_z[draft_rows])  # [num_drafts]
    q = 1.0 if draft_probs is None else draft_probs[torch.arange(p.shape[0]), draft_token_ids]
    uniforms = _uniforms(counts, width, generators)  # [num_requests, width]
    position = torch.arange(p.shape[0]) - first_draft[request_of_draft]  # [num_drafts], from 0
    accepted = uniforms[request_of_draft, position] * q < p
    if best is not None:
        accepted = torch.where(is_greedy[request_of_draft], best[draft_rows] == draft_token_ids, accepted)
    grid = torch.zeros(num_requests, width, dtype=torch.bool)
    grid[request_of_draft, position] = accepted
    num_accepted = grid.long().cumprod(dim=1).sum(dim=1)  # [num_requests]

    last_row = first_row + num_accepted  # [num_requests]
    last = _draw_last(
        logits=logits[last_row],
        log_z=log_z[last_row],
        uniform=uniforms[:, -1],
        rejected=num_accepted < counts,
        draft=first_draft + num_accepted,
        draft_token_ids=draft_token_ids,
        draft_probs=draft_probs,
    )
    if best is not None:
        last = torch.where(is_greedy, best[last_row], last)

    kept = grid.long().cumprod(dim=1).bool()  # [num_requests, width]
    token_ids = torch.full((num_requests, width), PLACEHOLDER_TOKEN_ID)
    token_ids[kept] = draft_token_ids[kept[request_of_draft, position]]
    token_ids[torch.arange(num_requests), num_accepted] = last
    rows = (first_row.unsqueeze(1) + torch.arange(width)).clamp(max=logits.shape[0] - 1)  # [num_requests, width]
    return Verdict(token_ids, logits[rows, token_ids.clamp(min=0)] - log_z[rows])


def _shape_logits(
    logits: torch.Tensor,  # [num_rows, vocab]
    request_of_row: torch.Tensor,  # [num_rows]
    temperature: torch.Tensor,  # [num_requests]
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
) -> torch.Tensor:
    """Logits of the distribution that tokens are drawn from."""
    return apply_top_k_top_p(
        logits / temperature[request_of_row].unsqueeze(-1),
        None if top_k is None else top_k[request_of_row],
        None if top_p is None else top_p[request_of_row],
    )


def _draw_last(
    *,
    logits: torch.Tensor,  # [num_requests, vocab], the row behind the accepted prefix
    log_z: torch.Tensor,
    uniform: torch.Tensor,  # [num_requests]
    rejected: torch.Tensor,  # [num_requests] bool: a draft was rejected at this row
    draft: torch.Tensor,  # [num_requests] index of that draft
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
) -> torch.Tensor:
    """A token of p where every draft was accepted, of max(p - q, 0) where one was rejected: ``[num_requests]``."""
    probs = torch.exp(logits - log_z.unsqueeze(-1))
    rows = rejected.nonzero().squeeze(-1)
    if rows.numel():
        if draft_probs is None:
            probs[rows, draft_token_ids[draft[rows]]] = 0.0
        else:
            probs[rows] = (probs[rows] - draft_probs[draft[rows]]).clamp(min=0.0)
    return draw(probs, uniform)


def draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse-transform sampling: an index of each row, with probability proportional to its weight.

    Args:
        weights: ``[num_rows, vocab]``, not negative, not all zero in a row.
        uniform: ``[num_rows]`` numbers in [0, 1), float64.

    Returns:
        ``[num_rows]`` int64. An index of weight 0 is never drawn.
    """
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[1] % _CHUNK)).view(weights.shape[0], -1, _CHUNK)
    in_chunks = padded.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)  # [num_rows, num_chunks]
    goal = uniform * in_chunks[:, -1]
    chunk = _first_above(in_chunks, goal)
    goal = goal - torch.where(chunk > 0, in_chunks.gather(1, (chunk - 1).clamp(min=0).unsqueeze(1)).squeeze(1), 0.0)
    inside = padded[torch.arange(padded.shape[0]), chunk].cumsum(dim=-1, dtype=torch.float64)  # [num_rows, _CHUNK]
    return chunk * _CHUNK + _first_above(inside, goal)


def _first_above(sums: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """Per row the first index whose running sum exceeds the goal; rounding cannot push it past the last increase."""
    index = torch.searchsorted(sums, goal.unsqueeze(1), right=True).squeeze(1)
    return torch.minimum(index, (sums < sums[:, -1:]).sum(dim=1))


def _uniforms(counts: torch.Tensor, width: int, generators: dict[int, torch.Generator]) -> torch.Tensor:
    """``[num_requests, width]`` float64 in [0, 1): one per draft, and in the last column one for the token behind.

    A seeded request takes from its own generator as many as it needs, whatever the width of its batch.
    """
    uniforms = torch.rand(counts.shape[0], width, dtype=torch.float64)
    for row, generator in generators.items():
        num_drafts = int(counts[row])
        own = torch.rand(num_drafts + 1, dtype=torch.float64, generator=generator)
        uniforms[row, :num_drafts], uniforms[row, -1] = own[:-1], own[-1]
    return uniforms


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.ops._C.greedy_argmax(logits)


def _is_plain(sampling: SamplingMetadata) -> bool:
    """Whether temperature, top-k and top-p are all that shapes the distribution."""
    return (
        sampling.no_penalties
        and sampling.max_num_logprobs in (None, 0)
        and not sampling.logprob_token_ids
        and sampling.allowed_token_ids_mask is None
        and not sampling.bad_words_token_ids
        and sampling.thinking_budget_state_holder is None
        and not any(map(_is_active, sampling.logitsprocs.all))
    )


def _is_active(processor: object) -> bool:
    if isinstance(processor, MinTokensLogitsProcessor):
        return bool(processor.min_toks)
    if isinstance(processor, LogitBiasLogitsProcessor):
        return bool(processor.biases)
    if isinstance(processor, MinPLogitsProcessor):
        return bool(processor.min_p_count)
    return True
