"""Which request goes to which worker next. Pure: no clock, no Ray.

Requests wait in one queue, longest expected response first, and go out only when a worker has room: whatever is
long starts early, and a worker that runs dry is really idle, not merely unlucky in a static split.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tlt.types import Response, RolloutRequest


@dataclass(slots=True)
class LengthHistory:
    """Expected response length per prompt: a moving average over its past responses, else scaled prompt length."""

    smoothing: float = 0.5
    """Weight of the newest response in the moving average."""
    _expected: dict[str, float] = field(default_factory=dict)
    _response_tokens: int = 0
    _prompt_tokens: int = 0

    def record(self, request: RolloutRequest, num_tokens: int) -> None:
        """Learn from one finished response."""
        old = self._expected.get(request.prompt_key, float(num_tokens))
        self._expected[request.prompt_key] = old + self.smoothing * (num_tokens - old)
        self._response_tokens += num_tokens
        self._prompt_tokens += len(request.prompt_token_ids)

    def expected_length(self, request: RolloutRequest) -> float:
        """Tokens that the response will probably have.

        A prompt without history counts with its own length, scaled by the ratio of response to prompt tokens seen so
        far, so that known and unknown prompts can be compared.
        """
        known = self._expected.get(request.prompt_key)
        if known is not None:
            return known
        ratio = self._response_tokens / self._prompt_tokens if self._prompt_tokens else 1.0
        return ratio * len(request.prompt_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Requests that one worker is to start now."""

    worker: int
    requests: tuple[RolloutRequest, ...]


class Router:
    """The queue of one rollout and what each worker has of it."""

    def __init__(self, requests: Sequence[RolloutRequest], history: LengthHistory, *, capacity: int) -> None:
        """``capacity`` is the most requests that one worker holds at a time."""
        self._requests = {request.request_id: request for request in requests}
        if len(self._requests) != len(requests):
            raise ValueError("request ids repeat within one rollout; give each request its own id")
        self._history = history
        self._capacity = capacity
        self._order = {request.request_id: index for index, request in enumerate(requests)}
        self._queue: list[tuple[float, int, str]] = []
        self._held: dict[int, set[str]] = {}
        self._responses: dict[str, Response] = {}
        self._enqueue(self._requests)

    @property
    def done(self) -> bool:
        """Every request has its response."""
        return len(self._responses) == len(self._requests)

    @property
    def num_done(self) -> int:
        """Responses so far."""
        return len(self._responses)

    def held(self, worker: int) -> frozenset[str]:
        """Ids of the requests that a worker has and has not answered."""
        return frozenset(self._held.get(worker, ()))

    def assign(self, workers: Iterable[int]) -> list[Assignment]:
        """Hand out queued requests, one at a time to the least loaded of ``workers``, until all are full."""
        loads = [(len(self._held.get(worker, ())), worker) for worker in workers]
        heapq.heapify(loads)
        given: dict[int, list[RolloutRequest]] = {}
        while self._queue and loads and loads[0][0] < self._capacity:
            _, _, request_id = heapq.heappop(self._queue)
            load, worker = loads[0]
            heapq.heapreplace(loads, (load + 1, worker))
            self._held.setdefault(worker, set()).add(request_id)
            given.setdefault(worker, []).append(self._requests[request_id])
        return [Assignment(worker=worker, requests=tuple(batch)) for worker, batch in given.items()]

    def record(self, response: Response) -> bool:
        """Take a response. False: it is a late duplicate (its worker was given up and the request re-issued)."""
        held = self._held.get(response.worker, set())
        if response.request_id not in held:
            return False
        held.remove(response.request_id)
        self._responses[response.request_id] = response
        self._history.record(self._requests[response.request_id], len(response.token_ids))
        return True

    def release(self, worker: int) -> tuple[str, ...]:
        """Put what a lost worker had back into the queue; returns the ids."""
        lost = self._held.pop(worker, set())
        self._enqueue(lost)
        return tuple(sorted(lost, key=self._order.__getitem__))

    def responses(self) -> list[Response]:
        """All responses in the order of the requests; only when done."""
        assert self.done, "responses() before the rollout is done"
        return [self._responses[request_id] for request_id in self._requests]

    def _enqueue(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            expected = self._history.expected_length(self._requests[request_id])
            # Ties are broken by submission order, so that a rollout is handed out reproducibly.
            heapq.heappush(self._queue, (-expected, self._order[request_id], request_id))
