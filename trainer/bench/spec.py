"""``tlt bench spec``: generation with and without drafting, by batch size, in one interleaved run."""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from rollout.bench_engine import BatchTiming, EngineHandle, bench_engines
from rollout.placement import ray_session
from tlt.config.bench_schema import BenchConfig
from tlt.spec.totals import SpecTotals
from trainer.bench.stats import paired_ratio
from trainer.bench.workload import Workload, load_workload, write_results

logger = logging.getLogger(__name__)

OFF, ADAPTIVE = "off", "adaptive"
_WARM_UP_TURN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One way to generate."""

    name: str
    engine: EngineHandle
    k: int | None


def bench_spec(config: BenchConfig, argv: Sequence[str]) -> dict[str, Any]:
    """Measure, print the table, write every pair to a file; returns the summary for the JSON line."""
    workload = load_workload(config)
    with ray_session(), bench_engines([workload.plain, workload.drafting]) as (plain, drafting):
        columns = [
            Column(name=OFF, engine=plain, k=None),
            *(Column(name=str(k), engine=drafting, k=k) for k in config.bench.fixed),
            Column(name=ADAPTIVE, engine=drafting, k=None),
        ]
        rows, timings = [], {}
        for batch in config.bench.batches:
            timings[batch] = _measure(workload, columns, batch)
            rows.append(summarise(batch, timings[batch]))
            logger.info("batch %d: %.2fx with the policy", batch, rows[-1]["ratio"])
    summary = {"bench": "spec", "rows": rows}
    pairs = {
        str(batch): {name: [timing.tokens_per_s for timing in series] for name, series in by_column.items()}
        for batch, by_column in timings.items()
    }
    print_table(rows, config.bench.fixed)
    write_results(config, summary, argv, tok_s_of_pairs=pairs)
    return summary


def _measure(workload: Workload, columns: Sequence[Column], batch: int) -> Mapping[str, list[BatchTiming]]:
    """The turns of one batch size. The order of columns changes from turn to turn, so that none always follows."""
    bench, series = workload.config.bench, defaultdict(list)
    rng = random.Random(batch)
    for turn in range(_WARM_UP_TURN, bench.pairs):
        requests = workload.requests(batch, turn=turn, max_tokens=bench.num_tokens)
        for column in rng.sample(columns, k=len(columns)):
            timing = column.engine.time_batch(requests, column.k)
            if turn != _WARM_UP_TURN:
                series[column.name].append(timing)
    return series


def summarise(batch: int, series: Mapping[str, Sequence[BatchTiming]]) -> dict[str, Any]:
    """One row of the table: speeds are medians over turns, the ratio is the median of paired ratios."""
    speeds = {name: [timing.tokens_per_s for timing in timings] for name, timings in series.items()}
    ratio = paired_ratio(speeds[ADAPTIVE], speeds[OFF])
    adaptive = reduce(add, (timing.spec for timing in series[ADAPTIVE]), SpecTotals())
    fixed = {name: median(values) for name, values in speeds.items() if name not in (OFF, ADAPTIVE)}
    lengths = {
        name: reduce(add, (timing.spec for timing in series[name]), SpecTotals()).acceptance_length for name in fixed
    }
    return {
        "batch": batch,
        "off_tok_s": median(speeds[OFF]),
        "adaptive_tok_s": median(speeds[ADAPTIVE]),
        "ratio": ratio.value,
        "ratio_ci": [ratio.low, ratio.high],
        "acceptance_length": adaptive.acceptance_length,
        "mean_k": adaptive.metrics().get("spec/mean_k", 0.0),
        "fixed": fixed,
        "fixed_ratio": {name: paired_ratio(speeds[name], speeds[OFF]).value for name in fixed},
        "fixed_acceptance_length": lengths,
        "pairs": len(speeds[OFF]),
    }


def print_table(rows: Sequence[Mapping[str, Any]], fixed: Sequence[int]) -> None:
    """The rows for a person."""
    table = Table(title="tokens/s by running batch; ratios to the engine without a drafter")
    for heading in ("batch", "off", *(f"K={k}" for k in fixed), "policy", "ratio", "95 %", "accept length", "mean K"):
        table.add_column(heading, justify="right")
    for row in rows:
        low, high = row["ratio_ci"]
        length = row["acceptance_length"]
        table.add_row(
            str(row["batch"]),
            f"{row['off_tok_s']:.0f}",
            *(f"{row['fixed'][str(k)]:.0f} ({row['fixed_ratio'][str(k)]:.2f}x)" for k in fixed),
            f"{row['adaptive_tok_s']:.0f}",
            f"{row['ratio']:.2f}x",
            f"{low:.2f}-{high:.2f}",
            "-" if length is None else f"{length:.2f}",
            f"{row['mean_k']:.1f}",
        )
    Console().print(table)
