"""A deterministic engine with scripted response lengths, for tests that need control. Never used in a figure."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.engine import Generated, StepResult
from rollout.weight_sync import DraftPacket, WeightPacket
from tlt.errors import DraftRefusedError, StaleWeightsError
from tlt.spec.totals import SpecTotals
from tlt.types import FinishReason, RolloutRequest

_FAKE_LOGPROB = -0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeEngineFactory:
    """Recipe for a :class:`FakeEngine`; faults happen at most once per ``fault_marker`` file.

    The marker lets a restarted worker, which is built from the same recipe, run on without the fault.
    """

    lengths: Mapping[str, int] = field(default_factory=dict)
    """Response tokens by prompt key; others get ``max_tokens``."""
    max_num_seqs: int = 8
    max_model_len: int = 1024
    die_at_step: int | None = None
    hang_at_step: int | None = None
    fault_marker: str | None = None
    """Path; without one, the fault repeats after a restart."""
    fail_start: str | None = None
    """Message of an error raised while the engine is being built."""

    def build(self) -> FakeEngine:
        """Build the engine."""
        if self.fail_start is not None:
            raise RuntimeError(self.fail_start)
        return FakeEngine(self)

    def take_fault(self) -> bool:
        """Whether a due fault should happen now."""
        if self.fault_marker is None:
            return True
        try:
            os.close(os.open(self.fault_marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


class FakeEngine:
    """:class:`rollout.engine.RolloutEngine` that emits ``1000 * policy_version + position`` as tokens."""

    def __init__(self, spec: FakeEngineFactory) -> None:
        self._spec = spec
        self._requests: dict[str, RolloutRequest] = {}
        self._tokens: dict[str, list[int]] = {}
        self._policy_version = 0
        self._draft_version = 0
        self._steps = 0

    @property
    def policy_version(self) -> int:
        """See the protocol."""
        return self._policy_version

    @property
    def draft_version(self) -> int:
        """See the protocol."""
        return self._draft_version

    @property
    def spec_totals(self) -> SpecTotals:
        """One step of K=0 per step taken: it drafts nothing."""
        return SpecTotals(steps_by_k={0: self._steps} if self._steps else {})

    @property
    def num_running(self) -> int:
        """See the protocol."""
        return min(len(self._requests), self._spec.max_num_seqs)

    @property
    def num_waiting(self) -> int:
        """See the protocol."""
        return len(self._requests) - self.num_running

    def add(self, request: RolloutRequest) -> None:
        """See the protocol."""
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is already running; ids must be unique")
        if len(request.prompt_token_ids) + request.sampling.max_tokens > self._spec.max_model_len:
            raise ValueError(f"request {request.request_id!r} is above max_model_len={self._spec.max_model_len}")
        self._requests[request.request_id] = request
        self._tokens[request.request_id] = []

    def step(self) -> StepResult:
        """See the protocol."""
        if not self._requests:
            return StepResult(finished=(), num_new_tokens=0)
        self._steps += 1
        self._fault()
        running = list(self._requests)[: self._spec.max_num_seqs]
        for request_id in running:
            tokens = self._tokens[request_id]
            tokens.append(1000 * self._policy_version + len(tokens))
        finished = [self._finish(request_id) for request_id in running if self._is_finished(request_id)]
        return StepResult(finished=tuple(finished), num_new_tokens=len(running))

    def abort(self, request_ids: Sequence[str]) -> None:
        """See the protocol."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)
            self._tokens.pop(request_id, None)

    def load_weights(self, packet: WeightPacket) -> None:
        """See the protocol."""
        if packet.version <= self._policy_version:
            raise StaleWeightsError(f"policy version {packet.version} is not newer than {self._policy_version}")
        if self._requests:
            raise StaleWeightsError(f"{len(self._requests)} responses are unfinished")
        self._policy_version = packet.version

    def load_draft(self, packet: DraftPacket) -> None:
        """See the protocol."""
        if packet.weights.version <= self._draft_version:
            raise DraftRefusedError(f"drafter version {packet.weights.version} is not newer than {self._draft_version}")
        self._draft_version = packet.weights.version

    def policy_state(self) -> Mapping[str, Any] | None:
        """See the protocol."""
        return None

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """See the protocol."""
        return [_FAKE_LOGPROB] * (len(token_ids) - 1)

    def close(self) -> None:
        """See the protocol."""

    def _length(self, request: RolloutRequest) -> int:
        return min(self._spec.lengths.get(request.prompt_key, request.sampling.max_tokens), request.sampling.max_tokens)

    def _is_finished(self, request_id: str) -> bool:
        return len(self._tokens[request_id]) >= self._length(self._requests[request_id])

    def _finish(self, request_id: str) -> Generated:
        request, tokens = self._requests.pop(request_id), self._tokens.pop(request_id)
        cut = len(tokens) >= request.sampling.max_tokens
        return Generated(
            request_id=request_id,
            token_ids=tuple(tokens),
            logprobs=(_FAKE_LOGPROB,) * len(tokens),
            finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
        )

    def _fault(self) -> None:
        if self._steps == self._spec.die_at_step and self._spec.take_fault():
            os._exit(1)
        if self._steps == self._spec.hang_at_step and self._spec.take_fault():
            threading.Event().wait()
