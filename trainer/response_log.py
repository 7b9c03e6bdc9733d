"""Responses on disk: ``responses/step-000001.jsonl`` of training, ``responses/eval-000000.jsonl`` of evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tlt.observability.json_files import JsonLinesWriter
from trainer.data import PromptItem
from trainer.rewards import RewardBatch


def write_responses(
    path: Path,
    items: Sequence[PromptItem],
    texts: Sequence[str],
    scores: RewardBatch,
    *,
    num_tokens: Sequence[int],
    finish_reasons: Sequence[str],
    policy_versions: Sequence[int],
) -> None:
    """One line per response; all sequences run over the same responses.

    Raises:
        TltError: the file cannot be written.
    """
    with JsonLinesWriter(path, durable=False) as lines:
        for row, (item, text) in enumerate(zip(items, texts, strict=True)):
            lines.write(
                {
                    "prompt_key": item.key,
                    "messages": list(item.messages),
                    "answer": item.answer,
                    "completion": text,
                    "num_tokens": num_tokens[row],
                    "finish_reason": finish_reasons[row],
                    "policy_version": policy_versions[row],
                    "reward": scores.total[row],
                    "rewards": {name: values[row] for name, values in scores.by_function.items()},
                }
            )
