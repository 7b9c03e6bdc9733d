"""Runs the ``tlt`` command as a user does: another process, a real configuration file, a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

TLT = str(Path(sys.executable).with_name("tlt"))

TINY_RUN = """
run: {{name: tiny, dir: {runs}}}
model: {{name: {model}, dtype: float32}}
data:
  source: {{kind: reasoning_gym, tasks: {{chain_sum: {{min_terms: 2, max_terms: 3}}}}, num_train: 64}}
  max_prompt_length: 192
rewards: {{functions: [{{kind: reasoning_gym}}, {{kind: format, weight: 0.2}}]}}
rollout:
  {{num_workers: 2, max_num_seqs: 4, max_model_len: 256, kv_cache_gib: 0.1, enforce_eager: true,
    max_completion_length: 24, worker_timeout_s: 60}}
learner: {{max_steps: 2, prompts_per_step: 4, num_generations: 4, per_device_train_batch_size: 8, bf16: false}}
eval: {{num_prompts: 4}}
"""


def write_tiny_config(folder: Path, model: Path) -> Path:
    """A two-step run of the tiny model; runs go to ``folder/runs``."""
    path = folder / "tiny.yaml"
    path.write_text(TINY_RUN.format(runs=folder / "runs", model=model))
    return path


def start_tlt(*arguments: str, cwd: Path, ray_address: str | None = None) -> subprocess.Popen[str]:
    """Start ``tlt``, by default with its own local Ray; stderr goes to ``cwd/stderr.txt``."""
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env["TLT_CACHE"] = str(cwd / "cache")  # what a run learns about this machine is not for the next one
    if ray_address is not None:
        env["RAY_ADDRESS"] = ray_address
    with (cwd / "stderr.txt").open("w") as stderr:
        return subprocess.Popen([TLT, *arguments], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True)


def run_tlt(
    *arguments: str, cwd: Path, timeout_s: float = 240.0, ray_address: str | None = None
) -> tuple[int, str, str]:
    """Run ``tlt`` to its end: exit code, stdout, stderr."""
    process = start_tlt(*arguments, cwd=cwd, ray_address=ray_address)
    try:
        stdout, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return process.returncode, stdout, (cwd / "stderr.txt").read_text()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], timeout_s: float = 180.0) -> None:
    """Poll ``condition`` while ``process`` runs."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, f"tlt ended early with exit code {process.returncode}"
        assert time.monotonic() < deadline, f"condition not met after {timeout_s} s"
        try:
            process.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            continue


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Every process that ``process`` has started, directly or not."""
    return psutil.Process(process.pid).children(recursive=True)


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The rollout workers among them; there should be two."""
    workers = [p for p in descendants(process) if "RolloutActor" in " ".join(p.cmdline())]
    assert len(workers) == 2
    return workers


def assert_all_gone(processes: list[psutil.Process], timeout_s: float = 30.0) -> None:
    """None of ``processes`` runs after at most ``timeout_s``; a zombie that init has not collected is gone."""
    deadline = time.monotonic() + timeout_s
    running = processes
    while running and time.monotonic() < deadline:
        psutil.wait_procs(running, timeout=0.5)
        running = [process for process in running if _runs(process)]
    assert not running, f"orphans: {[(p.pid, p.name()) for p in running]}"


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
