"""Shape of an EAGLE-3 head for a given target."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from transformers import LlamaConfig, PretrainedConfig

from tlt.errors import ConfigError

SUPPORTED_TARGETS = ("llama", "mistral", "qwen2", "qwen3")
"""Values of ``model_type``. SmolLM2 is a llama, Qwen2.5 a qwen2."""
ARCHITECTURE = "LlamaForCausalLMEagle3"
"""Name in published checkpoints; engines choose the drafter's class by it."""
NUM_AUX_LAYERS = 3
"""Low, middle and high level features (EAGLE-3, arXiv 2503.01840, section 3.1)."""


def make_head_config(
    target: PretrainedConfig, *, draft_vocab_size: int, aux_layers: Sequence[int] | None = None
) -> LlamaConfig:
    """Configuration of a head that drafts for ``target``, as ``config.json`` of a published EAGLE-3 checkpoint has it.

    The head is Llama-shaped without biases whatever the target's family, since that is the class engines run it with.

    Args:
        aux_layers: the target layers whose inputs the head reads, which are transformers' ``hidden_states`` of the
            same index. Default: vLLM's, ``(2, n // 2, n - 3)`` of n layers.

    Raises:
        ConfigError: the target's family is not supported, or sizes or layers do not fit the target.
    """
    if target.model_type not in SUPPORTED_TARGETS:
        raise ConfigError(
            f"no EAGLE-3 head can be made for a target of model_type '{target.model_type}'; supported are "
            f"{', '.join(SUPPORTED_TARGETS)} (SmolLM2 is a llama, Qwen2.5 a qwen2). Run without a drafter, or with a "
            "model-free one"
        )
    if not 1 <= draft_vocab_size <= target.vocab_size:
        raise ConfigError(
            f"draft_vocab_size={draft_vocab_size} must be from 1 to the target's vocabulary, {target.vocab_size} tokens"
        )
    heads = target.num_attention_heads
    # Qwen2 has no such field, and in others it may be empty: then the heads share the hidden size.
    head_dim = target.to_dict().get("head_dim") or target.hidden_size // heads
    return LlamaConfig(
        architectures=[ARCHITECTURE],
        dtype="bfloat16",
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=head_dim,
        hidden_act=target.hidden_act,
        max_position_embeddings=target.max_position_embeddings,
        initializer_range=target.initializer_range,
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters=copy.deepcopy(target.rope_parameters),
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        pad_token_id=target.pad_token_id,
        eagle_aux_hidden_state_layer_ids=_check_aux_layers(aux_layers, target.num_hidden_layers),
    )


def _check_aux_layers(aux_layers: Sequence[int] | None, num_layers: int) -> list[int]:
    layers = [2, num_layers // 2, num_layers - 3] if aux_layers is None else list(aux_layers)
    # An engine hands the states over in the order of the layers, each once, whatever order the configuration has.
    if len(layers) != NUM_AUX_LAYERS or layers != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= num_layers:
        given = "the default aux_layers" if aux_layers is None else "aux_layers"
        raise ConfigError(
            f"{given}={layers} must be {NUM_AUX_LAYERS} different layers in ascending order, from 0 to "
            f"{num_layers - 1} for a target of {num_layers} layers; set aux_layers to such numbers"
        )
    return layers
