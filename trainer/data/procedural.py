"""reasoning-gym tasks: created with checked names and parameters, drawn without repetition."""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tlt.errors import ConfigError

if TYPE_CHECKING:
    from types import ModuleType

    from reasoning_gym.dataset import ProceduralDataset

SEED_RANGE = 2**20
"""Length of a range of item seeds. A run has two, side by side: training prompts and held-out prompts."""
_NUM_SEEDS = 2**32
"""numpy's legacy generator, which one task uses, takes no larger seed: run seeds repeat modulo 2048."""


def create_task(name: str, params: Mapping[str, Any], *, seed: int = 0, size: int = 1) -> ProceduralDataset:
    """A task whose items are computed from ``seed + index``, for ``index < size``.

    Raises:
        ConfigError: unknown task, unknown parameter, or a value that the task refuses.
    """
    import_reasoning_gym()
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ConfigError(
            f"data.source.tasks: reasoning-gym has no task '{name}'; {_suggestion(name, DATASETS, 'tasks')}"
        )
    dataset_class, config_class = DATASETS[name]
    allowed = {field.name for field in dataclasses.fields(config_class)} - {"seed", "size"}
    for param in params:
        if param not in allowed:
            raise ConfigError(
                f"data.source.tasks.{name}: no parameter '{param}'; "
                f"{_suggestion(param, allowed, 'parameters')} "
                "(seed and size are set from run.seed, data.source.num_train and eval.num_prompts)"
            )
    try:
        config = config_class(**params, seed=seed, size=size)
        return dataset_class(config)  # validates
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"data.source.tasks.{name}: the task refuses {dict(params)}: {error}; change the parameters"
        ) from error


def draw_items(
    tasks: Mapping[str, Mapping[str, Any]], num_items: int, *, seed: int, held_out: bool, seen: set[str]
) -> list[tuple[str, dict[str, Any]]]:
    """``num_items`` pairs (task name, item), the tasks taking turns, with questions that are not in ``seen``.

    ``seen`` grows by the new questions.

    Raises:
        ConfigError: a task has too few distinct questions.
    """
    start = (2 * seed + held_out) * SEED_RANGE % _NUM_SEEDS
    share, extra = divmod(num_items, len(tasks))
    drawn = [
        _draw_distinct(name, params, share + (position < extra), start=start, seen=seen)
        for position, (name, params) in enumerate(tasks.items())
    ]
    names = tuple(tasks)
    return [(names[i % len(names)], drawn[i % len(names)][i // len(names)]) for i in range(num_items)]


def import_reasoning_gym() -> ModuleType:
    """The library, without the compiler warnings that one of its dependencies shows at its first import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym

        from trainer.data.long_tail import register_long_tail
    register_long_tail()
    return reasoning_gym


def _draw_distinct(
    name: str, params: Mapping[str, Any], num_items: int, *, start: int, seen: set[str]
) -> list[dict[str, Any]]:
    # Four draws per item reach 98 % of a task's questions; who needs more has a task that is too small.
    num_draws = min(4 * num_items + 1000, SEED_RANGE)
    task = create_task(name, params, seed=start, size=num_draws)
    items: list[dict[str, Any]] = []
    for index in range(num_draws):
        if len(items) == num_items:
            break
        try:
            item = task[index]
        except IndexError:  # a task over a finite word list is used up
            break
        if item["question"] not in seen:
            seen.add(item["question"])
            items.append(item)
    if len(items) < num_items:
        raise ConfigError(
            f"data.source.tasks.{name}: {num_draws} draws gave {len(items)} new questions, needed are "
            f"{num_items}, and training and held-out prompts must all differ; widen the parameters, or lower "
            "data.source.num_train or eval.num_prompts"
        )
    return items


def _suggestion(given: str, allowed: Iterable[str], noun: str) -> str:
    close = difflib.get_close_matches(given, list(allowed))
    return f"did you mean {' or '.join(close)}?" if close else f"{noun}: {', '.join(sorted(allowed))}"
