"""``tlt bench useless-drafter``: what drafting costs when no draft is any good. The policy must turn it off."""

from __future__ import annotations

import logging
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from rollout.bench_engine import EngineHandle, bench_engines
from rollout.placement import ray_session
from tlt.config.bench_schema import BenchConfig
from tlt.draft.checkpoint import save_head
from tlt.draft.config import make_head_config
from tlt.draft.model import Eagle3Head
from tlt.types import RolloutRequest
from trainer.bench.stats import paired_ratio
from trainer.bench.workload import Workload, load_workload, write_results

logger = logging.getLogger(__name__)

_WARM_UP_TURN = -1


def bench_useless_drafter(config: BenchConfig, argv: Sequence[str]) -> dict[str, Any]:
    """Whole rollouts with a random head against rollouts without one, in turns; returns the summary.

    Each rollout starts ``max(bench.batches)`` responses at once and ends with the last of them. Their lengths are
    given, with a long tail, so the batch walks from full to one and both engines generate the same number of tokens.
    """
    workload = load_workload(config)
    with tempfile.TemporaryDirectory() as scratch, ray_session():
        head = make_random_head(workload, Path(scratch) / "head")
        drafting = workload.spec(config.draft, draft_path=str(head))
        with bench_engines([workload.plain, drafting]) as (plain, useless):
            off, adaptive = [], []
            for turn in range(_WARM_UP_TURN, config.bench.pairs):
                batch = max(config.bench.batches)
                requests = workload.requests(batch, turn=turn, max_tokens=_tail_lengths(workload, batch, turn))
                first, second = (plain, useless) if turn % 2 else (useless, plain)
                seconds = {id(engine): _seconds(engine, requests) for engine in (first, second)}
                if turn == _WARM_UP_TURN:
                    continue
                off.append(seconds[id(plain)])
                adaptive.append(seconds[id(useless)])
                logger.info("pair %d: %.2f s without, %.2f s with a useless drafter", turn + 1, off[-1], adaptive[-1])
            totals = useless.spec_totals()
    ratio = paired_ratio(off, adaptive)
    summary = {
        "bench": "useless-drafter",
        "ratio": ratio.value,
        "ratio_ci": [ratio.low, ratio.high],
        "pairs": len(off),
        "mean_k": totals.metrics()["spec/mean_k"],
        "acceptance_length": totals.acceptance_length,
    }
    write_results(config, summary, argv, off_s=off, adaptive_s=adaptive)
    return summary


def make_random_head(workload: Workload, folder: Path) -> Path:
    """A head of the right shape whose weights nobody trained; returns its folder."""
    target = AutoConfig.from_pretrained(workload.model_path)
    config = make_head_config(target, draft_vocab_size=min(1024, target.vocab_size))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(workload.config.run.seed)
        head = Eagle3Head(config, torch.arange(config.draft_vocab_size))
    save_head(folder, head, info={"target": {"name": workload.model_path, "sha256": "none"}})
    return folder


def _tail_lengths(workload: Workload, batch: int, turn: int) -> list[int]:
    """Exponential with mean ``bench.num_tokens``, cut at what fits."""
    config, rng = workload.config, random.Random(turn)
    most = config.rollout.max_model_len - config.data.max_prompt_length
    return [min(1 + int(rng.expovariate(1.0 / config.bench.num_tokens)), most) for _ in range(batch)]


def _seconds(engine: EngineHandle, requests: Sequence[RolloutRequest]) -> float:
    begin = time.perf_counter()
    engine.generate(requests)
    return time.perf_counter() - begin
