"""Prompts that are ready to be sampled from, and their way into and back out of TRL."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets

Message = dict[str, str]
"""One turn of a chat: ``{"role": ..., "content": ...}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptItem:
    """One prompt, its tokens and what its responses are checked against."""

    key: str
    """Hash of ``token_ids``: equal prompts have equal keys, in every run."""
    messages: tuple[Message, ...]
    """System prompt included."""
    token_ids: tuple[int, ...]
    """The rendered chat template, at most ``max_prompt_length`` long."""
    answer: str
    """Reference answer; empty for tasks that accept many answers (their own scorer decides)."""
    task: str | None
    """reasoning-gym task, None for other sources."""
    metadata: Mapping[str, Any] | None
    """What the task's scorer needs (reasoning-gym), or the further keys of a JSONL line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """The prompts of a run. No message list occurs twice, so ``eval`` is really held out."""

    train: tuple[PromptItem, ...]
    eval: tuple[PromptItem, ...]
    num_dropped: int
    """Over-long prompts left out, train and eval together."""
    num_truncated: int
    """Over-long prompts that lost their beginning, train and eval together."""
    num_duplicates: int
    """Repeated prompts left out (only the first is kept, eval before train)."""

    def index(self) -> PromptIndex:
        """Look-up over train and eval prompts."""
        return PromptIndex((*self.train, *self.eval))


class PromptIndex:
    """Finds the prompt that a message list belongs to: TRL hands nothing else to a ``rollout_func``."""

    def __init__(self, items: Iterable[PromptItem]) -> None:
        self._items = {canonical_json(item.messages): item for item in items}

    def __getitem__(self, messages: Sequence[Message]) -> PromptItem:
        """The item with these messages. Raises ``KeyError`` for a prompt that is not part of the run."""
        return self._items[canonical_json(messages)]

    def __len__(self) -> int:
        return len(self._items)


def canonical_json(messages: Sequence[Message]) -> str:
    """One text per message list, whatever the order of keys inside a message (datasets reorders them)."""
    return json.dumps(list(messages), sort_keys=True, ensure_ascii=False)


def train_dataset(items: Sequence[PromptItem]) -> datasets.Dataset:
    """The prompts in the form that TRL's ``GRPOTrainer`` takes.

    Columns: ``prompt`` (list of messages), ``prompt_key``, ``answer``, ``task`` (null where there is none),
    ``metadata`` (a JSON text, ``"null"`` where there is none: Arrow wants one schema, tasks have many). TRL
    gives all but ``prompt`` to the reward functions, repeated per generation.
    """
    import datasets

    message = {"role": datasets.Value("string"), "content": datasets.Value("string")}
    text = datasets.Value("string")
    features = datasets.Features(
        {"prompt": datasets.List(message), "prompt_key": text, "answer": text, "task": text, "metadata": text}
    )
    columns = {
        "prompt": [list(item.messages) for item in items],
        "prompt_key": [item.key for item in items],
        "answer": [item.answer for item in items],
        "task": [item.task for item in items],
        # A few tasks keep Python objects in their metadata; their scorers get the originals, not this text.
        "metadata": [json.dumps(item.metadata, default=str) for item in items],
    }
    return datasets.Dataset.from_dict(columns, features=features)
