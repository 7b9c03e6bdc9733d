"""How TRL calls a rollout function, and what it does with the answer: what our adapter takes for granted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from tests.rollout_source import Scripted, ScriptedSource
from tlt.config.schema import TrainConfig
from tlt.types import RolloutRequest, SamplingSpec
from trainer.learner import PoolGRPOTrainer, build_learner
from trainer.trl_adapter import make_rollout_func, policy_state

PROMPTS = [[{"role": "user", "content": f"{number} + 1?"}] for number in range(6)]
A_TO_D, BANG = (64, 65, 66, 67), 0
"""Tokens of the tiny tokenizer: its ids follow the printable bytes, from "!" on."""


def one_letter(index: int, request: RolloutRequest) -> Scripted:
    return Scripted(token_ids=(A_TO_D[index], BANG), logprobs=(-5.0, -5.0))


def dataset() -> Dataset:
    return Dataset.from_dict({"prompt": PROMPTS, "number": list(range(6))})


class Recorder:
    """A reward function that keeps what it is given."""

    __name__ = "recorder"

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **columns: Any) -> list[float]:
        self.calls.append(columns)
        return [float(index) for index in range(len(columns["completions"]))]


def learner(
    folder: Path, output_dir: Path, source: ScriptedSource, reward: Recorder, **options: Any
) -> PoolGRPOTrainer:
    config = TrainConfig.model_validate(
        {
            "data": {"source": {"kind": "reasoning_gym", "tasks": {"chain_sum": {}}}},
            "rewards": {"functions": [{"kind": "format"}]},
            "rollout": {"max_completion_length": 8},
            "learner": {
                "max_steps": 3,
                "prompts_per_step": 2,
                "num_generations": 2,
                "per_device_train_batch_size": 2,
                "learning_rate": 1e-2,
                "bf16": False,
                "num_threads": 1,
                **options,
            },
        }
    )
    return build_learner(
        config,
        model_path=str(folder),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        dataset=dataset(),
        source=source,
        reward_func=reward,
        output_dir=output_dir,
    )


def test_one_sync_then_one_rollout_per_step(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Catches rollouts with the weights of the step before, syncs without an update, and several small rollouts."""
    source, reward = ScriptedSource(one_letter), Recorder()
    trainer = learner(tiny_llama_dir, tmp_path, source, reward)
    trainer.train()
    assert source.events == ["sync", "generate"] * 3
    assert [call["policy_version"] for call in reward.calls] == [[1] * 4, [2] * 4, [3] * 4]
    name = "model.embed_tokens.weight"
    states = [state[name] for state in source.states]
    assert not torch.equal(states[0], states[1])
    assert not torch.equal(states[1], states[2])

    final = trainer.model.get_input_embeddings().weight
    assert not torch.equal(states[2], final)
    assert trainer.sync_weights() == 4
    assert torch.equal(source.states[3][name], final)


def test_generations_are_reused_for_num_iterations(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Catches a rollout per iteration: the PPO ratio would be 1 always, at twice the price."""
    source = ScriptedSource(one_letter)
    learner(tiny_llama_dir, tmp_path, source, Recorder(), num_iterations=2, max_steps=4).train()
    assert source.events == ["sync", "generate"] * 2


def test_groups_are_contiguous_and_columns_reach_rewards(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Catches advantages computed over mixed prompts, and columns of one response handed to another."""
    source, reward = ScriptedSource(one_letter), Recorder()
    learner(tiny_llama_dir, tmp_path, source, reward).train()
    assert [len(batch) for batch in source.batches] == [4, 4, 4]
    for batch, call in zip(source.batches, reward.calls, strict=True):
        keys = [request.prompt_key for request in batch]
        assert keys[0] == keys[1] != keys[2] == keys[3]
        assert [int(prompt[0]["content"][0]) for prompt in call["prompts"]] == call["number"]
        assert call["number"][0] == call["number"][1] != call["number"][2]
        assert [completion[0]["content"] for completion in call["completions"]] == ["a!", "b!", "c!", "d!"]
        assert call["completion_ids"] == [[letter, BANG] for letter in A_TO_D]
        assert call["finish_reason"] == ["stop"] * 4
        assert call["worker"] == [0, 1, 0, 1]
        assert call["generate_s"] == [0.5, 1.5, 2.5, 3.5]
    seen = {number for call in reward.calls for number in call["number"]}
    assert seen == set(range(6)), "one epoch is three steps of two prompts"


def test_ten_lines_for_trl_users(tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a rollout function that works in our trainer only (README shows these lines, with a real pool)."""
    from trl import GRPOConfig, GRPOTrainer

    monkeypatch.setenv("CI", "1")  # TRL sends no telemetry then.
    pool = ScriptedSource(one_letter)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    trainer = GRPOTrainer(
        model=str(tiny_llama_dir),
        reward_funcs=lambda completions, **columns: [float(len(c[0]["content"])) for c in completions],
        args=GRPOConfig(
            str(tmp_path), use_cpu=True, bf16=False, max_steps=2, num_generations=2, per_device_train_batch_size=4,
            max_completion_length=8, report_to="none", save_strategy="no", disable_tqdm=True,
        ),
        train_dataset=dataset(),
        processing_class=tokenizer,
        rollout_func=make_rollout_func(pool, tokenizer, SamplingSpec(max_tokens=8)),
    )  # fmt: skip
    start = {name: tensor.clone() for name, tensor in policy_state(trainer.model).items()}
    trainer.train()
    assert pool.events == ["sync", "generate"] * 2
    assert all(torch.equal(pool.states[0][name], start[name]) for name in start)
