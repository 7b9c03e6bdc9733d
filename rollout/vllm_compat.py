"""Every workaround of an upstream bug in vLLM, in one place.

Each has a probe that shows the bug on the running installation, is applied only then, and says why it exists.
When a probe stops finding its bug, the workaround is dead and can go.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)

_PROBE_ROWS = 4
_PROBE_TOLERANCE = 0.02
"""Relative error of a bfloat16 product that was computed from the right weights stays far below this."""


def repair_stale_lm_head(model: torch.nn.Module) -> bool:
    """Make logits use the weights that were just loaded; returns whether a repair was needed.

    vLLM's CPU backend multiplies by a *packed copy* of ``lm_head``. With tied embeddings a layerwise reload writes
    the shared parameter but does not pack it again, so logits keep coming from the old weights and nothing fails:
    greedy outputs just differ from those of a fresh engine (0 of 8 equal, 8 of 8 after repacking).

    Probe: the head's product with a random input against the plain product with its own parameter.
    """
    lm_head: Any = model.lm_head
    weight = lm_head.weight  # [vocab, hidden]; [0] when packing consumed it, and then the reload has packed it anew
    if weight.numel() == 0 or weight.device.type != "cpu":
        return False
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(_PROBE_ROWS, weight.shape[1], generator=generator).to(weight.dtype)
    expected = probe.float() @ weight.float().T  # [rows, vocab]
    actual = lm_head.quant_method.apply(lm_head, probe).float()
    error = ((actual - expected).norm() / expected.norm()).item()
    if error < _PROBE_TOLERANCE and torch.isfinite(actual).all():
        return False
    lm_head.quant_method.process_weights_after_loading(lm_head)
    logger.debug("lm_head was packed from old weights (relative error %.3f); packed it again", error)
    return True


def expand_is_broken() -> bool:
    """Probe: do per-request values reach the tokens of a request on this CPU?"""
    from vllm.v1.sample import rejection_sampler

    # Eighths are exact, and compared as Python numbers: no tensor with the right answer may lie in freed memory.
    for first, second in ((0.5, 1.25), (0.75, 1.5)):
        values, ends = torch.tensor([first, second]), torch.tensor([2, 5])
        if rejection_sampler.expand_batch_to_tokens(values, ends, 5).tolist() != [first] * 2 + [second] * 3:
            return True
    return False


def expand_status() -> str:
    """What ``tlt doctor`` says: "absent", "repaired" or "broken"; "other backend" where there is no CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return "other backend"
    current_platform.register_triton_kernel_overrides()  # as vLLM's worker does when it starts
    if not repair_expand():
        return "absent"
    return "broken" if expand_is_broken() else "repaired"


def repair_expand() -> bool:
    """Make temperature, top-k and top-p reach drafted tokens on a CPU; returns whether a repair was needed.

    ``vllm/utils/cpu_triton_utils.py::_expand_kernel_impl`` converts its output tensor to int64, which makes a copy,
    and fills the copy: what the caller gets is uninitialised memory. Speculative decoding at temperature > 0 then
    samples from a visibly wrong distribution (and accepts about 2 % of drafts), without any error.
    """
    from vllm.v1.sample import rejection_sampler

    if not expand_is_broken():
        return False
    rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens
    logger.debug("vLLM's CPU stand-in for expand_kernel does not write its output; replaced it")
    return True


def _expand_batch_to_tokens(
    x: torch.Tensor,  # [num_requests]
    cu_num_tokens: torch.Tensor,  # [num_requests] running sum of token counts
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(replaced, counts, output_size=num_tokens)
