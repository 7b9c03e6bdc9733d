"""Drafting inside vLLM's engine workers: what K=0 costs, how drafts are verified on a CPU, how a head is swapped.

Mixed into vLLM's worker beside :mod:`rollout.vllm_extension`; called with ``collective_rpc`` on every rank. All of it
is for the V1 model runner, which is the CPU's; on the V2 runner (GPU default) only the swap is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from rollout.spec_controller import DraftClock
from rollout.vllm_compat import repair_expand, repair_stale_lm_head
from rollout.vllm_rejection import LeanRejectionSampler
from rollout.weight_sync import WeightPacket


class DraftingExtension:
    """Drafter control; method names carry a prefix because they share a namespace with vLLM's own."""

    model_runner: Any
    vllm_config: Any
    """Both set by vLLM's worker, which this class is mixed into."""

    def tlt_setup_drafting(self) -> DraftClock:
        """Install what stock vLLM lacks; returns the drafter's clock (of use only in the worker's own process)."""
        clock = DraftClock()
        runner = self.model_runner
        if not isinstance(runner, GPUModelRunner):
            return clock
        runner.propose_draft_token_ids = _timed_drafting(runner.propose_draft_token_ids, clock)
        if runner.device.type == "cpu":
            repair_expand()
            runner.rejection_sampler = LeanRejectionSampler(runner.sampler, runner.speculative_config, runner.device)
        runner._sample = _skip_empty_verification(runner._sample)
        if isinstance(runner.drafter, EagleProposer) and runner.drafter.model.draft_id_to_target_id is not None:
            runner.drafter._greedy_sample = _small_vocabulary_argmax(runner.drafter.model)
        return clock

    def tlt_load_draft(self, packet: WeightPacket) -> None:
        """Replace the drafter's weights between two steps; the target's embedding, which it shares, is not touched.

        Keys and values that the old drafter computed stay. They make the first drafts after a swap worse for a few
        tokens, and never the output: every draft is verified.
        """
        model = self.model_runner.drafter.model
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights(iter(packet.tensors()))
            finalize_layerwise_reload(model, self.vllm_config.speculative_config.draft_model_config)
        repair_stale_lm_head(model)


def _timed_drafting(propose: Callable[..., Any], clock: DraftClock) -> Callable[..., Any]:
    """Time the drafter, and do not run it when nothing is to be drafted.

    vLLM runs the head's forward pass at K=0 too, to keep its keys and values complete. That pass is what K=0 loses
    against an engine without a drafter, and K=0 is what a policy chooses when drafting does not pay.
    """

    def timed(scheduler_output: Any, sampled_token_ids: Any, *args: Any) -> Any:
        begin = time.perf_counter()
        try:
            if scheduler_output.num_spec_tokens_to_schedule == 0:
                if isinstance(sampled_token_ids, list):
                    return [[] for _ in sampled_token_ids]
                return sampled_token_ids.new_empty((sampled_token_ids.shape[0], 0), dtype=torch.int64)
            return propose(scheduler_output, sampled_token_ids, *args)
        finally:
            clock.seconds = time.perf_counter() - begin

    return timed


def _skip_empty_verification(sample: Callable[..., Any]) -> Callable[..., Any]:
    """Sample as an engine without a drafter does in steps that verify nothing."""

    def sample_step(logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        if spec_decode_metadata is not None and spec_decode_metadata.max_spec_len == 0:
            spec_decode_metadata = None
        return sample(logits, spec_decode_metadata)

    return sample_step


def _small_vocabulary_argmax(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Take the best draft token before, not after, spreading its logits over the target's whole vocabulary."""

    def argmax(hidden_states: torch.Tensor) -> torch.Tensor:
        best = model.logits_processor(model.lm_head, hidden_states).argmax(dim=-1)
        return best + model.draft_id_to_target_id[best]

    return argmax
