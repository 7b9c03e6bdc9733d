"""What the learner does when engine and learner disagree about probabilities, against values computed by hand.

The source answers with fixed tokens; its log-probabilities are the learner's own, lowered or raised by a constant.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from tests.rollout_source import Scripted, ScriptedSource
from tlt.config.schema import TrainConfig
from tlt.types import FinishReason, RolloutRequest
from trainer.learner import PoolGRPOTrainer, StepMetrics, build_learner

COMPLETIONS = [(65, 66, 67), (70, 71, 72, 73, 74)]
"""Neither ends in EOS, as after a stop string."""
REWARDS = [1.0, 0.0]
ADVANTAGE = 0.5 / (math.sqrt(0.5) + 1e-4)
"""Of the first; the second has the negative. Mean of the group 0.5, standard deviation (n - 1) sqrt(0.5)."""
EQUAL_LENGTHS = [(65, 66, 67, 68), (70, 71, 72, 73)]


class OneStep:
    """One GRPO step on one prompt with two scripted completions."""

    def __init__(
        self,
        folder: Path,
        output_dir: Path,
        *,
        engine_minus_learner: float = 0.0,
        completions: list[tuple[int, ...]] = COMPLETIONS,
        finish: tuple[FinishReason, FinishReason] = (FinishReason.STOP, FinishReason.STOP),
        **learner: Any,
    ) -> None:
        self._completions = completions
        self._finish = finish
        self._offset = engine_minus_learner
        self.metrics: dict[str, float] = {}
        config = TrainConfig.model_validate(
            {
                "data": {"source": {"kind": "reasoning_gym", "tasks": {"chain_sum": {}}}},
                "rewards": {"functions": [{"kind": "format"}]},
                "rollout": {"max_completion_length": 8, "temperature": 0.7},
                "learner": {
                    "max_steps": 1,
                    "prompts_per_step": 1,
                    "num_generations": 2,
                    "per_device_train_batch_size": 2,
                    "learning_rate": 1e-3,
                    "bf16": False,
                    "num_threads": 1,
                    **learner,
                },
            }
        )
        self._trainer: PoolGRPOTrainer = build_learner(
            config,
            model_path=str(folder),
            tokenizer=AutoTokenizer.from_pretrained(folder),
            dataset=Dataset.from_dict({"prompt": ["hello"]}),
            source=ScriptedSource(self._answer),
            reward_func=self._reward,
            output_dir=output_dir,
            callbacks=[StepMetrics(self._keep)],
        )
        self._trainer.train()

    def _answer(self, index: int, request: RolloutRequest) -> Scripted:
        tokens = self._completions[index]
        prompt = request.prompt_token_ids
        with torch.no_grad():
            logits = self._trainer.model(input_ids=torch.tensor([prompt + tokens])).logits[0] / 0.7
        dist = torch.log_softmax(logits, dim=-1)
        own = [float(dist[len(prompt) - 1 + i, token]) for i, token in enumerate(tokens)]
        return Scripted(
            token_ids=tokens,
            logprobs=tuple(logp + self._offset for logp in own),
            finish_reason=self._finish[index],
        )

    @staticmethod
    def _reward(completions: list[str], **columns: Any) -> list[float]:
        return REWARDS

    def _keep(self, step: int, metrics: dict[str, float]) -> None:
        assert step == 1
        self.metrics = metrics


@pytest.fixture(scope="module")
def agreed(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Metrics of a step in which engine and learner agree."""
    return OneStep(tiny_llama_dir, tmp_path_factory.mktemp("agreed"), completions=EQUAL_LENGTHS).metrics


@pytest.mark.parametrize(
    ("engine_minus_learner", "mode", "weight"),
    [
        (0.5, "token_truncate", math.exp(-0.5)),
        (-0.5, "token_truncate", math.exp(0.5)),
        (-2.0, "token_truncate", 3.0),  # e^2 = 7.4, capped
        (-2.0, "token_mask", 0.0),
        (0.5, "sequence_truncate", math.exp(-0.5 * 4)),
        (0.5, "off", 1.0),
    ],
)
def test_mismatch_scales_the_gradient_and_triggers_no_clip(
    engine_minus_learner: float,
    mode: str,
    weight: float,
    agreed: dict[str, float],
    tiny_llama_dir: Path,
    tmp_path: Path,
) -> None:
    """Catches engine log-probabilities that enter the PPO clip (0.5 nats is outside of it: no gradient at all), a
    correction that is upside down, not capped, or, as in TRL without use_vllm, not applied."""
    step = OneStep(
        tiny_llama_dir,
        tmp_path,
        engine_minus_learner=engine_minus_learner,
        completions=EQUAL_LENGTHS,
        importance_sampling=mode,
        importance_sampling_cap=3.0,
    ).metrics
    assert agreed["grad_norm"] > 0.01
    assert step["grad_norm"] == pytest.approx(weight * agreed["grad_norm"], rel=1e-3, abs=1e-6)
    assert step["clip_ratio/region_mean"] == 0.0
    if mode != "off":
        assert step["sampling/sampling_logp_difference/mean"] == pytest.approx(abs(engine_minus_learner), abs=1e-4)
        assert step["sampling/importance_sampling_ratio/mean"] == pytest.approx(weight, abs=1e-4)


@pytest.mark.parametrize("rows_per_pass", [1, 2])
@pytest.mark.parametrize(
    ("loss_type", "loss"),
    [
        # Ratio 1: the sum over tokens is 3 A - 5 A = -2 A; 8 tokens in all, 2 rows of at most 8.
        ("dapo", 2 * ADVANTAGE / 8),
        ("dr_grpo", 2 * ADVANTAGE / (2 * 8)),
        ("grpo", 0.0),
    ],
)
def test_loss_without_mismatch(
    loss_type: str, loss: float, rows_per_pass: int, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    """Catches wrong advantages or normalisation, also where the step is split into two passes."""
    step = OneStep(tiny_llama_dir, tmp_path, loss_type=loss_type, per_device_train_batch_size=rows_per_pass).metrics
    assert step["loss"] == pytest.approx(loss, abs=1e-5)
    assert step["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("mask", "loss"),
    [
        (True, -ADVANTAGE),  # only the 3 tokens of the first response are left
        (False, 2 * ADVANTAGE / 8),
    ],
)
def test_truncated_responses_are_masked_on_request(
    mask: bool, loss: float, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    """Catches a mask that is ignored, or that takes the response that a stop string ended as well (loss 0)."""
    step = OneStep(
        tiny_llama_dir,
        tmp_path,
        finish=(FinishReason.STOP, FinishReason.LENGTH),
        mask_truncated_completions=mask,
    ).metrics
    assert step["loss"] == pytest.approx(loss, abs=1e-5)


def test_a_step_with_all_responses_masked_is_harmless(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Catches a division by zero tokens: NaN weights from one unlucky step."""
    step = OneStep(
        tiny_llama_dir,
        tmp_path,
        finish=(FinishReason.LENGTH, FinishReason.LENGTH),
        mask_truncated_completions=True,
    ).metrics
    assert step["loss"] == 0.0
    assert step["grad_norm"] == 0.0
