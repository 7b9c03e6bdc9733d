"""Gates by marker, and a tiny model that transformers and vLLM both load."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

# Read by the tokenizers library when first used; without it each fork prints a warning.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this machine cannot run."""
    reasons = {
        "gpu": None if Path("/dev/nvidiactl").exists() else "no NVIDIA GPU on this machine",
        "vllm": None if importlib.util.find_spec("vllm") else "vLLM is not installed (extra cpu or gpu)",
    }
    for item in items:
        for marker, reason in reasons.items():
            if reason is not None and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a byte-level tokenizer, in float32: 2 layers, 4/2 heads, vocabulary 259, tied embeddings.

    One token is one byte, so lengths are easy to set. The heads are 32 wide, vLLM's smallest on CPU. The weights
    are large enough that the best token leads clearly and greedy output moves about instead of repeating one token.
    """
    folder = tmp_path_factory.mktemp("tiny-llama")
    build_tiny_llama(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As ``tiny_llama_dir``, with eight layers: an EAGLE-3 head reads the states of three different ones."""
    folder = tmp_path_factory.mktemp("tiny-target")
    build_tiny_llama(folder, seed=0, num_layers=8)
    return folder


def build_tiny_llama(folder: Path, *, seed: int, num_layers: int = 2) -> None:
    """Write the model of :func:`tiny_llama_dir`; another seed gives other weights of the same shapes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer_ids = save_byte_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=256 + len(SPECIAL_TOKENS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
        **tokenizer_ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.float32)
    model.generation_config.update(**tokenizer_ids)
    model.save_pretrained(folder)


def save_byte_tokenizer(folder: Path) -> dict[str, int]:
    """Write a tokenizer with one token per byte and a chat template; returns the special ids for the config."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<|endoftext|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
