"""A target small enough to warm a drafter up for in seconds, and its own responses."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.conftest import SPECIAL_TOKENS, save_byte_tokenizer
from trainer.warmup_responses import TargetResponse

CONFIG = """\
run: {{name: tiny, dir: {folder}/drafters}}
model: {{name: {folder}/target, dtype: float32}}
rollout: {{temperature: 0.5}}
head: {{draft_vocab_size: 64, aux_layers: [0, 2, 3]}}
responses: {{path: {folder}/responses.jsonl, num_held_out: 4}}
train:
  max_steps: 12
  num_ttt_steps: 2
  learning_rate: 0.01
  tokens_per_row: 32
  rows_per_step: 4
  bf16: false
  eval_every: 4
  num_threads: 1
"""
"""Format string; ``folder`` holds what :func:`save_target` and the test have written."""


def tiny_llama(vocab_size: int, **options: object) -> LlamaForCausalLM:
    """A random Llama, hidden 32, 4 layers, in float32."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        **options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: LlamaForCausalLM = LlamaForCausalLM(config).to(torch.float32)
    return model.eval()


def save_target(folder: Path) -> LlamaForCausalLM:
    """Write a target with a byte-level tokenizer; returns it."""
    ids = save_byte_tokenizer(folder)
    model = tiny_llama(256 + len(SPECIAL_TOKENS), tie_word_embeddings=True, **ids)
    model.generation_config.update(**ids)
    model.save_pretrained(folder)
    return model


def greedy_responses(model: LlamaForCausalLM, num_prompts: int) -> list[TargetResponse]:
    """What the target itself says to prompts of two tokens, 24 tokens each; every fourth is cut to 12."""
    prompts = torch.tensor([[40 + index, 2 * index] for index in range(num_prompts)])
    with torch.no_grad():
        texts = model.generate(prompts, do_sample=False, min_new_tokens=24, max_new_tokens=24).tolist()
    return [
        TargetResponse(
            prompt_token_ids=tuple(text[:2]), response_token_ids=tuple(text[2:14] if index % 4 == 0 else text[2:])
        )
        for index, text in enumerate(texts)
    ]
