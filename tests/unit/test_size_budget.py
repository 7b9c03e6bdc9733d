"""Files and functions stay small enough to be read in one go."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_FORWARD_LINES = 100
"""A module's ``forward`` is one story that reads worse in pieces."""


def function_lengths(source: str) -> Iterator[tuple[int, str, int]]:
    """Line, name and number of lines of each function, decorators left out, docstring and nested ones included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.lineno, node.name, node.end_lineno - node.lineno + 1


def over_budget(path: str, source: str) -> list[str]:
    found = []
    if (num_lines := len(source.splitlines())) > MAX_FILE_LINES:
        found.append(f"{path} has {num_lines} lines; split it by noun (limit {MAX_FILE_LINES})")
    for line, name, length in function_lengths(source):
        limit = MAX_FORWARD_LINES if name == "forward" else MAX_FUNCTION_LINES
        if length > limit:
            found.append(f"{path}:{line} {name} has {length} lines (limit {limit})")
    return found


def test_files_and_functions_are_within_budget() -> None:
    """Catches the file or function that grew by one feature at a time until nobody reads it whole."""
    files = [file for package in ("tlt", "rollout", "trainer", "tests") for file in (ROOT / package).rglob("*.py")]
    assert files
    found = [v for file in files for v in over_budget(file.relative_to(ROOT).as_posix(), file.read_text())]
    assert not found, "\n".join(found)


def test_the_limits_are_exact() -> None:
    """Catches off-by-one and a checker that skips methods, async functions or ``forward``."""
    body = "        pass\n"
    method = "class A:\n    async def {}(self):\n{}"
    assert not over_budget("a.py", method.format("step", body * (MAX_FUNCTION_LINES - 1)))
    assert over_budget("a.py", method.format("step", body * MAX_FUNCTION_LINES)) == [
        "a.py:2 step has 61 lines (limit 60)"
    ]
    assert not over_budget("a.py", method.format("forward", body * (MAX_FORWARD_LINES - 1)))
    assert over_budget("a.py", method.format("forward", body * MAX_FORWARD_LINES))
    assert not over_budget("a.py", "x = 1\n" * MAX_FILE_LINES)
    assert over_budget("a.py", "x = 1\n" * (MAX_FILE_LINES + 1))
