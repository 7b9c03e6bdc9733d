"""``tlt bench calibrate``: fits the step-time model of this machine, which tells the policy which arms are hopeless."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from rollout.bench_engine import EngineHandle, bench_engines
from rollout.placement import ray_session
from tlt.config.bench_schema import BenchConfig
from tlt.spec.policy import SpecPolicy, SpecPolicySettings
from tlt.spec.step_time import StepSample, StepTimeModel
from trainer.bench.workload import Workload, load_workload
from trainer.policy_state import policy_key, policy_store

logger = logging.getLogger(__name__)

_TOKENS = 48
"""Of each response: some 20 steps per cell, and a cell takes seconds."""
_ROUNDS = 3


def bench_calibrate(config: BenchConfig) -> dict[str, Any]:
    """Measure, fit, keep the model for later runs; returns the summary for the JSON line."""
    workload = load_workload(config)
    with ray_session(), bench_engines([workload.drafting]) as (engine,):
        samples = calibrate(workload, engine)
    model = StepTimeModel.fit(samples)
    policy = SpecPolicy(SpecPolicySettings(arms=config.draft.arms), model, random.Random(0))
    path = policy_store().save(policy.to_json(), *policy_key(config.model.name, config.rollout, config.draft))
    _print(samples, model)
    logger.info("the policy of later runs starts from %s", path)
    return {"bench": "calibrate", "model": model.to_json(), "cells": len({(s.batch, s.k) for s in samples})}


def calibrate(workload: Workload, engine: EngineHandle) -> list[StepSample]:
    """Mean step times of every batch size and arm; the rounds go over all cells, so that drift hits them alike."""
    config, samples = workload.config, []
    for turn in range(_ROUNDS):
        for batch in config.bench.batches:
            requests = workload.requests(batch, turn=turn, max_tokens=_TOKENS)
            for k in config.draft.arms:
                timing = engine.time_batch(requests, k)
                if timing.num_steps == 0:
                    continue
                samples.append(
                    StepSample(
                        batch=batch,
                        k=k,
                        draft_s=timing.spec.draft_s / timing.num_steps,
                        verify_s=timing.spec.verify_s / timing.num_steps,
                    )
                )
        logger.info("calibration: round %d of %d", turn + 1, _ROUNDS)
    return samples


def _print(samples: Sequence[StepSample], model: StepTimeModel) -> None:
    table = Table(title="milliseconds per engine step: best measured, and fitted")
    for heading in ("batch", "K", "draft", "fitted", "verify", "fitted"):
        table.add_column(heading, justify="right")
    for batch, k in sorted({(sample.batch, sample.k) for sample in samples}):
        cell = [sample for sample in samples if (sample.batch, sample.k) == (batch, k)]
        table.add_row(
            str(batch),
            str(k),
            f"{min(s.draft_s for s in cell) * 1e3:.1f}",
            f"{model.draft_s(batch, k) * 1e3:.1f}",
            f"{min(s.verify_s for s in cell) * 1e3:.1f}",
            f"{model.verify_s(batch, k) * 1e3:.1f}",
        )
    Console().print(table)
