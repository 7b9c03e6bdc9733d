"""The reward functions, run in reward processes; heavy libraries are imported when a function is loaded."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt.config.schema import RewardSpec
from tlt.errors import ConfigError
from trainer.data.procedural import create_task
from trainer.rewards.boxed import boxed_answer, has_one_box


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One response and what it is checked against."""

    prompt: tuple[dict[str, str], ...]
    """Messages."""
    completion: str
    reference: str
    """Empty where the task has no single right answer."""
    task: str | None
    metadata: Mapping[str, Any] | None


RewardFunction = Callable[[Answer], float]


def function_name(spec: RewardSpec) -> str:
    """The name that metrics and messages use."""
    return spec.function if spec.function is not None else spec.kind


def load_function(spec: RewardSpec, tasks: Mapping[str, Mapping[str, Any]]) -> RewardFunction:
    """Import what the function needs and return it.

    Args:
        spec: Which function.
        tasks: reasoning-gym task name -> parameters, for that task's scorer.

    Raises:
        ConfigError: a function of the user's cannot be imported or called as documented.
    """
    match spec.kind:
        case "math_verify":
            return _load_math_verify()
        case "reasoning_gym":
            return _load_reasoning_gym(tasks)
        case "exact":
            return exact
        case "format":
            return format_
        case "python":
            assert spec.function is not None  # the schema's rule
            return _load_python(spec.function)


def exact(answer: Answer) -> float:
    """1 if the boxed answer (without a box: the whole response) is the reference, whitespace aside."""
    boxed = boxed_answer(answer.completion)
    given = answer.completion if boxed is None else boxed
    return float(given.split() == _reference(answer).split())


def format_(answer: Answer) -> float:
    r"""1 if the response has exactly one ``\boxed{...}``, well-formed and not empty."""
    return float(has_one_box(answer.completion))


def _reference(answer: Answer) -> str:
    if not answer.reference.strip():
        raise ValueError(f"the prompt (task {answer.task}) has no reference answer; use the reward kind reasoning_gym")
    return answer.reference


def _load_math_verify() -> RewardFunction:
    """Equality as mathematics. Words are read as products ("red" equals "der"): ``exact`` suits those."""
    import math_verify

    # It warns, once per process, that its own time-outs are off. They must be: they rest on signal.alarm,
    # which does not stop C code, and the runner has its own.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def parse(text: str) -> list[Any]:
        parsed: list[Any] = math_verify.parse(text, parsing_timeout=None)
        return parsed

    def score(answer: Answer) -> float:
        # Only what is boxed is read as LaTeX; a bare "x+1" or "(1,2)" would not parse.
        gold = parse(rf"\boxed{{{_reference(answer)}}}")
        if not gold:
            raise ValueError(f"math-verify cannot parse the reference answer {answer.reference!r}")
        boxed = boxed_answer(answer.completion)
        given = parse(answer.completion if boxed is None else rf"\boxed{{{boxed}}}")
        return float(math_verify.verify(gold, given, timeout_seconds=None))

    return score


def _load_reasoning_gym(tasks: Mapping[str, Mapping[str, Any]]) -> RewardFunction:
    """The task's own scorer (0 to 1, some give partial credit) on the boxed answer; without a box 0."""
    scorers = {name: create_task(name, params).score_answer for name, params in tasks.items()}

    def score(answer: Answer) -> float:
        boxed = boxed_answer(answer.completion)
        if boxed is None:
            return 0.0
        assert answer.task is not None  # the schema allows this function with reasoning-gym prompts only
        entry = {
            "question": answer.prompt[-1]["content"],
            "answer": answer.reference or None,
            "metadata": answer.metadata,
        }
        return float(scorers[answer.task](boxed, entry))

    return score


def _load_python(path: str) -> RewardFunction:
    """A function of the user's, called with keywords only.

    ``function(*, prompt: list[message], completion: str, answer: str, metadata: dict | None) -> float``
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"rewards: function '{path}' must be written package.module:function")
    working_folder = str(Path.cwd())
    if working_folder not in sys.path:  # a console script, unlike `python -m`, does not look there
        sys.path.append(working_folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything; it becomes their message
        raise ConfigError(
            f"rewards: importing '{module_name}' of '{path}' fails with "
            f"{type(error).__name__}: {error}; check the name, and that the module is installed or "
            "in the working folder"
        ) from error
    function = vars(module).get(attribute)
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise ConfigError(f"rewards: '{module_name}' has no plain function '{attribute}' (given: '{path}')")
    try:
        inspect.signature(function).bind(prompt=[], completion="", answer="", metadata=None)
    except TypeError as error:
        raise ConfigError(
            f"rewards: '{path}' cannot be called with prompt=, completion=, answer=, metadata=: {error}; "
            "give it these four keyword arguments"
        ) from error

    def score(answer: Answer) -> float:
        value: float = function(
            prompt=[dict(message) for message in answer.prompt],
            completion=answer.completion,
            answer=answer.reference,
            metadata=None if answer.metadata is None else dict(answer.metadata),
        )
        return value

    return score
