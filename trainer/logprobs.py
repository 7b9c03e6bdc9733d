"""Log-probabilities of completions on a CPU, computed for real completion tokens only.

TRL's fused LM head projects every position, prompt and padding included, onto the vocabulary when there is no
Triton, and does the two matrix products of its backward pass in float32. With a small model, whose vocabulary is a
large part of it, that makes a GRPO step about 1.6 times as long. Here padding columns are cut off, rows of like
length share a pass, and only scored tokens reach the LM head. Rows whose gradient is zero anyway (advantage 0: all
samples of their prompt got the same reward) skip the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HEAD_BLOCK = 2048
"""Tokens projected at once. One block of a 50k vocabulary takes 0.4 GB in float32; with more than one, the backward
pass recomputes them one by one instead of keeping all."""

_LOGIT_TRANSFORMS = frozenset(
    {"final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling"}
)
"""Settings of models that change logits after the LM head, which only their own forward pass knows."""


def scores_plain_logits(model: PreTrainedModel) -> bool:
    """Whether the LM head's output is all there is to the model's logits, as :func:`completion_logprobs` needs."""
    return _LOGIT_TRANSFORMS.isdisjoint(model.config.get_text_config().to_dict())


def completion_logprobs(
    model: PreTrainedModel,
    input_ids: torch.Tensor,  # [num_rows, num_prompt + num_completion]
    attention_mask: torch.Tensor,  # [num_rows, num_prompt + num_completion]
    num_completion: int,
    *,
    rows_per_pass: int,
    temperature: float,
    autocast: Callable[[], AbstractContextManager[None]],
    needs_gradient: torch.Tensor | None = None,  # [num_rows], bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability (with gradient) and entropy in nats (without) of the last ``num_completion`` columns.

    Both are [num_rows, num_completion], float32, of the distribution after ``temperature``, and 0 where
    ``attention_mask`` is 0. Prompts are padded on the left, completions on the right. Rows outside
    ``needs_gradient`` get values only, which spares their backward pass.
    """
    lengths = attention_mask[:, -num_completion:].sum(1)
    order = torch.argsort(lengths, stable=True)  # [num_rows]
    wanted = torch.ones_like(lengths, dtype=torch.bool) if needs_gradient is None else needs_gradient
    passes = [
        (rows, gradient)
        for gradient, part in ((True, order[wanted[order]]), (False, order[~wanted[order]]))
        for rows in part.split(rows_per_pass)
        if len(rows)
    ]
    logps, entropies = [], []
    for rows, gradient in passes:
        with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
            logp, entropy = _one_pass(
                model, input_ids[rows], attention_mask[rows], num_completion, temperature, autocast
            )
        logps.append(logp)
        entropies.append(entropy)
    original = torch.argsort(torch.cat([rows for rows, _ in passes]))
    return torch.cat(logps)[original], torch.cat(entropies)[original]


def _one_pass(
    model: PreTrainedModel,
    input_ids: torch.Tensor,  # [num_rows, num_columns]
    attention_mask: torch.Tensor,  # [num_rows, num_columns]
    num_completion: int,
    temperature: float,
    autocast: Callable[[], AbstractContextManager[None]],
) -> tuple[torch.Tensor, torch.Tensor]:
    scored = attention_mask.bool()
    scored[:, :-num_completion] = False
    used = attention_mask.any(0).nonzero()[:, 0]  # columns that are not padding in every row
    window = slice(int(used[0]), int(used[-1]) + 1)
    ids, mask, targets = input_ids[:, window], attention_mask[:, window], scored[:, window][:, 1:]
    with autocast():
        hidden = model.base_model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state  # [num_rows, num_window, hidden]
        logp, entropy = _project(model, hidden[:, :-1][targets], ids[:, 1:][targets], temperature)
    where = scored[:, -num_completion:]
    blank = torch.zeros(where.shape, dtype=logp.dtype, device=logp.device)
    return blank.masked_scatter(where, logp), blank.masked_scatter(where, entropy)


def _project(
    model: PreTrainedModel,
    hidden: torch.Tensor,  # [num_tokens, hidden]
    tokens: torch.Tensor,  # [num_tokens]
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    head = model.get_output_embeddings()

    def score(hidden: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.log_softmax(head(hidden).float() / temperature, dim=-1)  # [block, vocab]
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, tokens[:, None])[:, 0], entropy

    if len(tokens) <= _HEAD_BLOCK:
        return score(hidden, tokens)
    blocks = [
        checkpoint(score, *block, use_reentrant=False)
        for block in zip(hidden.split(_HEAD_BLOCK), tokens.split(_HEAD_BLOCK), strict=True)
    ]
    return torch.cat([logp for logp, _ in blocks]), torch.cat([entropy for _, entropy in blocks])
