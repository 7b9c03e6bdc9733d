"""Worked solutions, written by a solver and not by a model: the material of the cold start.

A trace adds one term per line, so its length follows the number of terms, and its format is so regular that
drafting pays.
"""

from __future__ import annotations

import re

from tlt.errors import TltError
from trainer.data import PromptItem

_EXPRESSION = re.compile(r"-?\d+(?: [+-] -?\d+)*")


def write_trace(item: PromptItem) -> str:
    r"""The worked solution of a chain sum; the last line is ``The final answer is \boxed{58}.``

    Raises:
        TltError: the item is no chain sum, or the solver's result is not the task's answer.
    """
    expression = str((item.metadata or {}).get("expression"))
    if not _EXPRESSION.fullmatch(expression):
        raise TltError(
            f"task '{item.task}': '{expression}' is not a chain of integers with + and -; "
            "the solver knows reasoning-gym's chain_sum, and its format may have changed"
        )
    first, *rest = expression.split()
    total = int(first)
    lines = [f"Start with {total}."]
    for step, (operator, term) in enumerate(zip(rest[::2], rest[1::2], strict=True), start=1):
        result = total + int(term) if operator == "+" else total - int(term)
        lines.append(f"Step {step}: {total} {operator} {term} = {result}.")
        total = result
    if str(total) != item.answer:
        raise TltError(f"task '{item.task}': the solver finds {total} for '{expression}', the task says {item.answer}")
    lines.append(rf"The final answer is \boxed{{{total}}}.")
    return "\n".join(lines)
