"""Our log-probabilities against a forward pass of each row by itself, without padding."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, PreTrainedModel

from trainer import logprobs
from trainer.logprobs import completion_logprobs, scores_plain_logits

TEMPERATURE = 0.7
NUM_PROMPT, NUM_COMPLETION = 6, 9
LENGTHS = [(6, 2), (3, 7), (1, 1), (4, 0), (2, 5)]
"""Prompt and completion tokens of each row; no row fills the completion columns, one has nothing to score."""


@pytest.fixture
def model(tiny_llama_dir: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    return loaded


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (len(LENGTHS), NUM_PROMPT + NUM_COMPLETION), generator=generator)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(LENGTHS):
        mask[row, NUM_PROMPT - prompt : NUM_PROMPT + completion] = 1
    return ids, mask


def row_by_row(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logps, entropies = torch.zeros(len(ids), NUM_COMPLETION), torch.zeros(len(ids), NUM_COMPLETION)
    for row, (prompt, completion) in enumerate(LENGTHS):
        tokens = ids[row, NUM_PROMPT - prompt : NUM_PROMPT + completion]
        dist = torch.log_softmax(model(input_ids=tokens[None]).logits[0, :-1] / TEMPERATURE, dim=-1)
        for i in range(completion):
            at = dist[prompt - 1 + i]
            logps[row, i] = at[tokens[prompt + i]]
            entropies[row, i] = -(at.exp() * at).sum().detach()
    return logps, entropies


@pytest.mark.parametrize("rows_per_pass", [2, 5])
@pytest.mark.parametrize("block", [4, 2048])
def test_equals_unpadded_rows(
    rows_per_pass: int, block: int, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an off-by-one between logits and tokens, rows left in sorted order, and a gradient lost in a block."""
    monkeypatch.setattr(logprobs, "_HEAD_BLOCK", block)
    ids, mask = batch()
    logps, entropies = completion_logprobs(
        model,
        ids,
        mask,
        NUM_COMPLETION,
        rows_per_pass=rows_per_pass,
        temperature=TEMPERATURE,
        autocast=nullcontext,
    )
    expected_logps, expected_entropies = row_by_row(model, ids)
    torch.testing.assert_close(logps, expected_logps, atol=1e-4, rtol=0)
    torch.testing.assert_close(entropies, expected_entropies, atol=1e-4, rtol=0)

    weights = torch.arange(logps.numel()).view_as(logps) / logps.numel()
    parameters = list(model.parameters())
    grads = torch.autograd.grad((logps * weights).sum(), parameters)
    expected_grads = torch.autograd.grad((expected_logps * weights).sum(), parameters)
    for grad, expected in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


def test_models_that_transform_logits_are_told_apart(model: PreTrainedModel) -> None:
    """Catches a soft-capped model whose log-probabilities would be computed without the cap."""
    assert scores_plain_logits(model)
    model.config = GemmaConfig(final_logit_softcapping=30.0)
    assert not scores_plain_logits(model)
    model.config = LlamaConfig()
    assert scores_plain_logits(model)


def test_rows_without_gradient_have_equal_values_and_leave_the_rest_alone(model: PreTrainedModel) -> None:
    """Catches values of skipped rows that go missing or to another row, and gradient that they still receive."""
    ids, mask = batch()
    needs = torch.tensor([True, False, False, True, True])
    arguments = {"rows_per_pass": 2, "temperature": TEMPERATURE, "autocast": nullcontext}
    full, full_entropy = completion_logprobs(model, ids, mask, NUM_COMPLETION, **arguments)
    expected = torch.autograd.grad(full[needs].sum(), model.get_input_embeddings().weight)[0]
    part, part_entropy = completion_logprobs(model, ids, mask, NUM_COMPLETION, needs_gradient=needs, **arguments)
    torch.testing.assert_close(part, full)
    torch.testing.assert_close(part_entropy, full_entropy)
    actual = torch.autograd.grad(part.sum(), model.get_input_embeddings().weight)[0]
    # The rows share other passes now, so sums are rounded in another order.
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
