"""Files and flags to a checked configuration."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tlt.config import SftConfig, TrainConfig, dump_config, load_config, schema_of
from tlt.config.bench_schema import BenchConfig
from tlt.config.draft_schema import WarmupConfig
from tlt.config.yaml_text import parse_document, render
from tlt.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"

BASE = """\
data:
  source:
    kind: reasoning_gym
    tasks: {chain_sum: {max_terms: 3}}
learner:
  max_steps: 7
rewards:
  functions:
    - {kind: math_verify}
    - {kind: format, weight: 0.5}
"""


def load(tmp_path: Path, text: str, *overrides: str) -> TrainConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(path, overrides)


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.name)
def test_shipped_files_load(path: Path) -> None:
    """Catches a shipped file that a schema change left behind."""
    config = load_config(path, (), schema_of(path))
    schemas = {"sft": SftConfig, "responses": WarmupConfig, "bench": BenchConfig}
    sections = [name for name in schemas if f"\n{name}:" in path.read_text()]
    assert isinstance(config, schemas[sections[0]] if sections else TrainConfig)


def test_default_then_file_then_flag(tmp_path: Path) -> None:
    """Catches a flag that loses to the file, or a file that loses to the default."""
    assert TrainConfig.model_fields["learner"].default.max_steps == 10
    assert load(tmp_path, BASE).learner.max_steps == 7
    assert load(tmp_path, BASE, "learner.max_steps=3", "learner.max_steps=5").learner.max_steps == 5


@pytest.mark.parametrize(
    ("flag", "path", "value"),
    [
        ("model.revision=null", ("model", "revision"), None),
        ("run.seed=0x10", ("run", "seed"), 16),
        ("learner.learning_rate=1e-5", ("learner", "learning_rate"), 1e-5),
        ("learner.importance_sampling=off", ("learner", "importance_sampling"), "off"),
        ("learner.scale_rewards=none", ("learner", "scale_rewards"), "none"),
        ("rollout.stop=[a, 'b=c']", ("rollout", "stop"), ("a", "b=c")),
        ("data.system_prompt='x=1: yes.'", ("data", "system_prompt"), "x=1: yes."),
        ("--run.name=dashes", ("run", "name"), "dashes"),
        ("data.source.tasks.spell_backward={}", ("data", "source", "tasks", "spell_backward"), {}),
        ("data.source.tasks.chain_sum.min_terms=2", ("data", "source", "tasks", "chain_sum", "max_terms"), 3),
    ],
)
def test_flag_values_are_yaml(tmp_path: Path, flag: str, path: tuple[str, ...], value: object) -> None:
    """Catches YAML 1.1 readings ("off" as False, 1e-5 as text), a split at a later "=", and lost neighbours."""
    node: Any = load(tmp_path, BASE, flag).model_dump()
    for key in path:
        node = node[key]
    assert node == value
    assert type(node) is type(value)


def test_lists_by_index_and_whole(tmp_path: Path) -> None:
    """Catches an index that hits the wrong entry, drops the others, or misses entries that are defaults."""
    by_index = load(tmp_path, BASE, "rewards.functions.1.weight=2").rewards.functions
    assert [(f.kind, f.weight) for f in by_index] == [("math_verify", 1.0), ("format", 2.0)]
    whole = load(tmp_path, BASE, "rewards.functions=[{kind: exact}]").rewards.functions
    assert [f.kind for f in whole] == ["exact"]
    without = BASE[: BASE.index("rewards:")]
    assert [(f.kind, f.weight) for f in load(tmp_path, without, "rewards.functions.0.weight=3").rewards.functions] == [
        ("math_verify", 3.0)
    ]


def test_another_kind_starts_the_section_afresh(tmp_path: Path) -> None:
    """Catches keys of the file's source that stay behind, and dependence on the order of the flags."""
    config = load(tmp_path, BASE, "data.source.path=x.jsonl", "data.source.kind=jsonl")
    assert config.data.source.model_dump() == {"kind": "jsonl", "path": "x.jsonl", "eval_path": None}
    same_kind = load(tmp_path, BASE, "data.source.kind=reasoning_gym", "data.source.num_train=9")
    assert same_kind.data.source.model_dump()["tasks"] == {"chain_sum": {"max_terms": 3}}


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("learner.num_generation=8", "learner.num_generation = 8: unknown key; did you mean 'num_generations'?"),
        ("zzz.a=1", "zzz = {a: 1}: unknown key; keys here: data, draft, eval, learner"),
        ("rewards.functions.1.wieght=2", "rewards.functions.1.wieght = 2: unknown key; did you mean 'weight'?"),
        ("data.source.num_trian=2", "data.source.num_trian = 2: unknown key; did you mean 'num_train'?"),
        ("data.source.kind=jsnl", "data.source.kind = jsnl: unknown value; did you mean 'jsonl'?"),
        ("data.source={path: a}", "data.source = {path: a}: 'kind' is required here; add it, one of: reasoning"),
        ("data.source.kind=jsonl", "data.source.path: required, and not given; add it"),
        ("rollout.device=tpu9", "rollout.device = tpu9: unknown value; choose one of: cpu, gpu"),
        ("learner.loss_type=drgrpo", "learner.loss_type = drgrpo: unknown value; did you mean 'dr_grpo'?"),
        ("learner.max_steps=0", "learner.max_steps = 0: must be greater than 0"),
        ("learner.num_generations=1", "learner.num_generations = 1: must be at least 2"),
        ("rollout.top_p=1.5", "rollout.top_p = 1.5: must be at most 1"),
        ("learner.max_steps=2.5", "learner.max_steps = 2.5: must be a whole number"),
        ("learner.max_steps=true", "learner.max_steps = true: must be a whole number"),
        ("learner.max_steps='3'", "learner.max_steps = '3': must be a whole number"),
        ("learner.bf16=yes", "learner.bf16 = yes: must be true or false"),
        ("learner.learning_rate=.inf", "learner.learning_rate = .inf: must be a finite number"),
        ("learner.learning_rate=fast", "learner.learning_rate = fast: must be a number"),
        ("run.name='a/b'", "run.name = a/b: must match the pattern"),
        ("data.system_prompt=x: y", "data.system_prompt = {x: y}: must be text; quote it"),
        ("data.system_prompt=[x", "override 'data.system_prompt=[x':1: not valid YAML"),
        ("run.name=5", "run.name = 5: must be text; quote it"),
        ("rollout.stop=a", "rollout.stop = a: must be a list"),
        ("learner=3", "learner = 3: must be a section"),
        ("data.source.tasks={}", "data.source.tasks = {}: must have at least 1 entry"),
        ("rewards.functions.0.kind=python", "rewards.functions.0: 'function' is needed for"),
        ("learner.prompts_per_step=3", "learner: per_device_train_batch_size=16 does not divide the 24 responses"),
        ("rollout.max_model_len=99", "rollout.max_model_len=99; raise max_model_len or lower one"),
        ("learner.max_steps", "override 'learner.max_steps': must have the form key.sub=value"),
        ("learner..max_steps=1", "override 'learner..max_steps=1': must have the form key.sub=value"),
        ("model.revision=", "override 'model.revision=': no value; write model.revision=null"),
        ("rewards.functions.2.weight=1", "rewards.functions has entries 0 to 1, but no '2'; write rewards.functions=["),
        ("rewards.functions.x=1", "rewards.functions has entries 0 to 1, but no 'x'"),
        ("learner.max_steps.x=1", "learner.max_steps is the value 7, which has no keys below it"),
    ],
)
def test_rules_are_told_in_words(tmp_path: Path, flag: str, message: str) -> None:
    """Catches a rule that does not fire, and a message without key path, value, rule or remedy."""
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load(tmp_path, BASE, flag)
    assert "pydantic" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_all_problems_at_once_with_their_lines(tmp_path: Path) -> None:
    """Catches a stop at the first problem, wrong lines, and a flag's problem blamed on the file."""
    text = BASE.replace("max_steps: 7", "max_step: 7\n  epsilon: -1").replace("format", "formt")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, "run.seed=-1")
    path = tmp_path / "run.yaml"
    assert str(caught.value).splitlines()[0] == f"{path}: 4 problems"
    assert set(str(caught.value).splitlines()[1:]) == {
        "  override: run.seed = -1: must be at least 0",
        f"  {path}:7: learner.epsilon = -1: must be greater than 0",
        f"  {path}:6: learner.max_step = 7: unknown key; did you mean 'max_steps'?",
        f"  {path}:11: rewards.functions.1.kind = formt: unknown value; did you mean 'format'?",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: [\n", r"run\.yaml:2: not valid YAML"),
        ("- a\n", r"run\.yaml: the top level is \[a\], but must be"),
        ("", r"run\.yaml: the top level is null, but must be"),
        ("a: 1\n---\nb: 1\n", r"run\.yaml:2: not valid YAML"),
        ("a: !!binary aGk=\n", r"run\.yaml:1: not valid YAML"),
        (BASE + "learner:\n  epsilon: 1\n", r"run\.yaml:11: learner: written twice \(first in line 5\); remove one"),
        (BASE.replace("weight:", "kind: exact, weight:"), r"run\.yaml:10: rewards\.functions\.1\.kind: written twice"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    """Catches tracebacks of the YAML library, and a second key that silently wins."""
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    """Catches an OSError or UnicodeDecodeError that reaches the user, and a missing hint for a typing mistake."""
    (tmp_path / "quickstart.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"quickstrat\.yaml: no such .*did you mean '.*/quickstart\.yaml'"):
        load_config(tmp_path / "quickstrat.yaml")
    with pytest.raises(ConfigError, match="check the path"):
        load_config(tmp_path / "nowhere" / "a.yaml")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(tmp_path / "quickstart.yaml")


def test_dump_loads_back_equal(tmp_path: Path) -> None:
    """Catches a value that changes its type on the way through the run folder's config.resolved.yaml."""
    odd = {"a": "off", "b": "1e-6", "c": "010", "d": "null", "e": "12:30", "f": "2024-01-01", "g": 1e-6, "h": ""}
    text = BASE + f"run: {{name: '1e3'}}\nrollout: {{stop: ['a b', \"\\n\"]}}\neval: {{every: 2}}\n{'model: {}'}\n"
    config = load(tmp_path, text, f"data.chat_template_kwargs={odd}", "learner.importance_sampling=off")
    assert config.data.chat_template_kwargs == odd
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.yaml") == config


@pytest.mark.parametrize("value", ["", " ", "a: b", "- x", "#", "é", "x\ny", "0x1F", "1_000", "+1", ".5", "yes", "<<"])
def test_texts_stay_texts(value: str) -> None:
    """Catches a dumper whose idea of plain scalars differs from the loader's."""
    assert parse_document(render({"k": value, value: [value]}), "x").data == {"k": value, value: [value]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks: {spell_backward: {}}", "data.source: no solver writes traces for spell_backward; use"),
        (
            "tasks: {chain_sum: {}}}}\nsft: {traces_per_step: 5, per_device_train_batch_size: 4}\n#",
            "sft: per_device_train_batch_size=4 does not divide",
        ),
    ],
)
def test_sft_rules(tmp_path: Path, text: str, message: str) -> None:
    """Catches an SFT file that fails only after the model is loaded."""
    path = tmp_path / "sft.yaml"
    path.write_text(f"data: {{source: {{kind: reasoning_gym, {text}}}}}\n" + ("" if "sft" in text else "sft: {}\n"))
    assert schema_of(path) is SftConfig
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(path, (), SftConfig)


def test_config_needs_nothing_heavy() -> None:
    """Catches an import that would make `tlt config show` and every error message wait for torch."""
    code = "import tlt.config, sys; print(sorted({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", [".", "..", ".hidden"])
def test_a_run_cannot_be_named_after_a_folder_above_it(name: str, tmp_path: Path) -> None:
    """Catches ``run.name=..`` with ``run.overwrite=true``, which would delete the folder that holds all runs."""
    with pytest.raises(ConfigError, match="run.name"):
        load_config(CONFIGS / "quickstart.yaml", [f"run.name={name}"])
