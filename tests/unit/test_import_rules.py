"""Imports go one way, ``tlt <- rollout <- trainer``, and the heavy libraries each live in one place."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

RULES = {
    "rollout": ("rollout/", "trainer/"),
    "trainer": ("trainer/",),
    "torch": ("tlt/draft/", "rollout/", "trainer/"),
    "ray": ("rollout/", "trainer/learner", "trainer/cli", "trainer/loop"),
    "vllm": ("rollout/vllm_",),
}
"""Top-level package -> beginnings of the paths that may import it."""


def imported_packages(source: str) -> Iterator[tuple[int, str]]:
    """Line and top-level package of each import, wherever it stands, also those for type checkers only."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            # A relative import has no module of its own at level 1; "." stands for it.
            yield node.lineno, "." if node.level else (node.module or "").split(".")[0]


def violations(path: str, source: str) -> list[str]:
    found = []
    for line, package in imported_packages(source):
        if package == ".":
            found.append(f"{path}:{line} has a relative import")
        elif package in RULES and not path.startswith(RULES[package]):
            found.append(f"{path}:{line} imports {package}")
    return found


def test_no_module_imports_against_the_rules() -> None:
    """Catches Ray or vLLM leaking into the pure core, and cycles between the three packages."""
    files = [file for package in ("tlt", "rollout", "trainer") for file in (ROOT / package).rglob("*.py")]
    assert files
    found = [v for file in files for v in violations(file.relative_to(ROOT).as_posix(), file.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tlt/types.py", "import ray.util"),
        ("tlt/types.py", "from rollout.engine import Generated"),
        ("tlt/idle/detector.py", "def f():\n    import torch"),
        ("rollout/pool.py", "from vllm import LLMEngine"),
        ("rollout/pool.py", "from trainer import models"),
        ("trainer/models.py", "import ray"),
        ("tlt/types.py", "from . import errors"),
    ],
)
def test_the_check_sees_each_kind_of_violation(path: str, source: str) -> None:
    """Catches a checker that has gone blind, for instance to imports inside functions."""
    assert violations(path, source)


def test_the_config_schema_loads_without_heavy_libraries(tmp_path: Path) -> None:
    """Catches a command line that needs ten seconds, or a GPU driver, to report a misspelt key."""
    code = (
        "import sys, tlt.config, tlt.config.schema; "
        "print([m for m in ('torch', 'ray', 'vllm', 'transformers', 'trl') if m in sys.modules])"
    )
    assert run_outside_checkout(code, tmp_path) == "[]"


def test_the_packages_are_those_of_this_checkout(tmp_path: Path) -> None:
    """Catches another distribution that installs a top-level ``trainer`` (there is one), ``rollout`` or ``tlt``."""
    code = "import tlt, rollout, trainer; print(tlt.__file__, rollout.__file__, trainer.__file__)"
    expected = [str(ROOT / package / "__init__.py") for package in ("tlt", "rollout", "trainer")]
    assert run_outside_checkout(code, tmp_path).split() == expected


def run_outside_checkout(code: str, folder: Path) -> str:
    """Output of a fresh interpreter that finds the packages by their installation only."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=folder, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()
