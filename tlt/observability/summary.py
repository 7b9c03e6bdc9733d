"""The result of a run: ``summary.json`` for machines, a table for people."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

# Wide enough for the table when stdout is a file or a pipe, where there is no terminal to ask.
PLAIN_WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """A greedy evaluation on held-out prompts."""

    accuracy: float
    """Share of responses whose answer is boxed and correct."""
    format_rate: float
    """Share of responses that box an answer, right or wrong."""
    accuracy_any_format: float
    """Share of responses whose boxed answer, or last word if there is no box, is the reference: correctness alone."""
    reward: float
    """Mean of the run's own weighted reward."""
    num_prompts: int
    mean_tokens: float
    """Mean response length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What ``summary.json`` holds. None where a thing was not measured."""

    completed: bool
    """False for a run that failed or was ended early."""
    eval_before: EvalResult | None
    eval_after: EvalResult | None
    eval_stderr: float | None
    """Standard error of the gain in accuracy, see :func:`paired_stderr`."""
    reward_first5: float | None
    """Mean training reward of the first five steps, see :func:`edge_means`."""
    reward_last5: float | None
    steps: int
    tokens_per_s: float
    """Generated tokens of the training rollouts per second of generating."""
    breakdown_s: Mapping[str, float]
    """Driver's wall time by phase, see :class:`tlt.observability.phases.PhaseClock`."""
    idle_s: Mapping[str, float]
    """Worker -> seconds without work during rollouts. Workers overlap: no part of the breakdown."""
    responses: int
    workers: int
    policy_version: int
    """Weight updates sent to the workers: one per rollout and evaluation, and three that prove the way at the start."""
    files: Mapping[str, str]
    """What -> absolute path."""

    @property
    def wall_s(self) -> float:
        """Wall time of the driver: the breakdown adds up to it, to the last bit."""
        return sum(self.breakdown_s.values())

    def to_json(self) -> dict[str, Any]:
        """``eval_before`` and ``eval_after`` become plain accuracies; ``eval`` has their details."""
        details = {"before": _optional_dict(self.eval_before), "after": _optional_dict(self.eval_after)}
        return {
            "completed": self.completed,
            "eval_before": self.eval_before and self.eval_before.accuracy,
            "eval_after": self.eval_after and self.eval_after.accuracy,
            "eval_stderr": self.eval_stderr,
            "eval": details,
            "reward_first5": self.reward_first5,
            "reward_last5": self.reward_last5,
            "steps": self.steps,
            "tokens_per_s": self.tokens_per_s,
            "wall_s": self.wall_s,
            "breakdown_s": dict(self.breakdown_s),
            "idle_s": dict(self.idle_s),
            "responses": self.responses,
            "workers": self.workers,
            "policy_version": self.policy_version,
            "files": dict(self.files),
        }


def _optional_dict(result: EvalResult | None) -> dict[str, Any] | None:
    return None if result is None else asdict(result)


def paired_stderr(before: Sequence[float], after: Sequence[float]) -> float:
    """Standard error of ``mean(after) - mean(before)`` for the same prompts in the same order.

    ``sqrt(variance of the per-prompt differences / n)``, with the sample variance (n - 1). Pairing matters:
    most prompts give the same result twice and carry no noise, which a pooled figure would add.

    Raises:
        ValueError: lengths differ, or there are fewer than two prompts.
    """
    differences = [late - early for early, late in zip(before, after, strict=True)]
    if len(differences) < 2:
        raise ValueError(f"a standard error needs at least two prompts, got {len(differences)}")
    return math.sqrt(statistics.variance(differences) / len(differences))


def edge_means(rewards: Sequence[float], width: int = 5) -> tuple[float | None, float | None]:
    """Means of the first and the last ``width`` values (overlapping in a short run); None without values."""
    if not rewards:
        return None, None
    return statistics.fmean(rewards[:width]), statistics.fmean(rewards[-width:])


def render_summary(summary: RunSummary) -> Table:
    """The summary as a table of two columns."""
    table = Table(title="Run summary", title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    before, after = summary.eval_before, summary.eval_after
    if before is not None and after is not None:
        gain = f"{after.accuracy - before.accuracy:+.3f}"
        if summary.eval_stderr is not None:
            gain += f", standard error {summary.eval_stderr:.3f}"
        table.add_row("eval accuracy", f"{_change(before.accuracy, after.accuracy)}  ({gain})")
        table.add_row("eval any format", _change(before.accuracy_any_format, after.accuracy_any_format))
        table.add_row("eval boxed answers", _change(before.format_rate, after.format_rate))
        table.add_row("eval reward", _change(before.reward, after.reward))
        table.add_row("eval mean tokens", _change(before.mean_tokens, after.mean_tokens, digits=1))
        table.add_row("eval prompts", str(after.num_prompts))
    if summary.reward_first5 is not None and summary.reward_last5 is not None:
        table.add_row("training reward", f"{_change(summary.reward_first5, summary.reward_last5)}  (5-step means)")
    table.add_section()
    table.add_row("steps", str(summary.steps))
    table.add_row("responses", str(summary.responses))
    table.add_row("policy version", str(summary.policy_version))
    table.add_row("tokens/s", f"{summary.tokens_per_s:.0f}")
    table.add_section()
    table.add_row("wall time", str(timedelta(seconds=round(summary.wall_s))))
    for name, spent_s in summary.breakdown_s.items():
        share = spent_s / summary.wall_s if summary.wall_s else 0.0
        table.add_row(f"  {name}", f"{spent_s:8.1f} s  {share:4.0%}")
    table.add_row(f"idle, {summary.workers} workers", "")
    for worker, idle_s in summary.idle_s.items():
        table.add_row(f"  {worker}", f"{idle_s:8.1f} s")
    return table


def _change(before: float, after: float, digits: int = 3) -> str:
    return f"{before:.{digits}f} -> {after:.{digits}f}"


def print_summary(summary: RunSummary, console: Console | None = None) -> None:
    """Print the table, then the paths, to stdout unless another ``console`` is given."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=PLAIN_WIDTH)
    console.print(render_summary(summary))
    # Outside the table and unwrapped: a path that is cut or broken cannot be copied.
    label_width = max((len(label) for label in summary.files), default=0)
    for label, path in summary.files.items():
        console.print(Text(f"{label:<{label_width}}  {path}"), soft_wrap=True)
