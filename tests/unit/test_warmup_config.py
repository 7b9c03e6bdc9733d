"""The schema of ``tlt draft warmup``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tlt.config import load_config, schema_of
from tlt.config.draft_schema import WarmupConfig
from tlt.errors import ConfigError
from trainer.cli import main

SHIPPED = Path(__file__).parents[2] / "configs" / "drafter_cpu.yaml"


def test_config_show_knows_the_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches ``tlt config show`` reading a drafter's file as a training run, and a dump that does not load back."""
    assert main(["config", "show", str(SHIPPED), "head.draft_vocab_size=512"]) == 0
    dumped = tmp_path / "shown.yaml"
    dumped.write_text(capsys.readouterr().out)
    assert schema_of(dumped) is WarmupConfig
    config = load_config(dumped, (), WarmupConfig)
    assert config == load_config(SHIPPED, ["head.draft_vocab_size=512"], WarmupConfig)


def test_the_shipped_drafter_is_for_the_shipped_run() -> None:
    """Catches a drafter that is warmed up on other tasks, limits or temperature than those of the run it is for, or
    on that run's own questions."""
    drafter, run = load_config(SHIPPED, (), WarmupConfig), load_config(SHIPPED.with_name("long_tail_cpu.yaml"))
    assert drafter.data is not None
    tasks = [data.source.model_dump()["tasks"] for data in (drafter.data, run.data)]
    assert tasks[0] == tasks[1]
    assert drafter.model == run.model
    assert drafter.data.max_prompt_length == run.data.max_prompt_length
    sampling = {"temperature", "top_p", "top_k", "min_tokens", "max_completion_length", "stop"}
    assert drafter.rollout.model_dump(include=sampling) == run.rollout.model_dump(include=sampling)
    assert drafter.run.seed != run.run.seed


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("data=null", "responses.path is not set, so responses are generated, and that needs prompts"),
        ("rollout.max_model_len=512", "data.max_prompt_length + rollout.max_completion_length = 960 is above"),
        ("responses.num_prompts=385", "responses.num_prompts=385 is above data.source.num_train=384"),
        ("head.aux_layers=[1, 2]", "head: aux_layers=[1, 2] must be three ascending layers"),
        ("head.aux_layers=[2, 1, 3]", "head: aux_layers=[2, 1, 3] must be three ascending layers"),
        ("train.num_ttt_steps=0", "train.num_ttt_steps = 0: must be at least 1"),
        ("train.step_decay=1.5", "train.step_decay = 1.5: must be at most 1"),
        ("train.max_step=3", "train.max_step = 3: unknown key; did you mean 'max_steps'?"),
        ("rollout.temperature=0", "rollout.temperature = 0: must be greater than 0"),
    ],
)
def test_rules(flag: str, message: str) -> None:
    """Catches a mistake that shows only after responses have been generated for minutes."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(SHIPPED, [flag], WarmupConfig)


def test_a_file_of_responses_needs_no_prompts() -> None:
    """Catches rules about generating that fire although nothing is generated."""
    flags = ["responses.path=x.jsonl", "data=null", "rollout.max_model_len=64"]
    assert load_config(SHIPPED, flags, WarmupConfig).responses.path == "x.jsonl"
