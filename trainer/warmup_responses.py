"""The JSON-lines files of responses that a drafter is warmed up on.

Each line has a prompt and a response, both as token ids or as text:

- ``prompt_token_ids``, or ``messages`` (a chat), or ``prompt`` (one user message);
- ``response_token_ids``, or ``completion``. A completion ends with the end-of-sequence token if ``finish_reason``
  is "stop" or missing; token ids are taken as they are.

``held_out: true`` keeps a line for measuring. Other keys are ignored, so the files in the ``responses`` folder of a run
can be read, and so can those that :mod:`trainer.warmup_rollout` writes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import torch

from tlt.config.schema import DataSection
from tlt.errors import ConfigError
from tlt.observability.json_files import JsonLinesWriter
from tlt.types import FinishReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetResponse:
    """One response and the prompt it answers."""

    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    held_out: bool = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and response."""
        return self.prompt_token_ids + self.response_token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseReader:
    """Turns lines into token ids for one target."""

    tokenizer: PreTrainedTokenizerBase
    data: DataSection | None
    """System prompt and template arguments for prompts that are text."""
    vocab_size: int
    max_length: int
    """Positions that the target has."""

    def read(self, path: Path) -> list[TargetResponse]:
        """All responses of a file.

        Raises:
            ConfigError: the file cannot be read, or a line is not a response of this target; names the line.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigError(
                f"responses.path: cannot read '{path}' ({error.strerror}); give a JSON-lines file, or leave "
                "responses.path out to have responses generated"
            ) from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"responses.path: '{path}' is not UTF-8 text ({error}); convert it") from error
        responses = [self._parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
        if not responses:
            raise ConfigError(f"responses.path: '{path}' has no responses; each line needs a prompt and a response")
        return responses

    def _parse(self, line: str, origin: str) -> TargetResponse:
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{origin}: not JSON ({error}); write one JSON object per line") from error
        if not isinstance(record, dict):
            raise ConfigError(f"{origin}: expected a JSON object, got {type(record).__name__}")
        held_out = record.get("held_out", False)
        if not isinstance(held_out, bool):
            raise ConfigError(f"{origin}: 'held_out' must be true or false, got {held_out!r:.40}")
        prompt, response = self._prompt(record, origin), self._response(record, origin)
        if not prompt or not response:
            raise ConfigError(f"{origin}: the {'response' if prompt else 'prompt'} has no tokens; remove the line")
        if len(prompt) + len(response) > self.max_length:
            raise ConfigError(
                f"{origin}: prompt and response have {len(prompt) + len(response)} tokens, and the target has "
                f"{self.max_length} positions; remove the line, or name the model that wrote it"
            )
        return TargetResponse(prompt_token_ids=prompt, response_token_ids=response, held_out=held_out)

    def _prompt(self, record: dict[str, Any], origin: str) -> tuple[int, ...]:
        match _only(record, ("prompt_token_ids", "messages", "prompt"), origin):
            case "prompt_token_ids":
                return self._token_ids(record["prompt_token_ids"], f"{origin}: 'prompt_token_ids'")
            case "messages":
                messages = record["messages"]
            case _:
                system = self.data.system_prompt if self.data else None
                messages = [{"role": "user", "content": record["prompt"]}]
                if system is not None:
                    messages.insert(0, {"role": "system", "content": system})
        if not _is_chat(messages):
            raise ConfigError(f"{origin}: the prompt must be a text or a list of messages, got {messages!r:.80}")
        try:
            token_ids = self.tokenizer.apply_chat_template(
                messages,
                tokenize=True,
                return_dict=False,
                add_generation_prompt=True,
                **(self.data.chat_template_kwargs if self.data else {}),
            )
        except (jinja2.TemplateError, ValueError) as error:
            raise ConfigError(f"{origin}: the model's chat template refuses the messages: {error}") from error
        return self._token_ids(token_ids, f"{origin}: the tokenizer's ids")

    def _response(self, record: dict[str, Any], origin: str) -> tuple[int, ...]:
        if _only(record, ("response_token_ids", "completion"), origin) == "response_token_ids":
            return self._token_ids(record["response_token_ids"], f"{origin}: 'response_token_ids'")
        text = record["completion"]
        if not isinstance(text, str):
            raise ConfigError(f"{origin}: 'completion' must be a text, got {text!r:.80}")
        token_ids = self.tokenizer(text, add_special_tokens=False).input_ids
        stopped = record.get("finish_reason", FinishReason.STOP) == FinishReason.STOP
        # A stop string ends a response too, and leaves no end-of-sequence token behind: then the count says so.
        if stopped and record.get("num_tokens") != len(token_ids):
            token_ids = [*token_ids, self.tokenizer.eos_token_id]
        return self._token_ids(token_ids, f"{origin}: the tokenizer's ids")

    def _token_ids(self, value: Any, what: str) -> tuple[int, ...]:
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise ConfigError(f"{what} must be a list of whole numbers, got {value!r:.80}")
        if value and not 0 <= min(value) <= max(value) < self.vocab_size:
            wrong = next(token for token in value if not 0 <= token < self.vocab_size)
            raise ConfigError(
                f"{what} contain {wrong}, and the target's vocabulary has {self.vocab_size} tokens; "
                "name the model that wrote these responses as model.name"
            )
        return tuple(value)


def split(
    responses: Sequence[TargetResponse], *, num_held_out: int, seed: int
) -> tuple[list[TargetResponse], list[TargetResponse]]:
    """Training and held-out responses; no prompt is in both.

    Where no response says that it is held out, all responses of ``num_held_out`` prompts are, drawn by ``seed``.

    Raises:
        ConfigError: nothing would be left to train on, or a prompt is marked held out in one line and not in another.
    """
    prompts = list(dict.fromkeys(response.prompt_token_ids for response in responses))
    chosen = {response.prompt_token_ids for response in responses if response.held_out}
    if chosen:
        mixed = sum(r.prompt_token_ids in chosen and not r.held_out for r in responses)
        if mixed:
            raise ConfigError(
                f"responses.path: {mixed} lines repeat a prompt that another line marks held_out; mark all or none"
            )
    else:
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist()
        chosen = {prompts[index] for index in order[:num_held_out]}
    if len(chosen) >= len(prompts):
        raise ConfigError(
            f"responses.path: there are responses to {len(prompts)} prompts, and holding out {len(chosen)} leaves none "
            "to train on; lower responses.num_held_out, or give responses to more prompts"
        )
    train = [response for response in responses if response.prompt_token_ids not in chosen]
    return train, [response for response in responses if response.prompt_token_ids in chosen]


def write_responses(path: Path, responses: Sequence[TargetResponse]) -> None:
    """Write a file that :class:`ResponseReader` reads; it appears when all lines are there."""
    part = path.with_name(f".unfinished-{path.name}")
    part.unlink(missing_ok=True)
    with JsonLinesWriter(part, durable=False) as lines:
        for response in responses:
            lines.write(
                {
                    "prompt_token_ids": response.prompt_token_ids,
                    "response_token_ids": response.response_token_ids,
                    "held_out": response.held_out,
                }
            )
    part.rename(path)


def _is_chat(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            isinstance(message, dict)
            and set(message) == {"role", "content"}
            and all(isinstance(part, str) for part in message.values())
            for message in messages
        )
    )


def _only(record: dict[str, Any], keys: Sequence[str], origin: str) -> str:
    """The one of ``keys`` that a line has."""
    found = [key for key in keys if key in record]
    if len(found) != 1:
        raise ConfigError(f"{origin}: needs exactly one of {', '.join(keys)}, has keys {sorted(record)}")
    return found[0]
