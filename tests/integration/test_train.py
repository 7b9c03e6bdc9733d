"""``tlt train`` end to end on real vLLM and Ray with a tiny model: results, faults and exit codes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.integration.cli import (
    assert_all_gone,
    descendants,
    run_tlt,
    start_tlt,
    wait_until,
    write_tiny_config,
)

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 2
RESPONSES_PER_STEP = 16


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Path:
    """The folder of a run that ended well."""
    folder = tmp_path_factory.mktemp("train")
    config = write_tiny_config(folder, tiny_llama_dir)
    code, stdout, stderr = run_tlt("train", str(config), "--json", cwd=folder)
    assert code == 0, stderr
    run = folder / "runs" / "tiny"
    assert json.loads(stdout.splitlines()[-1]) == json.loads((run / "summary.json").read_text())
    assert f"run folder: {run}" in stderr
    return run


def test_the_summary_adds_up(finished_run: Path) -> None:
    """Catches a breakdown with lost or doubled time, and counts that disagree with what was configured."""
    summary = json.loads((finished_run / "summary.json").read_text())
    assert summary["completed"]
    assert summary["steps"] == STEPS
    assert summary["responses"] == STEPS * RESPONSES_PER_STEP
    assert summary["workers"] == 2
    assert set(summary["breakdown_s"]) == {"generate", "reward", "learn", "sync", "other"}
    assert sum(summary["breakdown_s"].values()) == pytest.approx(summary["wall_s"])
    # One sync for each rollout, and one before each of the two evaluations; the first two carry equal weights.
    assert summary["policy_version"] >= STEPS + 1
    assert summary["eval"]["after"]["num_prompts"] == 4


def test_each_step_has_metrics_and_all_responses(finished_run: Path) -> None:
    """Catches a step without its record, a response written twice or not at all, and mixed policy versions."""
    records = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if "learner/loss" in r]
    assert [r["step"] for r in steps] == [1, 2]
    for record in steps:
        for key in (
            "mismatch/mean_abs_logprob_nats",
            "reward/mean",
            "reward/zero_variance_share",
            "rollout/idle_share",
        ):
            assert key in record
        # float32 on both sides: engine and learner agree closely, or one of them is wrong.
        assert record["mismatch/mean_abs_logprob_nats"] < 1e-3
        path = finished_run / "responses" / f"step-{record['step']:06d}.jsonl"
        responses = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(responses) == RESPONSES_PER_STEP
        assert len({r["policy_version"] for r in responses}) == 1


def test_the_timeline_accounts_for_each_rollout(finished_run: Path) -> None:
    """Catches idle time that is counted twice or not at all: per worker, spans of a rollout touch without overlap."""
    spans = [json.loads(line) for line in (finished_run / "timeline.jsonl").read_text().splitlines()]
    for step in (1, 2):
        for worker in ("worker-0", "worker-1"):
            mine = sorted(
                (s["begin_s"], s["end_s"])
                for s in spans
                if s["step"] == step and s["worker"] == worker and s["kind"] in ("generate", "idle")
            )
            assert mine
            for (_, end), (begin, _) in zip(mine, mine[1:], strict=False):
                # Evaluations have idle spans too, so there may be gaps, but never an overlap.
                assert begin >= end - 1e-6


def test_the_policy_loads_in_transformers(finished_run: Path) -> None:
    """Catches a policy folder without weights, tokenizer or chat template, or one whose config names another dtype."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(finished_run / "policy")
    assert tokenizer.chat_template
    model, info = AutoModelForCausalLM.from_pretrained(finished_run / "policy", output_loading_info=True)
    assert not info["missing_keys"]
    assert model.dtype == model.config.dtype


def test_resolved_config_and_provenance_are_kept(finished_run: Path) -> None:
    """Catches a run that cannot be repeated from its folder."""
    from tlt.config import load_config

    assert load_config(finished_run / "config.resolved.yaml").learner.max_steps == STEPS
    provenance = json.loads((finished_run / "provenance.json").read_text())
    assert "train" in provenance["argv"]


def test_an_existing_run_is_not_overwritten(finished_run: Path, tiny_llama_dir: Path) -> None:
    """Catches the loss of an earlier run's results; exit code 2 and a remedy."""
    folder = finished_run.parent.parent
    code, _, stderr = run_tlt("train", str(folder / "tiny.yaml"), cwd=folder)
    assert code == 2
    assert "run.overwrite=true" in stderr


def test_bad_input_ends_with_exit_code_2_before_anything_starts(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """Catches a misspelt key that is ignored; nothing may be created."""
    config = write_tiny_config(tmp_path, tiny_llama_dir)
    code, stdout, stderr = run_tlt("train", str(config), "learner.num_generation=4", cwd=tmp_path, timeout_s=60)
    assert code == 2
    assert stdout == ""
    assert "num_generations" in stderr
    assert not (tmp_path / "runs").exists()


def test_a_killed_worker_is_replaced_and_the_run_goes_on(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """kill -9 of a real engine's process during training: nothing is lost, the restart is counted."""
    config = write_tiny_config(tmp_path, tiny_llama_dir)
    process = start_tlt("train", str(config), "learner.max_steps=4", "eval.num_prompts=0", cwd=tmp_path)
    run = tmp_path / "runs" / "tiny"
    try:
        wait_until(lambda: (run / "responses" / "step-000001.jsonl").exists(), process)
        workers = [p for p in descendants(process) if "RolloutActor" in " ".join(p.cmdline())]
        assert len(workers) == 2
        workers[0].kill()
        process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, (tmp_path / "stderr.txt").read_text()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["rollout/num_restarts"] == 1
    assert json.loads((run / "summary.json").read_text())["responses"] == 4 * RESPONSES_PER_STEP


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_no_orphans(signum: signal.Signals, tmp_path: Path, tiny_llama_dir: Path) -> None:
    """Catches engines that live on after Ctrl-C, after a job's SIGTERM, and after kill -9 of the driver."""
    config = write_tiny_config(tmp_path, tiny_llama_dir)
    process = start_tlt("train", str(config), "learner.max_steps=1000", "eval.num_prompts=0", cwd=tmp_path)
    run = tmp_path / "runs" / "tiny"
    try:
        wait_until(lambda: (run / "responses" / "step-000002.jsonl").exists(), process)
        started = descendants(process)
        process.send_signal(signum)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert_all_gone(started)
    if signum is signal.SIGKILL:
        return
    assert process.returncode == 128 + signum
    summary = json.loads((run / "summary.json").read_text())
    assert not summary["completed"]
    assert (run / "policy" / "config.json").exists(), "the finished steps are lost"
