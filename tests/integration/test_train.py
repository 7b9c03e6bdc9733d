"""``tlt train`` end to end on real vLLM and Ray with a tiny model: results, faults and exit codes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from rollout import EngineSpec, RolloutSection
from tests.integration.cli import (
    assert_all_gone,
    descendants,
    run_tlt,
    start_tlt,
    wait_until,
    workers_of,
    write_tiny_config,
)
from tlt.observability.timeline import Span, SpanKind, account
from tlt.types import RolloutRequest, SamplingSpec

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 2
RESPONSES_PER_STEP = 16


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Path:
    """The folder of a run that ended well."""
    folder = tmp_path_factory.mktemp("train")
    config = write_tiny_config(folder, tiny_llama_dir)
    drafting = ["draft.kind=ngram", "draft.prompt_lookup_min=1"]
    code, stdout, stderr = run_tlt("train", str(config), *drafting, "--json", cwd=folder)
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
        # The run drafts: its choices are counted, and the check above holds for drafted tokens too.
        assert sum(value for key, value in record.items() if key.startswith("spec/share_k")) == pytest.approx(1.0)
        assert record["spec/acceptance_length"] >= 1.0
        path = finished_run / "responses" / f"step-{record['step']:06d}.jsonl"
        responses = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(responses) == RESPONSES_PER_STEP
        assert len({r["policy_version"] for r in responses}) == 1


def test_the_timeline_accounts_for_each_rollout(finished_run: Path) -> None:
    """Catches idle time that is missing or counted twice: generate and idle fill each step's rollout, per worker."""
    lines = (finished_run / "timeline.jsonl").read_text().splitlines()
    spans = [Span(**row | {"kind": SpanKind(row["kind"])}) for row in map(json.loads, lines)]
    for step in range(1, STEPS + 1):
        generate = [s for s in spans if s.step == step and s.kind is SpanKind.GENERATE]
        begin = min(s.begin_s for s in generate)
        accounts = account([s for s in spans if s.step == step], begin, max(s.end_s for s in generate))
        assert set(accounts) == {"worker-0", "worker-1"}
        for worker in accounts.values():
            assert worker.by_kind[SpanKind.GENERATE] > 0
            assert worker.unaccounted_s == pytest.approx(0.0, abs=1e-3)
            assert worker.overlap_s == pytest.approx(0.0, abs=1e-3)


def test_the_policy_loads_in_transformers_and_vllm(finished_run: Path) -> None:
    """Catches a policy folder without weights, tokenizer or chat template, or one whose config names another dtype."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(finished_run / "policy")
    assert tokenizer.chat_template
    model, info = AutoModelForCausalLM.from_pretrained(finished_run / "policy", output_loading_info=True)
    assert not info["missing_keys"]
    assert model.dtype == model.config.dtype
    section = RolloutSection(enforce_eager=True, max_model_len=64, kv_cache_gib=0.1)
    engine = EngineSpec(model_path=str(finished_run / "policy"), dtype="float32", section=section).build()
    sampling = SamplingSpec(max_tokens=4, temperature=0.0, ignore_eos=True)
    engine.add(RolloutRequest(request_id="r", prompt_key="r", prompt_token_ids=(5, 6, 7), sampling=sampling))
    while engine.num_running + engine.num_waiting:
        finished = engine.step().finished
    engine.close()
    greedy = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert finished[0].token_ids == tuple(greedy[0, 3:].tolist())


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


def test_too_few_prompts_end_with_exit_code_2(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """Catches a run of no steps that counts as done, and bad data that leaves half a run folder in the way."""
    config = write_tiny_config(tmp_path, tiny_llama_dir)
    code, _, stderr = run_tlt("train", str(config), "data.source.num_train=2", cwd=tmp_path)
    assert code == 2
    assert "2 training prompts" in stderr
    assert not (tmp_path / "runs").exists()


def test_a_killed_worker_is_replaced_and_the_run_goes_on(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """kill -9 of a real engine's process during training: nothing is lost, the restart is counted."""
    config = write_tiny_config(tmp_path, tiny_llama_dir)
    process = start_tlt("train", str(config), "learner.max_steps=4", "eval.num_prompts=1", cwd=tmp_path)
    run = tmp_path / "runs" / "tiny"
    try:
        wait_until(lambda: (run / "responses" / "step-000001.jsonl").exists(), process)
        workers_of(process)[0].kill()
        process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, (tmp_path / "stderr.txt").read_text()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["rollout/num_restarts"] for r in records if "rollout/num_restarts" in r][-1] == 1
    assert json.loads((run / "summary.json").read_text())["responses"] == 4 * RESPONSES_PER_STEP


def test_a_stopped_worker_is_replaced_and_a_second_failure_ends_the_run(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """SIGSTOP: a worker that lives and makes no progress. Catches an endless wait for it, endless restarts, orphans."""
    config = write_tiny_config(tmp_path, tiny_llama_dir)
    overrides = ["learner.max_steps=1000", "eval.num_prompts=0", "rollout.worker_timeout_s=5"]
    process = start_tlt("train", str(config), *overrides, cwd=tmp_path)
    run = tmp_path / "runs" / "tiny"
    try:
        wait_until(lambda: (run / "responses" / "step-000001.jsonl").exists(), process)
        first = workers_of(process)
        first[0].send_signal(signal.SIGSTOP)
        wait_until(lambda: '"rollout/num_restarts": 1' in (run / "metrics.jsonl").read_text(), process)
        [replacement] = [p for p in workers_of(process) if p not in first]
        started = descendants(process)
        replacement.kill()
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "worker 0 failed again" in (tmp_path / "stderr.txt").read_text().replace("worker 1", "worker 0")
    assert_all_gone(started)
    assert not json.loads((run / "summary.json").read_text())["completed"]


def test_an_unreachable_cluster_is_named(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """Catches a traceback, or an endless wait, where RAY_ADDRESS points at nothing."""
    config = write_tiny_config(tmp_path, tiny_llama_dir)
    code, _, stderr = run_tlt("train", str(config), cwd=tmp_path, ray_address="127.0.0.1:1")
    assert code == 1
    assert "RAY_ADDRESS=127.0.0.1:1" in stderr
    assert "Traceback" not in stderr


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
    # After kill -9 Ray's own agents notice by themselves, which takes them up to a minute.
    assert_all_gone(started, timeout_s=120)
    if signum is signal.SIGKILL:
        return
    assert process.returncode == 128 + signum
    summary = json.loads((run / "summary.json").read_text())
    assert not summary["completed"]
    assert (run / "policy" / "config.json").exists(), "the finished steps are lost"
