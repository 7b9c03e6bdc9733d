"""What crosses a boundary between driver, workers and learner: frozen, versioned, plain data.

No tensor library is imported here: token ids and log-probabilities travel as tuples, weights as numpy arrays
(see :mod:`rollout.weight_sync`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tlt.spec.totals import SpecTotals


class FinishReason(StrEnum):
    """Why a response ended, in vLLM's terms."""

    STOP = "stop"
    """End-of-sequence token or a stop string."""
    LENGTH = "length"
    """The token limit cut it off: a truncated response."""
    ABORT = "abort"
    """Cancelled before it was done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How tokens are drawn. ``temperature=0`` is greedy; ``top_k=0`` and ``top_p=1`` switch the filters off.

    Example:
        >>> SamplingSpec(max_tokens=64).temperature
        1.0
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """One response to be generated: the i-th sample of a prompt."""

    request_id: str
    """Unique within a rollout; a request that is issued again keeps its id."""
    prompt_key: str
    """Stable over steps: equal for equal prompts; the length history is kept per key."""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One finished response, with the record of how it came about."""

    request_id: str
    prompt_key: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural-log probability of each token under the distribution it was drawn from, that is after temperature,
    top-k and top-p (vLLM's ``processed_logprobs``)."""
    finish_reason: FinishReason
    policy_version: int
    """The one policy version that produced every token (mixes are refused by the engine)."""
    worker: int
    """Rank of the worker in the pool."""
    generate_s: float
    """Seconds from submission to the engine until the last token."""
    acceptance_length: float | None = None
    """Mean accepted draft tokens per verification + 1; None if no draft of this response was ever verified."""
    draft_version: int = 0
    """Version of the drafter when the response was finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What a worker tells the pool each time it is polled."""

    worker: int
    responses: tuple[Response, ...]
    """Responses that finished since the last report; each is reported exactly once."""
    turns: int
    """Turns of the worker loop so far: a busy worker whose count stands still is stuck."""
    num_generated_tokens: int
    """Tokens sampled so far in the life of the worker."""
    spec: SpecTotals = SpecTotals()
    """Counts of speculative decoding in the life of the worker."""
