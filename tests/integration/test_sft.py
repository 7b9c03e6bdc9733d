"""The cold start with a tiny model: it learns, is found again, and leaves nothing half-made."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tlt.config import SftConfig, load_config
from tlt.errors import ConfigError
from trainer import sft
from trainer.data import load_prompts

CONFIG = """\
run: {{name: tiny, dir: {dir}}}
model: {{name: {model}}}
data:
  source:
    kind: reasoning_gym
    tasks: {{chain_sum: {{max_terms: 3, max_digits: 1}}}}
    num_train: 32
sft:
  num_held_out: 8
  max_steps: 8
  traces_per_step: 4
  per_device_train_batch_size: 2
  learning_rate: 0.003
  logging_steps: 4
"""


@pytest.fixture(scope="module")
def config_file(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    path = folder / "tiny.yaml"
    path.write_text(CONFIG.format(dir=folder / "models", model=tiny_llama_dir))
    return path


@pytest.fixture(scope="module")
def made(config_file: Path) -> Path:
    return sft.resolve_sft(f"sft:{config_file}")


def test_loss_falls_and_the_model_is_complete(made: Path, tiny_llama_dir: Path) -> None:
    """Catches training that updates nothing, the wrong dtype, and a folder that RL cannot start from."""
    summary = json.loads((made / sft.SUMMARY_FILE).read_text())
    assert summary["held_out_loss"]["after"] < summary["held_out_loss"]["before"] - 1.0
    assert list(summary["train_loss"]) == ["4", "8"]
    model = AutoModelForCausalLM.from_pretrained(made)
    assert model.dtype == torch.bfloat16
    before = AutoModelForCausalLM.from_pretrained(tiny_llama_dir).state_dict()
    assert not torch.equal(model.state_dict()["lm_head.weight"].float(), before["lm_head.weight"])
    template = AutoTokenizer.from_pretrained(tiny_llama_dir).chat_template
    assert AutoTokenizer.from_pretrained(made).chat_template == template


def test_only_one_folder_appears(made: Path) -> None:
    """Catches scratch folders that stay behind."""
    assert [path.name for path in made.parent.iterdir() if path.is_dir()] == [made.name]


def test_the_loss_is_on_the_response_alone(config_file: Path) -> None:
    """Catches loss on the prompt, a prompt that differs from the rollout's, and tokens after the end of turn."""
    config = load_config(config_file, (), SftConfig)
    tokenizer = AutoTokenizer.from_pretrained(config.model.name)
    prompts = load_prompts(config.data, num_eval=8, seed=0, tokenizer=tokenizer)
    for item, row in zip(prompts.train, sft.encode_traces(prompts.train, tokenizer), strict=True):
        num_prompt = len(item.token_ids)
        assert row["input_ids"][:num_prompt] == list(item.token_ids)
        assert row["labels"] == [-100] * num_prompt + row["input_ids"][num_prompt:]
        response = tokenizer.decode(row["input_ids"][num_prompt:])
        assert response.startswith("Start with ")
        assert response.endswith(f"The final answer is \\boxed{{{item.answer}}}.<|im_end|>")


def test_found_again_without_training(
    made: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a cache that misses: RL runs would train the same model for minutes again."""

    def refuse(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(sft, "_train", refuse)
    unrelated = ["sft.num_threads=1", "sft.logging_steps=1"]
    with caplog.at_level(logging.INFO):
        assert sft.run_sft(load_config(config_file, unrelated, SftConfig)) == made
    assert f"using {made}" in caplog.text


@pytest.mark.parametrize(
    "override",
    ["sft.learning_rate=0.001", "sft.max_steps=9", "data.source.num_train=31", "run.seed=1",
     "data.system_prompt=Add.", "model.dtype=float32"],
)  # fmt: skip
def test_anything_that_shapes_the_model_makes_another(
    made: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    """Catches a hash that leaves something out: a run would silently start from the wrong model. Also catches an
    interrupted training that leaves a folder behind."""

    def interrupt(*arguments: object) -> None:
        folder = arguments[-1]
        assert isinstance(folder, Path)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(sft, "_train", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sft.run_sft(load_config(config_file, [override], SftConfig))
    assert [path.name for path in made.parent.iterdir() if path.is_dir()] == [made.name]


def test_another_base_model_makes_another(made: Path, config_file: Path, tmp_path: Path) -> None:
    """Catches an identity by name or path instead of by content, in both directions."""
    config = load_config(config_file, (), SftConfig)
    base, copy = Path(config.model.name), tmp_path / "copy"
    copy.mkdir()
    for file in base.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert sft.run_sft(load_config(config_file, [f"model.name={copy}"], SftConfig)) == made
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    other = load_config(config_file, [f"model.name={copy}", "sft.max_steps=8"], SftConfig)
    assert sft.run_sft(other) != made


def test_names_without_the_prefix() -> None:
    """Catches a hub id that is taken for a file name."""
    with pytest.raises(ConfigError, match="has no 'sft:' in front"):
        sft.resolve_sft("configs/cold_start_cpu.yaml")
    with pytest.raises(ConfigError, match="no such configuration file"):
        sft.resolve_sft("sft:configs/missing.yaml")
