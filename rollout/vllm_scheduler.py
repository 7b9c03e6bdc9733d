"""The number of draft tokens, chosen at every engine step through vLLM's ``scheduler_cls`` hook.

The scheduler runs once per engine, also with tensor parallelism, and its choice travels to every rank in the
scheduler output. So ranks cannot disagree.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput

from rollout.spec_controller import SpecController


class AdaptiveScheduler(Scheduler):
    """vLLM's scheduler, with K of each step from a :class:`rollout.spec_controller.SpecController`."""

    controller: SpecController | None = None
    """Set by the engine once it is up; until then (profiling, warm-up) vLLM's own schedule holds."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule as vLLM does, then say how much to draft at the end of the step."""
        begin = time.perf_counter()
        output = super().schedule(throttle_prefills)
        if self.controller is not None and output.num_scheduled_tokens:
            num_drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
            num_decode_tokens = len(output.num_scheduled_tokens) + num_drafts
            output.num_spec_tokens_to_schedule = self.controller.begin_step(
                begin,
                batch=len(output.num_scheduled_tokens),
                has_prefill=output.total_num_scheduled_tokens > num_decode_tokens,
            )
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """Book the step: how many drafts each request had verified, and how many tokens came of it."""
        result = super().update_from_output(scheduler_output, model_runner_output)
        if self.controller is not None and scheduler_output.num_scheduled_tokens:
            drafts, sampled = scheduler_output.scheduled_spec_decode_tokens, model_runner_output.sampled_token_ids
            index = model_runner_output.req_id_to_index
            self.controller.end_step(
                time.perf_counter(),
                emitted=[
                    (len(drafts.get(request_id, ())), len(sampled[index[request_id]]))
                    for request_id in scheduler_output.num_scheduled_tokens
                ],
            )
        return result
