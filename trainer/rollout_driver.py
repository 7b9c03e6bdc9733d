"""The learner's side of the pool: each call timed, shown and checked.

Implements what :mod:`trainer.trl_adapter` needs of a rollout source, so TRL drives the pool through this object.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollout.pool import RolloutPool
from rollout.record import RolloutProgress, RolloutRecord
from tlt.observability.phases import Phase, PhaseClock
from tlt.observability.progress import Progress
from tlt.observability.timeline import Span, SpanKind, TimelineWriter
from tlt.types import Response, RolloutRequest
from trainer.trl_adapter import WeightPusher
from trainer.weight_probe import WeightProbe, learner_logprobs

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class RolloutDriver:
    """Generates and syncs through a pool, and keeps the books of both."""

    def __init__(
        self,
        pool: RolloutPool,
        *,
        clock: PhaseClock,
        progress: Progress,
        timeline: TimelineWriter,
        probe: WeightProbe,
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._progress = progress
        self._timeline = timeline
        self._probe = probe
        self._model: PreTrainedModel | None = None
        # Spans are in Unix time, measured with the clock that never goes back.
        self._epoch_s = time.time() - time.monotonic()
        self.step = 0
        """Training step that spans and metrics belong to; 0 before the first."""
        self.metrics: dict[str, float] = {}
        """Of the last sync and the last rollout, under their final names."""
        self.idle_s = [0.0] * pool.num_workers
        """Per worker, over all rollouts."""
        self.num_tokens = 0
        self.generate_s = 0.0
        self.num_responses = 0

    @property
    def policy_version(self) -> int:
        """Version that the workers use."""
        return self._pool.policy_version

    def attach(self, model: PreTrainedModel) -> None:
        """The learner's model: what the weight probe compares the engines with."""
        self._model = model

    def prove_updates(self, pusher: WeightPusher) -> None:
        """Show, before it matters, that an update reaches every layer of every engine.

        All weights are halved, pushed, checked, and doubled again. Halving is exact in floating point, so the
        policy is what it was; and unlike a training step it moves every log-probability far beyond rounding.

        Raises:
            StaleWeightsError: an engine goes on using old weights.
        """
        assert self._model is not None
        for factor in (1.0, 0.5, 2.0):
            for parameter in self._model.parameters():
                parameter.data.mul_(factor)
            pusher.sync_weights()
            if factor != 1.0 and "sync/probe_slope" not in self.metrics:
                logger.warning("the weight probe could not judge an update by a factor of %g", factor)

    def sync_weights(self, state: Mapping[str, torch.Tensor]) -> int:
        """Push the learner's weights to every worker and check that they are used; returns the policy version."""
        with self._clock.phase(Phase.SYNC):
            self._progress.enter(Phase.SYNC)
            begin = time.monotonic()
            version = self._pool.sync_weights(state)
            end = time.monotonic()
            self._write_spans(SpanKind.SYNC, begin, end)
            self.metrics = {"sync/seconds_s": end - begin, "policy/version": version}
            if self._model is not None:
                expected = learner_logprobs(self._model, self._probe.token_ids)
                result = self._probe.check(expected, self._pool.score(self._probe.token_ids), version)
                self.metrics["sync/probe_rms_nats"] = result.rms_nats
                if result.slope is not None:
                    self.metrics["sync/probe_slope"] = result.slope
        return version

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Response]:
        """One training rollout; see :meth:`rollout.pool.RolloutPool.generate`."""
        responses, record = self._rollout(requests, Phase.GENERATE)
        wall = record.end_s - record.begin_s
        idle = [record.idle_s(worker) for worker in range(self._pool.num_workers)]
        self.idle_s = [total + seconds for total, seconds in zip(self.idle_s, idle, strict=True)]
        self.num_tokens += record.num_tokens
        self.num_responses += len(responses)
        self.generate_s += wall
        self.metrics |= {
            "rollout/wall_s": wall,
            "rollout/tokens_per_s": record.num_tokens / wall,
            "rollout/num_tokens": record.num_tokens,
            "rollout/num_responses": len(responses),
            "rollout/idle_share": sum(idle) / (wall * len(idle)),
            "rollout/num_restarts": self._pool.num_restarts,
            **(record.spec.metrics() if record.spec.steps_by_k else {}),
        }
        self._progress.enter(Phase.LEARN)
        return responses

    def evaluate(self, requests: Sequence[RolloutRequest]) -> list[Response]:
        """Generate outside training: shown, but not part of the training figures."""
        responses, _ = self._rollout(requests, Phase.EVAL)
        return responses

    def policy_state(self) -> Mapping[str, Any] | None:
        """What the first worker's speculation policy has learned; the others see the same machine."""
        return self._pool.policy_states()[0]

    def _rollout(self, requests: Sequence[RolloutRequest], phase: Phase) -> tuple[list[Response], RolloutRecord]:
        with self._clock.phase(phase):
            self._progress.enter(phase)
            responses = self._pool.generate(requests, on_progress=self._show)
        record = self._pool.last_rollout
        assert record is not None
        for worker, intervals in enumerate(record.busy):
            for begin, end in intervals:
                self._write_span(worker, SpanKind.GENERATE if phase is Phase.GENERATE else SpanKind.EVAL, begin, end)
            for begin, end in record.idle(worker):
                self._write_span(worker, SpanKind.IDLE, begin, end)
        return responses, record

    def _show(self, progress: RolloutProgress) -> None:
        self._progress.rollout(
            done=progress.num_done,
            total=progress.num_total,
            busy=progress.num_busy,
            tokens_per_s=progress.num_tokens / progress.elapsed_s if progress.elapsed_s > 0 else None,
            acceptance_length=progress.spec.acceptance_length,
        )

    def _write_spans(self, kind: SpanKind, begin: float, end: float) -> None:
        for worker in range(self._pool.num_workers):
            self._write_span(worker, kind, begin, end)

    def _write_span(self, worker: int, kind: SpanKind, begin: float, end: float) -> None:
        self._timeline.write(
            Span(
                worker=f"worker-{worker}",
                kind=kind,
                begin_s=self._epoch_s + begin,
                end_s=self._epoch_s + end,
                step=self.step,
            )
        )
