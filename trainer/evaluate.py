"""Greedy evaluation on held-out prompts, with format and correctness apart."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tlt.config.schema import RewardSection
from tlt.observability.summary import EvalResult
from tlt.types import Response, RolloutRequest, SamplingSpec
from trainer.data import PromptItem
from trainer.response_log import write_responses
from trainer.rewards import RewardRunner, boxed_answer, final_answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FULL_SCORE = 1.0 - 1e-6
"""Scorers give partial credit below 1 for near misses, which is no correct answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """An evaluation and, for paired comparisons, its outcome per prompt."""

    result: EvalResult
    correct: tuple[float, ...]
    """1 where the answer is boxed and correct, by prompt."""


def evaluate(
    generate: Callable[[Sequence[RolloutRequest]], list[Response]],
    items: Sequence[PromptItem],
    *,
    sampling: SamplingSpec,
    step: int,
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    runner: RewardRunner,
    rewards: RewardSection,
) -> Evaluation:
    """One greedy response for each of ``items``, scored by the run's own rewards.

    The responses are written to ``path``. Correct means: boxed, and full score from the first reward function that
    judges more than format.
    """
    requests = [
        RolloutRequest(
            request_id=f"eval-{step}-{index}",
            prompt_key=item.key,
            prompt_token_ids=item.token_ids,
            sampling=sampling,
        )
        for index, item in enumerate(items)
    ]
    responses = generate(requests)
    texts = tokenizer.batch_decode([list(r.token_ids) for r in responses], skip_special_tokens=True)
    scores = runner.score(items, texts)
    write_responses(
        path,
        items,
        texts,
        scores,
        num_tokens=[len(r.token_ids) for r in responses],
        finish_reasons=[r.finish_reason.value for r in responses],
        policy_versions=[r.policy_version for r in responses],
    )
    judge = next((i for i, f in enumerate(rewards.functions) if f.kind != "format"), 0)
    judged = scores.by_function[runner.names[judge]]
    boxed = [boxed_answer(text) is not None for text in texts]
    correct = tuple(float(b and score >= _FULL_SCORE) for b, score in zip(boxed, judged, strict=True))
    return Evaluation(
        result=EvalResult(
            accuracy=statistics.fmean(correct),
            format_rate=statistics.fmean(boxed),
            accuracy_any_format=statistics.fmean(
                final_answer(text) == item.answer for item, text in zip(items, texts, strict=True)
            ),
            reward=statistics.fmean(scores.total),
            num_prompts=len(items),
            mean_tokens=statistics.fmean(len(r.token_ids) for r in responses),
        ),
        correct=correct,
    )
