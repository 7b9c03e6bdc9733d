"""The same command as a Ray job: uploaded working folder, the cluster's address, true exit codes, logs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cli import write_tiny_config

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(500)]

BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def head_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A head node as an operator starts it, and the environment in which jobs are submitted to it.

    It blocks in the foreground, so that ending this process ends the node and nothing else: ``ray stop`` would end
    every Ray of the machine.
    """
    port, dashboard = free_port(), free_port()
    # Sockets lie below this folder, and their paths may have 107 bytes.
    temp = tmp_path_factory.mktemp("r")
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env["PATH"] = f"{BIN}{os.pathsep}{env['PATH']}"
    command = [str(BIN / "ray"), "start", "--head", "--block", "--num-cpus=3", "--node-ip-address=127.0.0.1"]
    command += [f"--port={port}", "--include-dashboard=true", "--dashboard-host=127.0.0.1"]
    command += [f"--dashboard-port={dashboard}", f"--temp-dir={temp}", "--dashboard-agent-listen-port=0"]
    with (temp / "head.log").open("w") as log:
        node = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        yield env | {"RAY_ADDRESS": f"http://127.0.0.1:{dashboard}"}
    finally:
        node.terminate()
        node.wait(timeout=60)


def submit(env: dict[str, str], folder: Path, *entrypoint: str) -> subprocess.CompletedProcess[str]:
    """``ray job submit`` of the folder, as in the README; waits for the end of the job."""
    command = [str(BIN / "ray"), "job", "submit", "--working-dir", ".", "--", *entrypoint]
    # Submission itself is tried again while the head node is still starting.
    for attempt in range(12):
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
        if "Failed to connect" not in done.stdout + done.stderr or attempt == 11:
            return done
    raise AssertionError("unreachable")


@pytest.fixture
def upload(tmp_path: Path, tiny_llama_dir: Path) -> Path:
    """The folder that is submitted: a configuration without ``run.dir``."""
    folder = tmp_path / "upload"
    folder.mkdir()
    config = write_tiny_config(folder, tiny_llama_dir)
    config.write_text(config.read_text().replace(f", dir: {folder / 'runs'}", ""))
    return folder


def test_a_job_trains_and_its_results_outlive_it(head_node: dict[str, str], upload: Path, tmp_path: Path) -> None:
    """Catches results inside the temporary copy that Ray deletes, and a driver that starts a second cluster."""
    runs = tmp_path / "kept"
    done = submit(head_node, upload, "env", f"TLT_RUNS_DIR={runs}", "tlt", "train", "tiny.yaml", "eval.num_prompts=0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"run folder: {runs / 'tiny'}" in done.stdout
    assert json.loads((runs / "tiny" / "summary.json").read_text())["completed"]
    assert (runs / "tiny" / "policy" / "config.json").exists()


def test_a_job_with_bad_input_fails_as_a_job(head_node: dict[str, str], upload: Path) -> None:
    """Catches an exit code that is lost between driver and job: a scheduler would take the failure for success."""
    done = submit(head_node, upload, "tlt", "train", "tiny.yaml", "learner.max_stepps=2")
    assert done.returncode != 0
    assert "max_steps" in done.stdout
