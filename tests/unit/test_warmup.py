"""A warm-up from a file of responses, from end to end, and how its result is found again."""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer, GPT2Config

from tests.warmup_target import CONFIG, greedy_responses, save_target
from tlt.config import load_config
from tlt.config.draft_schema import WarmupConfig
from tlt.draft.checkpoint import load_head
from tlt.errors import ConfigError
from trainer import warmup
from trainer.warmup_responses import write_responses


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warmup")
    write_responses(folder / "responses.jsonl", greedy_responses(save_target(folder / "target"), 64))
    (folder / "drafter.yaml").write_text(CONFIG.format(folder=folder))
    return folder / "drafter.yaml"


@pytest.fixture(scope="module")
def made(config_file: Path) -> Path:
    return warmup.resolve_draft(f"draft:{config_file}")


def config(config_file: Path, *flags: str) -> WarmupConfig:
    return load_config(config_file, flags, WarmupConfig)


def test_the_folder_holds_a_head_that_loads(made: Path, config_file: Path) -> None:
    """Catches a head without the tokens it has to draft, above all the end of a response."""
    head = load_head(made)
    drafted = set(head.draft_token_ids.tolist())
    lines = (config_file.parent / "responses.jsonl").read_text().splitlines()
    counts = Counter(token for line in lines for token in json.loads(line)["response_token_ids"])
    assert len(drafted) == AutoConfig.from_pretrained(made).draft_vocab_size == 64
    # The responses never end by themselves, and a few of them are held out, which moves none of the ten first.
    eos = AutoTokenizer.from_pretrained(config_file.parent / "target").eos_token_id
    assert eos not in counts
    assert {eos, *(token for token, _ in counts.most_common(10))} <= drafted
    assert [path.name for path in made.parent.iterdir() if path.is_dir()] == [made.name]


def test_the_record_says_what_was_done(made: Path) -> None:
    """Catches figures that later parts rely on (served acceptance, temperature) going missing or being impossible."""
    info = json.loads((made / "tlt_draft.json").read_text())
    assert info["temperature"] == 0.5
    train, held_out = info["responses"]["train"], info["responses"]["held_out"]
    assert (train["num_responses"], held_out["num_responses"]) == (60, 4)
    # 16 of the 64 responses have 12 tokens, the others 24.
    assert train["num_tokens"] + held_out["num_tokens"] == 16 * 12 + 48 * 24
    assert 0.5 < held_out["vocab_coverage"] < 1.0
    assert 0.5 < train["vocab_coverage"] < 1.0
    accepted, chains = info["acceptance"]["num_accepted"], info["acceptance"]["num_chains"]
    assert len(accepted) == len(chains) == 5
    assert all(0 <= few <= many for few, many in zip(accepted, chains, strict=True))
    lengths = [info["acceptance"]["length"][k] for k in ("1", "2", "3", "5")]
    assert lengths == sorted(lengths)
    assert 1.0 <= lengths[0] <= 2.0
    assert list(info["training"]["loss"]) == ["4", "8", "12"][: len(info["training"]["loss"])]
    training = info["training"]
    assert training["tokens_per_s_per_core"] == training["tokens_per_s"] / training["num_threads"]
    assert set(info["wall_s"]) == {"responses", "hidden_states", "training"}


def test_the_head_learns(config_file: Path) -> None:
    """Catches a training that updates nothing, and a head whose drafts are never accepted though its loss falls, as
    when draft ids are taken for token ids. Guessing one of 259 tokens is right once in 259 times."""
    longer = config(config_file, "train.max_steps=80", "train.eval_every=20", "run.name=longer")
    info = json.loads((warmup.run_warmup(longer) / "tlt_draft.json").read_text())
    losses = list(info["training"]["loss"].values())
    shutil.rmtree(next((config_file.parent / "drafters").glob("longer-*/")))
    assert losses[-1] < losses[0]
    assert info["acceptance"]["per_position"][0] > 0.1
    assert info["acceptance"]["length"]["2"] == 1.0 + sum(info["acceptance"]["per_position"][:2])


@pytest.mark.parametrize(
    "flags", [("train.num_threads=2",), ("rollout.num_workers=1",), ("responses.num_prompts=7",), ()], ids=str
)
def test_found_again_without_training(
    made: Path,
    config_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    flags: tuple[str, ...],
) -> None:
    """Catches a cache that misses: every run would train the same drafter for minutes again."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(warmup, "train_head", refuse)
    with caplog.at_level(logging.INFO):
        assert warmup.run_warmup(config(config_file, *flags)) == made
    assert f"using {made}" in caplog.text


@pytest.mark.parametrize(
    "flag",
    ["train.learning_rate=0.02", "train.max_steps=13", "train.patience=1", "head.draft_vocab_size=20",
     "head.aux_layers=[0, 1, 3]", "run.seed=1", "model.dtype=bfloat16", "responses.num_held_out=3"],
)  # fmt: skip
def test_anything_that_shapes_the_head_makes_another(
    made: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    """Catches a hash that leaves something out: a run would silently draft with the wrong head. Also catches an
    interrupted training that leaves a folder behind."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(warmup, "train_head", interrupt)
    with pytest.raises(KeyboardInterrupt):
        warmup.run_warmup(config(config_file, flag))
    assert [path.name for path in made.parent.iterdir() if path.is_dir()] == [made.name]


def test_targets_are_known_by_content(
    made: Path, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an identity by path (a retrained target would keep its old drafter), and one by the record of the
    target's own training, which holds times."""
    copy = tmp_path / "copy"
    shutil.copytree(config_file.parent / "target", copy)
    (copy / "sft.json").write_text('{"wall_s": 1}')
    assert warmup.run_warmup(config(config_file, f"model.name={copy}")) == made

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(warmup, "train_head", interrupt)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    with pytest.raises(KeyboardInterrupt):
        warmup.run_warmup(config(config_file, f"model.name={copy}"))


def test_an_unsupported_target_is_refused_before_the_work(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches minutes of generating responses for a model that no head can be made for."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("responses were planned")

    monkeypatch.setattr(warmup, "plan_responses", refuse)
    folder = tmp_path / "gpt2"
    shutil.copytree(config_file.parent / "target", folder)
    GPT2Config().save_pretrained(folder)
    with pytest.raises(ConfigError, match="gpt2"):
        warmup.run_warmup(config(config_file, f"model.name={folder}"))


def test_too_little_memory_stops_before_the_pass(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a check that nobody calls."""
    monkeypatch.setattr("trainer.hidden_states.available_bytes", lambda: 1024)
    with pytest.raises(ConfigError, match="lower responses"):
        warmup.run_warmup(config(config_file, "run.seed=5"))


def test_names_of_drafters(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches relative folders that stay relative (Ray actors have another working folder), and typing mistakes that
    show only inside an engine."""
    monkeypatch.chdir(made.parent)
    assert warmup.resolve_draft(str(made)) == warmup.resolve_draft(made.name) == made
    with pytest.raises(ConfigError, match=r"has no config\.json; give a folder"):
        warmup.resolve_draft(str(tmp_path))
    with pytest.raises(ConfigError, match="no such configuration file"):
        warmup.resolve_draft("draft:configs/missing.yaml")
