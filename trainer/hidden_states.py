"""What a drafter learns from: the target's hidden states for whole responses, by a forward pass of transformers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tlt.draft.config import NUM_AUX_LAYERS
from tlt.draft.data import DraftSequence
from tlt.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trainer.warmup_responses import TargetResponse

logger = logging.getLogger(__name__)

STORED_DTYPE = torch.bfloat16
"""The serving engine computes in it as well; float32 would hold no more information, in twice the memory."""
_TOKENS_PER_BATCH = 2048
_STATES_PER_TOKEN = NUM_AUX_LAYERS + 1
"""Kept: the aux layers' and the final one. Packed rows refer to them, so there is one copy."""
_REPORT_EVERY_S = 15.0
_MEMORY_SHARE = 0.5
"""Of what is available; the rest is for the pass itself, the training and whatever else runs here."""


def collect_hidden_states(
    model: PreTrainedModel, responses: Sequence[TargetResponse], aux_layers: Sequence[int]
) -> list[DraftSequence]:
    """Run the target over each prompt with its response; the sequences are in the order of ``responses``.

    Aux layer k stands for the input of the target's layer k, vLLM's numbering, which is ``hidden_states[k]`` of
    transformers.
    """
    sequences: dict[int, DraftSequence] = {}
    num_tokens = sum(len(response.token_ids) for response in responses)
    num_done, begin = 0, time.monotonic()
    next_report = begin + _REPORT_EVERY_S
    for rows in _equal_length_batches(responses):
        ids = torch.tensor([responses[row].token_ids for row in rows])  # [num_rows, num_positions]
        with torch.no_grad():
            output = model.base_model(
                input_ids=ids.to(model.device), output_hidden_states=True, use_cache=False, return_dict=True
            )
        # Both are [num_rows, num_positions, ...]; aux has the three layers side by side, 3 * hidden.
        aux = torch.cat([output.hidden_states[layer] for layer in aux_layers], dim=-1).to("cpu", STORED_DTYPE)
        final = output.last_hidden_state.to("cpu", STORED_DTYPE)
        for position, row in enumerate(rows):
            sequences[row] = DraftSequence(
                token_ids=ids[position],
                aux_hidden=aux[position],
                final_hidden=final[position],
                num_prompt_tokens=len(responses[row].prompt_token_ids),
            )
        num_done += ids.numel()
        if time.monotonic() >= next_report:
            next_report = time.monotonic() + _REPORT_EVERY_S
            rate = num_done / (time.monotonic() - begin)
            logger.info("drafter: hidden states of %d of %d tokens, %.0f tokens/s", num_done, num_tokens, rate)
    return [sequences[row] for row in range(len(responses))]


def check_memory(num_tokens: int, *, hidden_size: int) -> None:
    """Refuse, before the pass, what would not fit.

    Raises:
        ConfigError: the states would take more than half of the available memory.
    """
    needed = num_tokens * _STATES_PER_TOKEN * hidden_size * STORED_DTYPE.itemsize
    available = available_bytes()
    if needed > available * _MEMORY_SHARE:
        raise ConfigError(
            f"the hidden states of {num_tokens} prompt and response tokens take {needed / 2**30:.2f} GiB, more than "
            f"half of the {available / 2**30:.2f} GiB of memory that are free; lower responses.num_prompts or "
            "responses.num_generations, give a shorter responses.path, or free memory"
        )


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that can be had without swapping, as the kernel estimates it."""
    for line in meminfo.read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise ConfigError(f"{meminfo} does not say how much memory is available; drafters are trained on Linux")


def _equal_length_batches(responses: Sequence[TargetResponse]) -> Iterator[list[int]]:
    """Rows of one length per batch: no padding, so no mask, and no position is computed for nothing."""
    by_length: dict[int, list[int]] = {}
    for row, response in enumerate(responses):
        by_length.setdefault(len(response.token_ids), []).append(row)
    for length, rows in sorted(by_length.items()):
        size = max(1, _TOKENS_PER_BATCH // length)
        for start in range(0, len(rows), size):
            yield rows[start : start + size]
