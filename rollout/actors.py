"""Rollout workers as Ray actors: the process around a :class:`rollout.worker.RolloutWorker`.

The class is plain; :func:`remote_worker` wraps it where it is placed. Two concurrency groups keep the long-running
loop and the control calls apart: ``loop`` has the one thread that touches the engine.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
from contextlib import suppress
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout.engine import EngineFactory, RolloutEngine
from rollout.worker import RolloutWorker
from tlt.config.schema import RolloutSection

LOOP_GROUP = "loop"
CONTROL_GROUP = "control"
_CONTROL_THREADS = 8
"""Poll, submit, weights, score and stop may all be waiting at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where an actor runs."""

    node_id: str
    pid: int
    cores: tuple[int, ...]
    """Cores that its process may use."""


class RolloutActor(RolloutWorker):
    """A rollout worker in a process of its own."""

    def locate(self) -> Location:
        """Node and cores of this process; engine libraries are not loaded yet."""
        return Location(
            node_id=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            cores=tuple(sorted(os.sched_getaffinity(0))),
        )

    def serve(self, factory: EngineFactory, cores: Sequence[int] | None) -> None:
        """The worker loop, on ``cores`` if given; returns when stopped."""

        def build() -> RolloutEngine:
            if cores is not None:
                pin(cores)
            return factory.build()

        self.run(build)


def pin(cores: Sequence[int]) -> None:
    """Bind this process. Before torch is imported, so that it sizes its thread pool; Ray's threads exist already."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # a thread may end meanwhile
            os.sched_setaffinity(int(thread.name), cores)


def remote_worker(rank: int, section: RolloutSection, group: PlacementGroup) -> Any:
    """Create the actor of worker ``rank`` on its bundle; returns the handle at once."""
    on_gpu = section.device == "gpu"
    options: dict[str, Any] = {
        "num_cpus": section.cores_per_worker,
        "num_gpus": section.tensor_parallel_size if on_gpu else 0,
        "max_restarts": 0,
        "concurrency_groups": {LOOP_GROUP: 1, CONTROL_GROUP: _CONTROL_THREADS},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        "runtime_env": {"env_vars": worker_environment(section)},
    }
    return ray.remote(**options)(RolloutActor).remote(rank)


def worker_environment(section: RolloutSection) -> dict[str, str]:
    """Environment variables of an engine's process."""
    if section.device == "gpu":
        return {}
    threads = str(section.cores_per_worker)
    return {
        "OMP_NUM_THREADS": threads,
        # OpenMP threads that spin after their work would take the learner's cores.
        "KMP_BLOCKTIME": "1",
        "LD_PRELOAD": ":".join(str(path) for path in _preload_libraries()),
    }


def _preload_libraries() -> list[str]:
    """What vLLM's CPU backend wants preloaded: Intel OpenMP (from its wheel), and tcmalloc when the system has it."""
    files = importlib.metadata.files("intel-openmp") or []
    libraries = [str(Path(str(file.locate())).resolve()) for file in files if file.name == "libiomp5.so"]
    tcmalloc = find_library("tcmalloc_minimal")
    return libraries + ([tcmalloc] if tcmalloc else [])
