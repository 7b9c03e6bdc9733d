"""The EAGLE-3 head (arXiv 2503.01840) in plain PyTorch.

It computes what vLLM's ``Eagle3LlamaForCausalLM`` computes for the same weights. Parameter names are those of published
checkpoints, so that ``state_dict()`` is one. The target's embedding is shared with the target and no part of the head.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from tlt.draft.config import NUM_AUX_LAYERS


class AttentionContext(Protocol):
    """What the queries of one chain step may see besides their own keys, e.g. earlier positions and earlier steps."""

    def attend(
        self,
        query: Tensor,  # [num_rows, num_heads, num_positions, head_dim]
        key: Tensor,  # [num_rows, num_kv_heads, num_positions, head_dim]
        value: Tensor,  # [num_rows, num_kv_heads, num_positions, head_dim]
    ) -> Tensor:
        """Remember keys and values, and return attention outputs in the query's shape."""
        ...


class Eagle3Head(nn.Module):
    """One decoder layer that drafts the token after next from the target's hidden states and the next token.

    Weights are float32; run it under bfloat16 autocast for speed. The residual stream and norms stay in float32.
    """

    d2t: Tensor
    """Distance from draft id to token id, int64 [draft_vocab]."""
    t2d: Tensor
    """Whether a token can be drafted, bool [vocab]."""

    def __init__(
        self,
        config: LlamaConfig,
        draft_token_ids: Tensor,  # int64 [draft_vocab], sorted, each once
    ) -> None:
        super().__init__()
        assert draft_token_ids.shape == (config.draft_vocab_size,)
        assert bool((draft_token_ids.diff() > 0).all()), "draft token ids are sorted and differ"
        assert int(draft_token_ids[0]) >= 0
        assert int(draft_token_ids[-1]) < config.vocab_size
        self.config = config
        self.fc = nn.Linear(NUM_AUX_LAYERS * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = _DecoderLayer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)
        ids = draft_token_ids.cpu()
        self.register_buffer("d2t", ids - torch.arange(len(ids)))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True))

    @property
    def draft_token_ids(self) -> Tensor:
        """The token id of each draft id, int64 [draft_vocab]."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def combine(
        self,
        aux: Tensor,  # [..., 3 * hidden]
    ) -> Tensor:
        """Hidden input of the first chain step from the target's aux hidden states, [..., hidden]."""
        return self.fc(aux.to(self.fc.weight.dtype)).float()

    def forward(
        self,
        embeddings: Tensor,  # [num_rows, num_positions, hidden]
        hidden: Tensor,  # [num_rows, num_positions, hidden]
        positions: Tensor,  # [num_rows, num_positions]
        context: AttentionContext,
    ) -> tuple[Tensor, Tensor]:
        """One step of the chain at each position.

        Args:
            embeddings: the target's embeddings of the newest tokens; at the first step, at position i, of token i + 1.
            hidden: :meth:`combine` of the aux states of position i at the first step; later the second result of the
                step before.
            positions: rotary positions; i at the first step, one more at each later one.

        Returns:
            The normed state for :meth:`logits`, and the state before that norm, which is the next step's ``hidden``,
            each [num_rows, num_positions, hidden].
        """
        rotary = self.rotary(hidden, positions)
        prenorm = self.midlayer(embeddings, hidden, rotary, context)
        return self.norm(prenorm), prenorm

    def logits(
        self,
        normed: Tensor,  # [..., hidden]
    ) -> Tensor:
        """Scores of the draft vocabulary, [..., draft_vocab]."""
        return self.lm_head(normed)


class _DecoderLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self,
        embeddings: Tensor,  # [num_rows, num_positions, hidden]
        hidden: Tensor,  # [num_rows, num_positions, hidden]
        rotary: tuple[Tensor, Tensor],
        context: AttentionContext,
    ) -> Tensor:
        """The residual stream after the layer, [num_rows, num_positions, hidden]."""
        both = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(hidden)], dim=-1)
        hidden = hidden + self.self_attn(both, rotary, context)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class _Attention(nn.Module):
    """Grouped-query attention over inputs of twice the hidden size."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        input_size, kv_size = 2 * config.hidden_size, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, kv_size, bias=False)
        self.v_proj = nn.Linear(input_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(
        self,
        inputs: Tensor,  # [num_rows, num_positions, 2 * hidden]
        rotary: tuple[Tensor, Tensor],  # cosines and sines, each [num_rows, num_positions, head_dim]
        context: AttentionContext,
    ) -> Tensor:
        """[num_rows, num_positions, hidden]."""
        query, key, value = (
            projection(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        mixed = context.attend(query, key, value)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))
