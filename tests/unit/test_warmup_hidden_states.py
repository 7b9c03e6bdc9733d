"""The hidden states that a drafter learns from are those that the serving engine will give it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.warmup_target import tiny_llama
from tlt.errors import ConfigError
from trainer import hidden_states
from trainer.hidden_states import available_bytes, check_memory, collect_hidden_states
from trainer.warmup_responses import TargetResponse

AUX_LAYERS = (0, 2, 3)
RESPONSES = [
    TargetResponse(prompt_token_ids=(5, 6, 7), response_token_ids=(8, 9, 10, 11)),
    TargetResponse(prompt_token_ids=(1,), response_token_ids=(2,)),
    TargetResponse(prompt_token_ids=(119, 4), response_token_ids=(3, 3, 3, 3, 3)),
]
"""The first and the last have the same length, so they share a pass."""


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(120)


def test_aux_states_are_the_inputs_of_their_layers(model: LlamaForCausalLM) -> None:
    """Catches states shifted by one layer (vLLM counts inputs, transformers' hooks see outputs), and rows that are
    swapped by sorting: a head trained on them learns well and accepts nothing when served."""
    inputs: dict[int, torch.Tensor] = {}
    hooks = [
        model.model.layers[layer].register_forward_pre_hook(
            lambda _, arguments, layer=layer: inputs.__setitem__(layer, arguments[0].detach())
        )
        for layer in AUX_LAYERS
    ]
    sequences = collect_hidden_states(model, RESPONSES, AUX_LAYERS)
    for response, sequence in zip(RESPONSES, sequences, strict=True):
        ids = torch.tensor([response.token_ids])  # [1, num_positions]
        with torch.no_grad():
            states = model(input_ids=ids, output_hidden_states=True).hidden_states
        assert sequence.token_ids.tolist() == list(response.token_ids)
        assert sequence.num_prompt_tokens == len(response.prompt_token_ids)
        for part, layer in zip(sequence.aux_hidden.split(32, dim=-1), AUX_LAYERS, strict=True):
            torch.testing.assert_close(part.float(), inputs[layer][0], rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(part.float(), states[layer][0], rtol=1e-2, atol=1e-2)
    for hook in hooks:
        hook.remove()


def test_final_states_give_the_models_logits(model: LlamaForCausalLM) -> None:
    """Catches states from before the final norm: the taught distribution would not be the target's."""
    for response, sequence in zip(RESPONSES, collect_hidden_states(model, RESPONSES, AUX_LAYERS), strict=True):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([response.token_ids])).logits[0]  # [num_positions, vocab]
            found = model.lm_head(sequence.final_hidden.float())
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        assert not sequence.final_hidden.requires_grad


def test_too_little_memory_is_told_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the kernel ending the process after minutes of work, and units that are off by 1024."""
    monkeypatch.setattr(hidden_states, "available_bytes", lambda: 2 * 2**30)
    # 4 states x 1024 x 2 bytes = 8 KiB per token: 131,072 tokens are 1 GiB, exactly half.
    check_memory(131_072, hidden_size=1024)
    with pytest.raises(ConfigError, match=re.escape("take 1.50 GiB, more than half of the 2.00 GiB")):
        check_memory(196_608, hidden_size=1024)


def test_available_memory_is_the_kernels_estimate(tmp_path: Path) -> None:
    """Catches taking MemFree, which leaves out the page cache and is near zero on a machine that has run a while."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  8 kB\nMemFree:  1 kB\nMemAvailable:    3 kB\n")
    assert available_bytes(meminfo) == 3072
