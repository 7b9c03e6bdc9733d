"""Raw prompts from the three kinds of source, before a tokenizer sees them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt.config.schema import HubSource, JsonlSource, ReasoningGymSource
from tlt.errors import ConfigError
from trainer.data.procedural import draw_items
from trainer.data.prompts import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class RawPrompt:
    """A prompt as its source gives it."""

    messages: tuple[Message, ...]
    answer: str
    task: str | None = None
    metadata: Mapping[str, Any] | None = None
    origin: str
    """Where to look when something is wrong with it, e.g. ``prompts.jsonl:12``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawPrompts:
    """Training and held-out prompts of a source; duplicates are still in."""

    train: list[RawPrompt]
    eval: list[RawPrompt]


def read_source(source: ReasoningGymSource | JsonlSource | HubSource, *, num_eval: int, seed: int) -> RawPrompts:
    """Read or generate all prompts. Raises ``ConfigError`` for anything wrong with the source."""
    match source:
        case ReasoningGymSource():
            return _read_reasoning_gym(source, num_eval=num_eval, seed=seed)
        case JsonlSource():
            rows = _read_jsonl(source.path)
            held_out = _read_jsonl(source.eval_path) if source.eval_path is not None else None
            return _split(rows, held_out, num_eval=num_eval, name=source.path)
        case HubSource():
            rows = _read_hub(source, source.split)
            held_out = _read_hub(source, source.eval_split) if source.eval_split is not None else None
            return _split(rows, held_out, num_eval=num_eval, name=source.dataset)


def _read_reasoning_gym(source: ReasoningGymSource, *, num_eval: int, seed: int) -> RawPrompts:
    seen: set[str] = set()
    train = draw_items(source.tasks, source.num_train, seed=seed, held_out=False, seen=seen)
    held_out = draw_items(source.tasks, num_eval, seed=seed, held_out=True, seen=seen)

    def raw(task: str, item: dict[str, Any]) -> RawPrompt:
        return RawPrompt(
            messages=({"role": "user", "content": item["question"]},),
            answer="" if item["answer"] is None else item["answer"],
            task=task,
            metadata=item["metadata"],
            origin=f"reasoning-gym task {task}",
        )

    return RawPrompts(train=[raw(*pair) for pair in train], eval=[raw(*pair) for pair in held_out])


def _split(rows: list[RawPrompt], held_out: list[RawPrompt] | None, *, num_eval: int, name: str) -> RawPrompts:
    if held_out is not None:
        return RawPrompts(train=rows, eval=held_out[:num_eval])
    if num_eval >= len(rows):
        raise ConfigError(
            f"data.source: {name} has {len(rows)} prompts, and the last eval.num_prompts={num_eval} are held "
            "out, which leaves none to train on; lower eval.num_prompts or name a held-out file or split"
        )
    cut = len(rows) - num_eval
    return RawPrompts(train=rows[:cut], eval=rows[cut:])


def _read_jsonl(path_text: str) -> list[RawPrompt]:
    path = Path(path_text).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            f"data.source: cannot read '{path}' ({error.strerror}); give the path of a JSON-lines file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.source: '{path}' is not UTF-8 text ({error}); convert it") from error
    rows = [_parse_line(line, origin=f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise ConfigError(f"data.source: '{path}' has no prompts; each line needs 'prompt' or 'messages', and 'answer'")
    return rows


def _parse_line(line: str, *, origin: str) -> RawPrompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{origin}: not JSON ({error}); write one JSON object per line") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{origin}: expected a JSON object, got {type(record).__name__}")
    if ("prompt" in record) == ("messages" in record):
        raise ConfigError(f"{origin}: needs exactly one of 'prompt' and 'messages', has keys {sorted(record)}")
    if "answer" not in record:
        raise ConfigError(f"{origin}: 'answer' is missing, has keys {sorted(record)}")
    prompt = record["prompt"] if "prompt" in record else record["messages"]
    rest = {key: value for key, value in record.items() if key not in ("prompt", "messages", "answer")}
    return RawPrompt(
        messages=_messages(prompt, origin=origin),
        answer=_answer(record["answer"], origin=origin),
        metadata=rest or None,
        origin=origin,
    )


def _messages(value: object, *, origin: str) -> tuple[Message, ...]:
    """A text becomes one user message; a list must be a chat that the model is to continue."""
    if isinstance(value, str) and value.strip():
        return ({"role": "user", "content": value},)
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{origin}: the prompt must be a text or a list of messages, not empty; got {value!r:.80}")
    for message in value:
        if (
            not isinstance(message, dict)
            or set(message) != {"role", "content"}
            or not all(isinstance(part, str) for part in message.values())
        ):
            raise ConfigError(
                f"{origin}: a message must be {{'role': text, 'content': text}} and nothing else; got {message!r:.120}"
            )
    if value[-1]["role"] == "assistant":
        raise ConfigError(f"{origin}: the last message is the assistant's, so there is nothing to answer; remove it")
    return tuple(dict(message) for message in value)


def _answer(value: object, *, origin: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{origin}: 'answer' must be a text or a number, got {value!r:.80}")
    return str(value)


def _read_hub(source: HubSource, split: str) -> list[RawPrompt]:
    import datasets

    try:
        table = datasets.load_dataset(source.dataset, source.subset, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"data.source: cannot load dataset '{source.dataset}' (subset {source.subset}, split {split}): "
            f"{error}; check the three names. Without access to the hub, give a local folder with data files "
            "as data.source.dataset, or a JSON-lines file with kind: jsonl"
        ) from error
    for column in (source.prompt_column, source.answer_column):
        if column not in table.column_names:
            raise ConfigError(
                f"data.source: dataset '{source.dataset}' has no column '{column}', it has "
                f"{table.column_names}; set data.source.prompt_column and data.source.answer_column"
            )
    return list(_hub_rows(source, split, zip(table[source.prompt_column], table[source.answer_column], strict=True)))


def _hub_rows(source: HubSource, split: str, pairs: Iterable[tuple[object, object]]) -> Iterable[RawPrompt]:
    for row, (prompt, answer) in enumerate(pairs):
        origin = f"{source.dataset}[{split}] row {row}"
        yield RawPrompt(messages=_messages(prompt, origin=origin), answer=_answer(answer, origin=origin), origin=origin)
