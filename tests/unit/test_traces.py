"""Solver-written traces, and the long-tailed task they are mostly written for."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from tlt.errors import ConfigError, TltError
from trainer.data import PromptItem
from trainer.data.procedural import create_task
from trainer.traces import write_trace

LONG_TAIL_TASK = "chain_sum_long_tail"
STEP = re.compile(r"Step (\d+): (-?\d+) ([+-]) (-?\d+) = (-?\d+)\.")


def item_of(raw: dict[str, Any]) -> PromptItem:
    return PromptItem(
        key="k", messages=(), token_ids=(), answer=raw["answer"], task="chain_sum", metadata=raw["metadata"]
    )


def test_a_trace_by_hand() -> None:
    """Catches a changed format, which would silently invalidate every model made before."""
    raw = {"answer": "-81", "metadata": {"expression": "26 + 77 - 184"}}
    assert write_trace(item_of(raw)) == (
        "Start with 26.\nStep 1: 26 + 77 = 103.\nStep 2: 103 - 184 = -81.\nThe final answer is \\boxed{-81}."
    )


@pytest.mark.parametrize(
    ("task", "params"),
    [
        ("chain_sum", {"min_terms": 1, "max_terms": 9, "min_digits": 1, "max_digits": 4}),
        ("chain_sum", {"max_digits": 3, "allow_negation": True}),
        (LONG_TAIL_TASK, {}),
    ],
)
def test_traces_reach_the_tasks_answer_by_true_steps(task: str, params: dict[str, Any]) -> None:
    """Catches sign mistakes with negative terms or totals, and steps that do not follow from each other."""
    dataset = create_task(task, params, seed=5, size=300)
    num_negative_terms = num_negative_totals = 0
    for raw in dataset:
        lines = write_trace(item_of(raw)).split("\n")
        total = int(lines[0].removeprefix("Start with ").removesuffix("."))
        assert len(lines) == raw["metadata"]["num_terms"] + 1
        for number, line in enumerate(lines[1:-1], start=1):
            match = STEP.fullmatch(line)
            assert match is not None, line
            step, left, operator, term, result = match.groups()
            assert (int(step), int(left)) == (number, total)
            # Python's own arithmetic on the text of the line, as an oracle apart from the solver.
            total = eval(f"{left} {operator} ({term})")
            assert total == int(result)
            num_negative_terms += term.startswith("-")
            num_negative_totals += total < 0
        boxed = re.fullmatch(r"The final answer is \\boxed\{(-?\d+)\}\.", lines[-1])
        assert boxed is not None
        assert dataset.score_answer(boxed[1], raw) == 1.0
        assert int(boxed[1]) == total
    assert num_negative_totals > 20
    assert (num_negative_terms > 20) == bool(params.get("allow_negation"))


def test_wrong_items_are_refused() -> None:
    """Catches a trace that teaches a wrong answer, or a task whose format changed."""
    with pytest.raises(TltError, match="the solver finds 3 for '1 [+] 2', the task says 4"):
        write_trace(item_of({"answer": "4", "metadata": {"expression": "1 + 2"}}))
    for metadata in ({"expression": "1 * 2"}, {"expression": "1 +"}, {}):
        with pytest.raises(TltError, match="not a chain of integers"):
            write_trace(item_of({"answer": "2", "metadata": metadata}))


def test_number_of_terms_is_exponential_and_clipped() -> None:
    """Catches a missing tail (even draw) and a wrong mean. Expected: 2 + round(Exp(mean 5.5)), at most 30."""
    size = 2000
    dataset = create_task(LONG_TAIL_TASK, {"mean_terms": 7.5}, seed=11, size=size)
    terms = sorted(raw["metadata"]["num_terms"] for raw in dataset)
    assert terms[0] == 2
    assert terms[-1] == 30
    # P(terms > 2 + n) = exp(-(n + 1/2) / 5.5); four standard errors of a share are below 0.045.
    for extra in (0, 3, 8, 16):
        share = sum(count > 2 + extra for count in terms) / size
        assert share == pytest.approx(math.exp(-(extra + 0.5) / 5.5), abs=0.045)
    assert {len(part) for raw in dataset for part in raw["metadata"]["expression"].split() if part not in "+-"} == {2}


def test_items_depend_on_seed_plus_index_alone() -> None:
    """Catches overlap of training and held-out prompts, which rely on ranges of item seeds."""
    a, b = (create_task(LONG_TAIL_TASK, {}, seed=seed, size=50) for seed in (100, 110))
    assert [a[i]["question"] for i in range(10, 50)] == [b[i]["question"] for i in range(40)]
    assert a[3] == a[3]
    assert len({raw["question"] for raw in a}) > 45


def test_bad_parameters() -> None:
    """Catches an exponential with a mean that is not positive."""
    with pytest.raises(ConfigError, match="mean_terms must be above min_terms"):
        create_task(LONG_TAIL_TASK, {"mean_terms": 2.0}, seed=0, size=1)
