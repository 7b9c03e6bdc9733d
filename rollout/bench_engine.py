"""One engine in a process of its own, driven directly: for measurements and checks, where a pool is in the way."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from rollout.actors import pin, worker_environment
from rollout.engine import EngineSpec, Generated
from tlt.spec.totals import SpecTotals
from tlt.types import RolloutRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTiming:
    """How fast a batch was generated."""

    num_tokens: int
    seconds: float
    """From the end of the first step, which is the prefill, to the last token."""
    num_steps: int
    spec: SpecTotals
    """Counts of these steps; the prefill's are left out."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the batch per second."""
        return self.num_tokens / self.seconds


class BenchEngine:
    """A vLLM engine as a plain class; :func:`bench_engine` puts it into a process."""

    def __init__(self, spec: EngineSpec) -> None:
        if spec.section.device == "cpu":
            pin(sorted(os.sched_getaffinity(0))[: spec.section.cores_per_worker])
        self._engine: Any = spec.build()
        self._drafts = spec.draft.kind != "off"

    def ready(self) -> None:
        """Returns when the engine is up."""

    def time_batch(self, requests: Sequence[RolloutRequest], k: int | None = None) -> BatchTiming:
        """Generate all requests at once and time it; ``k`` forces the number of draft tokens, None is the policy."""
        self._begin(requests, k)
        self._engine.step()
        before, num_tokens, num_steps, begin = self._engine.spec_totals, 0, 0, time.perf_counter()
        while self._engine.num_running + self._engine.num_waiting:
            num_tokens += self._engine.step().num_new_tokens
            num_steps += 1
        seconds = time.perf_counter() - begin
        return BatchTiming(
            num_tokens=num_tokens, seconds=seconds, num_steps=num_steps, spec=self._engine.spec_totals - before
        )

    def generate(self, requests: Sequence[RolloutRequest], k: int | None = None) -> list[Generated]:
        """The responses, in the order of the requests."""
        self._begin(requests, k)
        finished: dict[str, Generated] = {}
        while self._engine.num_running + self._engine.num_waiting:
            finished |= {generated.request_id: generated for generated in self._engine.step().finished}
        return [finished[request.request_id] for request in requests]

    def spec_totals(self) -> SpecTotals:
        """Counts since the engine started."""
        totals: SpecTotals = self._engine.spec_totals
        return totals

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """See :meth:`rollout.engine.RolloutEngine.score`."""
        logprobs: list[float] = self._engine.score(token_ids)
        return logprobs

    def _begin(self, requests: Sequence[RolloutRequest], k: int | None) -> None:
        if self._drafts:
            self._engine.force_k(k)
        for request in requests:
            self._engine.add(request)


class EngineHandle:
    """A :class:`BenchEngine` in another process; the methods block."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def time_batch(self, requests: Sequence[RolloutRequest], k: int | None = None) -> BatchTiming:
        """See :meth:`BenchEngine.time_batch`."""
        timing: BatchTiming = ray.get(self._actor.time_batch.remote(requests, k))
        return timing

    def generate(self, requests: Sequence[RolloutRequest], k: int | None = None) -> list[Generated]:
        """See :meth:`BenchEngine.generate`."""
        responses: list[Generated] = ray.get(self._actor.generate.remote(requests, k))
        return responses

    def spec_totals(self) -> SpecTotals:
        """See :meth:`BenchEngine.spec_totals`."""
        totals: SpecTotals = ray.get(self._actor.spec_totals.remote())
        return totals

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """See :meth:`BenchEngine.score`."""
        logprobs: list[float] = ray.get(self._actor.score.remote(token_ids))
        return logprobs


@contextmanager
def bench_engines(specs: Sequence[EngineSpec]) -> Iterator[list[EngineHandle]]:
    """Start an engine per recipe, one after the other, all on the same cores; stop them at the end.

    They are meant to take turns: one works while the others wait, so that what is compared meets the same machine.
    Ray must be initialised.
    """
    actors: list[Any] = []
    try:
        for spec in specs:
            section = spec.section
            options = {
                "num_cpus": 0,
                "num_gpus": section.tensor_parallel_size / len(specs) if section.device == "gpu" else 0,
                "runtime_env": {"env_vars": worker_environment(section)},
            }
            actors.append(ray.remote(**options)(BenchEngine).remote(spec))
            # Two compilations at once would take each other's cores.
            ray.get(actors[-1].ready.remote())
        yield [EngineHandle(actor) for actor in actors]
    finally:
        for actor in actors:
            ray.kill(actor, no_restart=True)
