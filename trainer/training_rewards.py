"""The reward function that TRL calls: scores a rollout, writes the responses down, counts what went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from tlt.observability.phases import Phase, PhaseClock
from tlt.observability.progress import Progress
from tlt.observability.run_folder import RunFolder
from tlt.types import FinishReason
from trainer.data import PromptIndex
from trainer.response_log import write_responses
from trainer.rewards import RewardBatch, RewardRunner

Completion = list[dict[str, str]]
"""TRL's form of a response to a chat prompt: one assistant message."""


class TrainingRewards:
    """Called by TRL once per rollout, in the driver; the scoring itself happens in other processes."""

    __name__ = "reward"
    """TRL names its columns and metrics after the function."""

    def __init__(
        self,
        runner: RewardRunner,
        index: PromptIndex,
        *,
        clock: PhaseClock,
        progress: Progress,
        folder: RunFolder,
    ) -> None:
        self._runner = runner
        self._index = index
        self._clock = clock
        self._progress = progress
        self._folder = folder
        self.step = 0
        """Training step that the next rollout belongs to."""
        self.metrics: dict[str, float] = {}
        """Of the last rollout, under their final names."""
        self.history: list[float] = []
        """Mean reward of each rollout."""

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float]:
        """One reward per response. ``columns`` has what the rollout function returned beside the tokens."""
        with self._clock.phase(Phase.REWARD):
            self._progress.enter(Phase.REWARD)
            items = [self._index[prompt] for prompt in prompts]
            texts = [completion[0]["content"] for completion in completions]
            batch = self._runner.score(items, texts)
            self._book(batch, columns)
            write_responses(
                self._folder.responses_dir / f"step-{self.step:06d}.jsonl",
                items,
                texts,
                batch,
                num_tokens=[len(ids) for ids in columns["completion_ids"]],
                finish_reasons=columns["finish_reason"],
                policy_versions=columns["policy_version"],
            )
        self._progress.enter(Phase.LEARN)
        return list(batch.total)

    def _book(self, batch: RewardBatch, columns: dict[str, Any]) -> None:
        self.history.append(fmean(batch.total))
        self.metrics = {
            "reward/mean": self.history[-1],
            **{f"reward/{name.replace(':', '.')}": fmean(scores) for name, scores in batch.by_function.items()},
            "reward/errors_count": sum(batch.errors.values()),
            "reward/timeouts_count": sum(batch.timeouts.values()),
            "reward/seconds_s": batch.seconds,
            "rollout/truncated_share": fmean(reason == FinishReason.LENGTH for reason in columns["finish_reason"]),
            "rollout/mean_tokens": fmean(len(ids) for ids in columns["completion_ids"]),
        }
