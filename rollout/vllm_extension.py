"""Our code inside vLLM's engine workers, through its ``worker_extension_cls`` hook.

vLLM mixes this class into its worker; methods are called with ``collective_rpc`` on every tensor-parallel rank.
"""

from __future__ import annotations

from typing import Any

from rollout.vllm_compat import repair_stale_lm_head
from rollout.vllm_drafting import DraftingExtension
from rollout.weight_sync import WeightPacket


class PolicyExtension(DraftingExtension):
    """Policy weight updates, and the drafter's (inherited).

    Method names carry a prefix because they share a namespace with vLLM's own.
    """

    model_runner: Any
    """Set by vLLM's worker, which this class is mixed into."""

    def tlt_load_policy(self, packet: WeightPacket) -> None:
        """Replace the target model's weights on this rank (each rank takes its own shard of the full tensors)."""
        self.model_runner.reload_weights(weights_iterator=iter(packet.tensors()), is_checkpoint_format=True)
        repair_stale_lm_head(self.model_runner.get_model())
