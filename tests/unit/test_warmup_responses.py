"""Files of responses: what is read from them, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.conftest import save_byte_tokenizer
from tlt.config.schema import DataSection, ReasoningGymSource
from tlt.errors import ConfigError
from trainer.warmup_responses import ResponseReader, TargetResponse, split, write_responses

GOOD = '{"prompt_token_ids": [1, 2], "response_token_ids": [3]}'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def reader(tokenizer: PreTrainedTokenizerBase, data: DataSection | None = None) -> ResponseReader:
    return ResponseReader(tokenizer=tokenizer, data=data, vocab_size=259, max_length=64)


def read_line(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, **record: object) -> TargetResponse:
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(record) + "\n")
    (response,) = reader(tokenizer).read(path)
    return response


def test_written_files_read_back(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Catches a cache of generated responses that changes tokens or forgets who is held out."""
    responses = [
        TargetResponse(prompt_token_ids=(1, 2), response_token_ids=(3, 258)),
        TargetResponse(prompt_token_ids=(4,), response_token_ids=(0,), held_out=True),
    ]
    write_responses(tmp_path / "r.jsonl", responses)
    assert reader(tokenizer).read(tmp_path / "r.jsonl") == responses
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]


def test_text_becomes_what_the_model_saw(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Catches a prompt without the template's opening of the answer, and a stopped response without its end."""
    chat = [{"role": "user", "content": "1+1"}]
    response = read_line(tokenizer, tmp_path, messages=chat, completion="2", finish_reason="stop", reward=1.0)
    assert tokenizer.decode(response.prompt_token_ids) == ("<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(response.response_token_ids) == "2<|im_end|>"
    assert read_line(tokenizer, tmp_path, prompt="1+1", completion="2") == response


@pytest.mark.parametrize(
    ("extra", "ends"),
    [
        ({"finish_reason": "stop", "num_tokens": 3}, True),
        ({"finish_reason": "stop", "num_tokens": 2}, False),
        ({"finish_reason": "length", "num_tokens": 2}, False),
        ({}, True),
    ],
)
def test_the_end_of_sequence_token_is_there_only_if_it_was_sampled(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, extra: dict[str, object], ends: bool
) -> None:
    """Catches teaching the head that a response cut off by a limit or a stop string ends by itself."""
    response = read_line(tokenizer, tmp_path, prompt="x", completion="ab", **extra)
    assert (response.response_token_ids[-1] == tokenizer.eos_token_id) is ends


def test_system_prompt_and_template_arguments_count(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Catches prompts that are rendered otherwise than the runs that the drafter is for render them."""
    data = DataSection(source=ReasoningGymSource(tasks={"chain_sum": {}}), system_prompt="Add.")
    path = tmp_path / "one.jsonl"
    path.write_text('{"prompt": "1", "completion": "2"}\n')
    (response,) = reader(tokenizer, data).read(path)
    assert tokenizer.decode(response.prompt_token_ids).startswith("<|im_start|>system\nAdd.<|im_end|>\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object, got list"),
        ('{"prompt": "x"}', "needs exactly one of response_token_ids, completion, has keys ['prompt']"),
        ('{"completion": "x"}', "needs exactly one of prompt_token_ids, messages, prompt"),
        ('{"prompt": "x", "messages": [], "completion": "x"}', "needs exactly one of prompt_token_ids, messages"),
        ('{"prompt": 3, "completion": "x"}', "the prompt must be a text or a list of messages"),
        ('{"messages": [], "completion": "x"}', "the prompt must be a text or a list of messages"),
        ('{"messages": [{"role": "user"}], "completion": "x"}', "the prompt must be a text or a list of messages"),
        ('{"prompt": "x", "completion": 3}', "'completion' must be a text, got 3"),
        ('{"prompt_token_ids": [true], "completion": "x"}', "'prompt_token_ids' must be a list of whole numbers"),
        ('{"prompt_token_ids": [1], "response_token_ids": [259]}', "'response_token_ids' contain 259"),
        ('{"prompt_token_ids": [-1], "response_token_ids": [2]}', "'prompt_token_ids' contain -1"),
        ('{"prompt_token_ids": [1], "response_token_ids": []}', "the response has no tokens"),
        ('{"prompt_token_ids": [], "response_token_ids": [1]}', "the prompt has no tokens"),
        (
            json.dumps({"prompt_token_ids": [1], "response_token_ids": [1] * 64}),
            "have 65 tokens, and the target has 64",
        ),
        (GOOD.replace("}", ', "held_out": 1}'), "'held_out' must be true or false, got 1"),
    ],
)
def test_a_wrong_line_is_named(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, line: str, message: str) -> None:
    """Catches a traceback, or a message that leaves a person searching in ten thousand lines."""
    path = tmp_path / "r.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(ConfigError, match=re.escape(f"{path}:3: ") + ".*" + re.escape(message)):
        reader(tokenizer).read(path)


def test_files_that_hold_nothing(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Catches an OSError or UnicodeDecodeError that reaches the user, and an empty file that trains on nothing."""
    with pytest.raises(ConfigError, match=r"cannot read .*none\.jsonl"):
        reader(tokenizer).read(tmp_path / "none.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        reader(tokenizer).read(tmp_path / "bytes.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="has no responses"):
        reader(tokenizer).read(tmp_path / "empty.jsonl")


def response(prompt: int, *, held_out: bool = False) -> TargetResponse:
    return TargetResponse(prompt_token_ids=(prompt,), response_token_ids=(7,), held_out=held_out)


def test_no_prompt_is_on_both_sides() -> None:
    """Catches acceptance that is measured on prompts whose other responses were trained on."""
    responses = [response(prompt) for prompt in (1, 2, 3, 4, 1, 2, 3, 4)]
    train, held_out = split(responses, num_held_out=1, seed=0)
    assert (len(train), len(held_out)) == (6, 2)
    assert {r.prompt_token_ids for r in train}.isdisjoint(r.prompt_token_ids for r in held_out)
    assert split(responses, num_held_out=1, seed=0) == (train, held_out)
    others = {split(responses, num_held_out=1, seed=seed)[1][0].prompt_token_ids for seed in range(20)}
    assert len(others) > 1


def test_marks_decide_where_there_are_any() -> None:
    """Catches a drawn split of a file that was generated with one."""
    responses = [response(1), response(2, held_out=True), response(3)]
    train, held_out = split(responses, num_held_out=2, seed=0)
    assert [r.prompt_token_ids for r in train] == [(1,), (3,)]
    assert held_out == [responses[1]]


@pytest.mark.parametrize(
    ("responses", "message"),
    [
        ([response(1), response(2)], "holding out 2 leaves none to train on"),
        ([response(1, held_out=True)], "holding out 1 leaves none to train on"),
        ([response(1, held_out=True), response(1), response(2)], "1 lines repeat a prompt that another line marks"),
    ],
)
def test_splits_that_cannot_be(responses: list[TargetResponse], message: str) -> None:
    """Catches an empty training part, and a held-out prompt that is trained on all the same."""
    with pytest.raises(ConfigError, match=message):
        split(responses, num_held_out=2, seed=0)
