"""From raw prompts to token ids: system prompt, chat template, over-long rule, duplicates."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import jinja2

from tlt.config.schema import DataSection
from tlt.errors import ConfigError
from trainer.data.prompts import PromptItem, PromptSet, canonical_json
from trainer.data.sources import RawPrompt, read_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def load_prompts(data: DataSection, *, num_eval: int, seed: int, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """All prompts of a run, the same for the same arguments.

    Raises:
        ConfigError: the source cannot be read or is too small, the tokenizer has no chat template, or the
            rule for over-long prompts leaves nothing.
    """
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"model.name: the tokenizer of '{tokenizer.name_or_path}' has no chat template to turn messages "
            "into a prompt; use an instruction-tuned model, or add chat_template.jinja to the model's folder"
        )
    raw = read_source(data.source, num_eval=num_eval, seed=seed)
    seen: dict[str, RawPrompt] = {}
    eval_raw = _distinct(raw.eval, seen)
    train_raw = _distinct(raw.train, seen)
    train = _render(train_raw, data, tokenizer, part="training")
    held_out = _render(eval_raw, data, tokenizer, part="held-out")
    prompts = PromptSet(
        train=train.items,
        eval=held_out.items,
        num_dropped=train.num_dropped + held_out.num_dropped,
        num_truncated=train.num_truncated + held_out.num_truncated,
        num_duplicates=len(raw.train) + len(raw.eval) - len(train_raw) - len(eval_raw),
    )
    logger.info(
        "prompts: %d to train on, %d held out; over-long: %d dropped, %d truncated; %d duplicates left out",
        len(prompts.train),
        len(prompts.eval),
        prompts.num_dropped,
        prompts.num_truncated,
        prompts.num_duplicates,
    )
    return prompts


def _distinct(rows: Iterable[RawPrompt], seen: dict[str, RawPrompt]) -> list[RawPrompt]:
    """The rows whose messages are not in ``seen``, which grows."""
    fresh = []
    for row in rows:
        first = seen.setdefault(canonical_json(row.messages), row)
        if first is row:
            fresh.append(row)
        elif first.answer != row.answer:
            logger.warning(
                "%s repeats the prompt of %s with the answer %r instead of %r; it is left out",
                row.origin,
                first.origin,
                row.answer,
                first.answer,
            )
    return fresh


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rendered:
    items: tuple[PromptItem, ...]
    num_dropped: int
    num_truncated: int


def _render(rows: list[RawPrompt], data: DataSection, tokenizer: PreTrainedTokenizerBase, *, part: str) -> _Rendered:
    if data.system_prompt is not None:
        rows = [_with_system_prompt(row, data.system_prompt) for row in rows]
    items: list[PromptItem] = []
    num_truncated = 0
    for row, token_ids in zip(rows, _tokenize(rows, data, tokenizer), strict=True):
        if len(token_ids) > data.max_prompt_length:
            match data.overlong_prompts:
                case "error":
                    raise ConfigError(
                        f"{row.origin}: the prompt has {len(token_ids)} tokens, data.max_prompt_length is "
                        f"{data.max_prompt_length}; raise it, or set data.overlong_prompts to drop or to "
                        "truncate_left"
                    )
                case "drop":
                    continue
                case "truncate_left":
                    num_truncated += 1
                    token_ids = token_ids[-data.max_prompt_length :]
        items.append(_item(row, token_ids))
    if rows and not items:
        raise ConfigError(
            f"data.max_prompt_length={data.max_prompt_length}: all {len(rows)} {part} prompts are longer and "
            "were dropped; raise it (and rollout.max_model_len), or set data.overlong_prompts=truncate_left"
        )
    return _Rendered(items=tuple(items), num_dropped=len(rows) - len(items), num_truncated=num_truncated)


def _with_system_prompt(row: RawPrompt, system_prompt: str) -> RawPrompt:
    if row.messages[0]["role"] == "system":
        raise ConfigError(
            f"{row.origin}: has a system message of its own, and data.system_prompt is set; leave one out"
        )
    return replace(row, messages=({"role": "system", "content": system_prompt}, *row.messages))


def _tokenize(rows: list[RawPrompt], data: DataSection, tokenizer: PreTrainedTokenizerBase) -> Iterable[list[int]]:
    for row in rows:
        try:
            token_ids = tokenizer.apply_chat_template(
                list(row.messages),
                tokenize=True,
                return_dict=False,
                add_generation_prompt=True,
                **data.chat_template_kwargs,
            )
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"{row.origin}: the model's chat template refuses the messages: {error}; change them, "
                "data.system_prompt or data.chat_template_kwargs"
            ) from error
        # The declared type covers all options; this call, one conversation without a dict, gives ids.
        yield cast("list[int]", token_ids)


def _item(row: RawPrompt, token_ids: list[int]) -> PromptItem:
    digest = hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()
    return PromptItem(
        key=digest[:16],
        messages=row.messages,
        token_ids=tuple(token_ids),
        answer=row.answer,
        task=row.task,
        metadata=row.metadata,
    )
