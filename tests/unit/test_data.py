"""Prompts: sources, rendering, the over-long rule, and the way through TRL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tlt.config.schema import DataSection
from tlt.errors import ConfigError
from trainer.data import PromptSet, load_prompts, train_dataset
from trainer.data.procedural import create_task

VOCAB = {
    "[UNK]": 0,
    "system": 1,
    "user": 2,
    "assistant": 3,
    "think": 4,
    "a": 5,
    "b": 6,
    "c": 7,
    "d": 8,
    "e": 9,
}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if think %}think {% endif %}{% if add_generation_prompt %}assistant{% endif %}"
)
SUMS = {"chain_sum": {"max_terms": 3, "max_digits": 2}}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One id per word of VOCAB."""
    words = Tokenizer(models.WordLevel(VOCAB, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", chat_template=TEMPLATE)


def write_jsonl(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return str(path)


def jsonl_section(path: str, **options: Any) -> DataSection:
    return DataSection.model_validate({"source": {"kind": "jsonl", "path": path}, **options})


def gym_section(tasks: dict[str, Any], num_train: int) -> DataSection:
    return DataSection.model_validate({"source": {"kind": "reasoning_gym", "tasks": tasks, "num_train": num_train}})


def questions(prompts: PromptSet) -> tuple[list[str], list[str]]:
    return (
        [item.messages[-1]["content"] for item in prompts.train],
        [item.messages[-1]["content"] for item in prompts.eval],
    )


def test_rendered_ids_by_hand(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Catches a lost system prompt, generation prompt or template argument: the ids are known."""
    path = write_jsonl(tmp_path / "p.jsonl", {"prompt": "a b", "answer": 7, "level": 3})
    data = jsonl_section(path, system_prompt="c", chat_template_kwargs={"think": True})
    (item,) = load_prompts(data, num_eval=0, seed=0, tokenizer=tokenizer).train
    assert item.token_ids == (1, 7, 2, 5, 6, 4, 3)
    assert item.messages == ({"role": "system", "content": "c"}, {"role": "user", "content": "a b"})
    assert (item.answer, item.task, item.metadata) == ("7", None, {"level": 3})


def test_chat_lines_keep_their_turns(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Catches a ``messages`` line being flattened into one user turn."""
    turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": role, "content": content} for role, content in turns]
    path = write_jsonl(tmp_path / "p.jsonl", {"messages": messages, "answer": "x"})
    (item,) = load_prompts(jsonl_section(path), num_eval=0, seed=0, tokenizer=tokenizer).train
    assert item.token_ids == (2, 5, 3, 6, 2, 7, 3)


def overlong_file(tmp_path: Path) -> str:
    # Rendered: 3, 7 and 4 tokens (user, the words, assistant).
    return write_jsonl(
        tmp_path / "p.jsonl",
        {"prompt": "a", "answer": "1"},
        {"prompt": "a b c d e", "answer": "2"},
        {"prompt": "c d", "answer": "3"},
    )


def test_overlong_drop(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Catches an off-by-one at the limit (4 of 4 tokens must stay) and a wrong count."""
    data = jsonl_section(overlong_file(tmp_path), max_prompt_length=4)
    prompts = load_prompts(data, num_eval=0, seed=0, tokenizer=tokenizer)
    assert [item.token_ids for item in prompts.train] == [(2, 5, 3), (2, 7, 8, 3)]
    assert (prompts.num_dropped, prompts.num_truncated) == (1, 0)


def test_overlong_truncate_left(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Catches truncation on the wrong side: the generation prompt at the end must survive."""
    data = jsonl_section(overlong_file(tmp_path), max_prompt_length=4, overlong_prompts="truncate_left")
    prompts = load_prompts(data, num_eval=0, seed=0, tokenizer=tokenizer)
    assert [item.token_ids for item in prompts.train] == [(2, 5, 3), (7, 8, 9, 3), (2, 7, 8, 3)]
    assert (prompts.num_dropped, prompts.num_truncated) == (0, 1)


def test_overlong_error_and_nothing_left(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Catches a run that starts without prompts, and an error that does not name the line."""
    path = overlong_file(tmp_path)
    with pytest.raises(ConfigError, match=r"p\.jsonl:2: the prompt has 7 tokens, data.max_prompt_length is 4"):
        load_prompts(
            jsonl_section(path, max_prompt_length=4, overlong_prompts="error"),
            num_eval=0,
            seed=0,
            tokenizer=tokenizer,
        )
    with pytest.raises(ConfigError, match="all 3 training prompts are longer"):
        load_prompts(jsonl_section(path, max_prompt_length=2), num_eval=0, seed=0, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "not JSON"),
        ("[1]", "expected a JSON object, got list"),
        ('{"answer": "1"}', "exactly one of 'prompt' and 'messages'"),
        ('{"prompt": "a", "messages": [], "answer": "1"}', "exactly one of 'prompt' and 'messages'"),
        ('{"prompt": "a"}', "'answer' is missing"),
        ('{"prompt": "a", "answer": true}', "'answer' must be a text or a number"),
        ('{"prompt": " ", "answer": "1"}', "not empty"),
        ('{"messages": [{"role": "user"}], "answer": "1"}', "a message must be"),
        ('{"messages": [{"role": "assistant", "content": "a"}], "answer": "1"}', "nothing to answer"),
        ('{"messages": [{"role": "system", "content": "a"}], "answer": "1"}', "system message of its own"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, line: str, message: str) -> None:
    """Catches a bad line that is skipped, or reported under a number that ignores blank lines before it."""
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "a", "answer": "1"}}\n\n{line}\n')
    with pytest.raises(ConfigError, match=rf"p\.jsonl:3: .*{message}"):
        load_prompts(jsonl_section(str(path), system_prompt="c"), num_eval=0, seed=0, tokenizer=tokenizer)


def test_missing_and_empty_file(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Catches a traceback instead of a message for the two most likely mistakes."""
    with pytest.raises(ConfigError, match=r"cannot read .*none\.jsonl"):
        load_prompts(jsonl_section(str(tmp_path / "none.jsonl")), num_eval=0, seed=0, tokenizer=tokenizer)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="has no prompts"):
        load_prompts(jsonl_section(str(tmp_path / "empty.jsonl")), num_eval=0, seed=0, tokenizer=tokenizer)


def test_held_out_lines_are_not_trained_on(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Catches a held-out prompt that is also a training prompt, and duplicates that are trained on twice."""
    records = [{"prompt": word, "answer": word} for word in ("a", "b", "a", "c", "b")]
    path = write_jsonl(tmp_path / "p.jsonl", *records)
    prompts = load_prompts(jsonl_section(path), num_eval=2, seed=0, tokenizer=tokenizer)
    assert questions(prompts) == (["a"], ["c", "b"])
    assert prompts.num_duplicates == 2
    with pytest.raises(ConfigError, match="leaves none to train on"):
        load_prompts(jsonl_section(path), num_eval=5, seed=0, tokenizer=tokenizer)


def test_held_out_file(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Catches a held-out file whose prompts stay in the training file, or is read beyond ``num_eval``."""
    words = ("a", "b", "c")
    path = write_jsonl(tmp_path / "p.jsonl", *({"prompt": word, "answer": word} for word in words))
    held_out = write_jsonl(tmp_path / "e.jsonl", *({"prompt": word, "answer": word} for word in ("b", "d", "e")))
    data = DataSection.model_validate({"source": {"kind": "jsonl", "path": path, "eval_path": held_out}})
    prompts = load_prompts(data, num_eval=2, seed=0, tokenizer=tokenizer)
    assert questions(prompts) == (["a", "c"], ["b", "d"])


def test_no_chat_template(tmp_path: Path) -> None:
    """Catches a base model being fed unmarked text."""
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(VOCAB, unk_token="[UNK]")))
    with pytest.raises(ConfigError, match="has no chat template"):
        load_prompts(jsonl_section(overlong_file(tmp_path)), num_eval=0, seed=0, tokenizer=bare)


def test_tasks_depend_on_the_seed_only(tokenizer: PreTrainedTokenizerFast) -> None:
    """Catches unseeded draws, seeds that share items, leaks into the held-out set, uneven mixing."""
    data = gym_section({**SUMS, "spell_backward": {}}, 41)

    def load(seed: int) -> PromptSet:
        return load_prompts(data, num_eval=20, seed=seed, tokenizer=tokenizer)

    first = load(0)
    assert first == load(0)
    train, held_out = questions(first)
    assert len({*train, *held_out}) == 61
    assert [item.task for item in first.train[:3]] == ["chain_sum", "spell_backward", "chain_sum"]
    assert [sum(item.task == name for item in first.train) for name in data.source.tasks] == [21, 20]  # type: ignore[union-attr]
    # Neighbouring seeds would share nearly all items if a run's items were simply those from `seed` on.
    assert len({*train} & {*questions(load(1))[0]}) < 5


def test_metadata_runs_the_task_own_scorer(tokenizer: PreTrainedTokenizerFast) -> None:
    """Catches metadata that lost what the scorer reads: this task has no reference answer, only a check."""
    (item,) = load_prompts(gym_section({"graph_color": {}}, 1), num_eval=0, seed=0, tokenizer=tokenizer).train
    assert item.answer == ""
    assert item.metadata is not None
    solution = json.dumps(item.metadata["possible_answer"])
    entry = {"question": item.messages[-1]["content"], "answer": None, "metadata": item.metadata}
    assert create_task("graph_color", {}).score_answer(solution, entry) == 1.0


def test_too_small_task(tokenizer: PreTrainedTokenizerFast) -> None:
    """Catches an endless search: sums of two digits from 0 to 9, plus or minus, are 200 questions."""
    tiny = {"chain_sum": {"min_terms": 2, "max_terms": 2, "max_digits": 1}}
    prompts = load_prompts(gym_section(tiny, 100), num_eval=50, seed=0, tokenizer=tokenizer)
    assert len({*questions(prompts)[0], *questions(prompts)[1]}) == 150
    with pytest.raises(ConfigError, match="must all differ; widen the parameters"):
        load_prompts(gym_section(tiny, 150), num_eval=51, seed=0, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"chain_sums": {}}, "no task 'chain_sums'; did you mean .*chain_sum"),
        ({"chain_sum": {"max_term": 3}}, r"chain_sum: no parameter 'max_term'; did you mean .*max_terms"),
        ({"chain_sum": {"seed": 3}}, "seed and size are set from run.seed"),
        ({"chain_sum": {"min_terms": 9, "max_terms": 2}}, "refuses .*max_terms must be >= min_terms"),
    ],
)
def test_bad_task(tokenizer: PreTrainedTokenizerFast, tasks: dict[str, Any], message: str) -> None:
    """Catches the library's own bare errors reaching the user."""
    with pytest.raises(ConfigError, match=message):
        load_prompts(gym_section(tasks, 4), num_eval=0, seed=0, tokenizer=tokenizer)


def test_way_through_trl_and_back(tokenizer: PreTrainedTokenizerFast) -> None:
    """Catches a look-up that breaks because the dataset reorders the keys of a message."""
    prompts = load_prompts(gym_section(SUMS, 5), num_eval=3, seed=0, tokenizer=tokenizer)
    index = prompts.index()
    assert len(index) == 8
    for row, item in zip(train_dataset(prompts.train), prompts.train, strict=True):
        swapped = [dict(reversed(message.items())) for message in row["prompt"]]
        assert index[swapped] is item
        assert (row["prompt_key"], row["answer"], row["task"]) == (item.key, item.answer, "chain_sum")
        assert json.loads(row["metadata"])["num_terms"] == item.metadata["num_terms"]  # type: ignore[index]
    with pytest.raises(KeyError):
        index[[{"role": "user", "content": "never seen"}]]


def test_hub_source_reads_a_local_folder(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches wrong columns going unnoticed, and a bad name ending in a traceback."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(
        folder / "train.jsonl",
        {"q": "a b", "prompt": "c", "answer": 4},
        {"q": "c", "prompt": "d", "answer": 5},
    )

    def load(**source: Any) -> PromptSet:
        data = DataSection.model_validate({"source": {"kind": "hub", "dataset": str(folder), **source}})
        return load_prompts(data, num_eval=1, seed=0, tokenizer=tokenizer)

    prompts = load(prompt_column="q")
    assert [(item.token_ids, item.answer) for item in prompts.train] == [((2, 5, 6, 3), "4")]
    assert [item.answer for item in prompts.eval] == ["5"]
    with pytest.raises(ConfigError, match=r"no column 'question', it has \['q', 'prompt', 'answer'\]"):
        load(prompt_column="question")
    with pytest.raises(ConfigError, match="split test.*check the three names"):
        load(split="test")
    with pytest.raises(ConfigError, match="cannot load dataset"):
        load(dataset=str(tmp_path / "nowhere"))
