"""The seam between a rollout worker and whatever generates tokens.

Two implementations: :class:`rollout.vllm_engine.VllmEngine` (the real one) and
:class:`rollout.fake_engine.FakeEngine` (scripted lengths, for unit tests). ``tests/contract`` holds both to this page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rollout.weight_sync import DraftPacket, WeightPacket
from tlt.config.schema import DraftSection, RolloutSection
from tlt.spec.totals import SpecTotals
from tlt.types import FinishReason, RolloutRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A finished request as the engine knows it; the worker adds who and when."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    acceptance_length: float | None = None
    """See :class:`tlt.types.Response`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Outcome of one engine step."""

    finished: tuple[Generated, ...]
    num_new_tokens: int


class RolloutEngine(Protocol):
    """One inference engine, stepped by hand from a single thread."""

    @property
    def policy_version(self) -> int:
        """Version of the weights in use; 0 is the checkpoint that the engine started from."""
        ...

    @property
    def draft_version(self) -> int:
        """Version of the drafter; 0 is the one that the engine started with, or none."""
        ...

    @property
    def spec_totals(self) -> SpecTotals:
        """Counts of speculative decoding since the engine started; all zero without a drafter."""
        ...

    @property
    def num_running(self) -> int:
        """Requests in the running batch."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests accepted and not running yet."""
        ...

    def add(self, request: RolloutRequest) -> None:
        """Accept a request. Raises ``ValueError`` for one that can never run (too long, or a duplicate id)."""
        ...

    def step(self) -> StepResult:
        """Advance every running request by one step. With nothing to do it returns an empty result."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests; unknown ids are ignored, since a request may have finished meanwhile."""
        ...

    def load_weights(self, packet: WeightPacket) -> None:
        """Replace the policy weights and forget every cached key/value that the old ones computed.

        Raises:
            StaleWeightsError: the version does not grow, or requests are unfinished (a response would mix versions).
        """
        ...

    def load_draft(self, packet: DraftPacket) -> None:
        """Replace the drafter; requests keep running, and their tokens are distributed as before.

        Raises:
            DraftRefusedError: no drafter to replace, the version does not grow, made for another target, wrong
                shapes, or values that are not finite. The engine keeps the drafter that it has.
        """
        ...

    def policy_state(self) -> Mapping[str, Any] | None:
        """What the speculation policy has learned about this machine, as JSON; None without a policy."""
        ...

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token after the first under the current weights, ``len(token_ids) - 1`` values."""
        ...

    def close(self) -> None:
        """Free the engine; it is not used again."""
        ...


class EngineFactory(Protocol):
    """A picklable recipe for an engine; it is carried out in the worker's process."""

    def build(self) -> RolloutEngine:
        """Start the engine."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Recipe for the vLLM engine."""

    model_path: str
    """Local folder, or hub id."""
    section: RolloutSection
    dtype: str = "bfloat16"
    trust_remote_code: bool = False
    draft: DraftSection = DraftSection()
    draft_path: str | None = None
    """Folder of the head for ``draft.kind: eagle3``."""
    policy_state: Mapping[str, Any] | None = None
    """Of an earlier run on this machine; see :meth:`RolloutEngine.policy_state`."""
    seed: int = 0
    """Give each worker another one, or they draw the same responses for the samples of a prompt."""

    def build(self) -> RolloutEngine:
        """Start vLLM: seconds when eager, about a minute when compiled."""
        # Imported here, so that the driver, which only pickles this recipe, never loads vLLM.
        from rollout.vllm_engine import VllmEngine

        return VllmEngine(self)


def spec_per_worker(spec: EngineSpec, num_workers: int) -> list[EngineSpec]:
    """``spec`` for each worker of a pool, with seeds that differ between workers and between seeds of ``spec``.

    Workers must not draw the same random numbers for the samples of one prompt.
    """
    return [replace(spec, seed=spec.seed * num_workers + rank) for rank in range(num_workers)]
