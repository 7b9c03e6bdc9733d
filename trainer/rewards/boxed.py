r"""The final answer of a response: the content of ``\boxed{...}``."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or an escaped character, so that the printed braces ``\\{`` and ``\\}`` are not counted."""


def boxed_answer(text: str) -> str | None:
    r"""Stripped content of the last ``\boxed{...}`` whose braces balance, or None if there is no such box.

    Example:
        >>> boxed_answer(r"so \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
    """
    for start in reversed([match.end() for match in _BOX.finditer(text)]):
        content = _balanced(text, start)
        if content is not None:
            return content.strip()
    return None


def final_answer(text: str) -> str:
    r"""The boxed answer, or else the last word without the punctuation around it; empty for an empty text.

    Example:
        >>> final_answer("The final answer is 13.")
        '13'
    """
    boxed = boxed_answer(text)
    words = text.split()
    return boxed if boxed is not None else words[-1].strip(".,;:!?*$()[]") if words else ""


def has_one_box(text: str) -> bool:
    r"""Whether ``\boxed{`` occurs exactly once, and its braces balance around something."""
    return len(_BOX.findall(text)) == 1 and bool(boxed_answer(text))


def _balanced(text: str, start: int) -> str | None:
    """Text from ``start`` up to the brace that closes the one just before ``start``."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        if brace.group() == "{":
            depth += 1
        elif brace.group() == "}":
            depth -= 1
            if depth == 0:
                return text[start : brace.start()]
    return None
