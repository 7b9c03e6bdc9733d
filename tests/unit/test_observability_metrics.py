"""Sinks, timeline and phase clock: figures must be right and must arrive."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tlt.config.schema import LoggingSection
from tlt.errors import ConfigError, TltError
from tlt.observability.phases import Phase, PhaseClock
from tlt.observability.run_folder import RunFolder
from tlt.observability.sinks import JsonlSink, MetricsWriter, check_sinks, open_metrics
from tlt.observability.timeline import Span, SpanKind, TimelineWriter, account


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class ListSink:
    """Keeps what it is given; a broken one raises instead, also when closed."""

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def write(self, step: int, time_unix_s: float, metrics: Mapping[str, float]) -> None:
        if self.broken:
            raise ConnectionError("server gone")
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed = True
        if self.broken:
            raise ConnectionError("server gone")


def test_every_line_is_strict_json_at_once(tmp_path: Path) -> None:
    """Catches NaN tokens in metrics.jsonl, numpy scalars, and lines that wait in a buffer until close."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(JsonlSink(path), clock=lambda: 1700000000.5)
    writer.write(1, {"reward/mean": math.nan, "learn/grad_norm": -math.inf, "rollout/responses_count": 64})
    scalars: dict[str, Any] = {"reward/mean": np.float32(0.5), "rollout/responses_count": np.int64(64)}
    writer.write(2, scalars)
    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    writer.close()
    time_unix_s = {"time_unix_s": 1700000000.5}
    assert lines == [
        {"step": 1, "reward/mean": None, "learn/grad_norm": None, "rollout/responses_count": 64} | time_unix_s,
        {"step": 2, "reward/mean": 0.5, "rollout/responses_count": 64} | time_unix_s,
    ]


def test_a_second_writer_appends(tmp_path: Path) -> None:
    """Catches a resumed run that wipes its own history."""
    for step in (1, 2):
        with MetricsWriter(JsonlSink(tmp_path / "m.jsonl")) as writer:
            writer.write(step, {"a/x": step})
    assert [json.loads(line)["step"] for line in (tmp_path / "m.jsonl").open()] == [1, 2]


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [("reward", 1.0, ValueError), ("Reward/x", 1.0, ValueError), ("a/x", "1", TypeError)],
)
def test_malformed_metrics_are_refused(key: str, value: object, error: type[Exception]) -> None:
    """Catches keys that no reader finds, and text where dashboards expect numbers."""
    record = ListSink()
    with pytest.raises(error, match=key):
        MetricsWriter(record).write(1, {key: value})  # type: ignore[dict-item]
    assert record.rows == []


def test_broken_optional_sink_is_counted_logged_once_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    """Catches a dead W&B server that stops training, floods the log, or starves the sinks after it."""
    record, broken, healthy = ListSink(), ListSink(broken=True), ListSink()
    with caplog.at_level(logging.ERROR), MetricsWriter(record, [broken, healthy]) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"a/x": step})
    assert [step for step, _ in healthy.rows] == [1, 2, 3]
    assert [row["observability/sink_failures_count"] for _, row in record.rows] == [0, 1, 2]
    assert writer.num_sink_failures == 3
    failures = [entry for entry in caplog.records if "ListSink failed at step" in entry.message]
    assert len(failures) == 1
    assert failures[0].exc_info is not None
    assert record.closed
    assert healthy.closed


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux' /dev/full")
def test_full_disk_ends_the_run() -> None:
    """Catches training on for hours without a record."""
    with pytest.raises(TltError, match="free disk space"):
        MetricsWriter(JsonlSink(Path("/dev/full"))).write(1, {"a/x": 1.0})


@pytest.mark.parametrize(
    ("config", "package"),
    [(LoggingSection(tensorboard=True), "tensorboard"), (LoggingSection(wandb_project="p"), "wandb")],
)
def test_missing_package_is_said_before_the_start(
    config: LoggingSection, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an ImportError at the first step, after minutes of start-up."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"pip install 'tlt-rl\[{package}\]'"):
        check_sinks(config)


def test_wandb_gets_the_rows_and_its_start_failure_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches rows logged without their step, runs never finished, and a login traceback."""
    calls: list[object] = []

    class Run:
        def log(self, row: dict[str, float], step: int) -> None:
            calls.append((step, row["a/x"]))

        def finish(self) -> None:
            calls.append("finished")

    def init(**options: object) -> Run:
        calls.append((options["project"], options["name"]))
        return Run()

    fake = ModuleType("wandb")
    monkeypatch.setattr(fake, "Error", RuntimeError, raising=False)
    monkeypatch.setattr(fake, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    folder = RunFolder.create(tmp_path, "first", overwrite=False)
    config = LoggingSection(wandb_project="p")
    with open_metrics(folder, config, {}) as writer:
        writer.write(7, {"a/x": 0.5})
    assert calls == [("p", "first"), (7, 0.5), "finished"]

    def no_login(**options: object) -> Run:
        raise RuntimeError("api_key not configured")

    monkeypatch.setattr(fake, "init", no_login)
    with pytest.raises(ConfigError, match="WANDB_MODE=offline"):
        open_metrics(folder, config, {})


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    """Catches event files that TensorBoard cannot read, or scalars under another tag or step."""
    pytest.importorskip("tensorboard", reason="tensorboard is an extra")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    folder = RunFolder.create(tmp_path, "a", overwrite=False)
    with open_metrics(folder, LoggingSection(tensorboard=True), {}) as writer:
        writer.write(3, {"reward/mean": 0.25})
    (file,) = folder.tensorboard_dir.iterdir()
    seen = {
        (event.step, value.tag): value.tensor.float_val[0]
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    }
    assert seen[3, "reward/mean"] == 0.25


def test_account_clips_and_finds_what_is_missing_or_double(tmp_path: Path) -> None:
    """Catches idle time that leaks in from outside the window, gaps nobody sees, and double counting.

    Window 10..20. worker-0: generate 8..14, idle 14..17, gap 17..20. worker-1: generate 12..18 and,
    overlapping by one second, sync 17..19; its learn 25..30 is outside.
    """
    spans = [
        Span(worker="worker-0", kind=SpanKind.GENERATE, begin_s=8.0, end_s=14.0, step=1),
        Span(worker="worker-1", kind=SpanKind.SYNC, begin_s=17.0, end_s=19.0, step=1),
        Span(worker="worker-0", kind=SpanKind.IDLE, begin_s=14.0, end_s=17.0, step=1),
        Span(worker="worker-1", kind=SpanKind.GENERATE, begin_s=12.0, end_s=18.0, step=1),
        Span(worker="worker-1", kind=SpanKind.EVAL, begin_s=25.0, end_s=30.0, step=1),
    ]
    accounts = account(spans, 10.0, 20.0)
    assert accounts["worker-0"].by_kind == {SpanKind.GENERATE: 4.0, SpanKind.IDLE: 3.0}
    assert accounts["worker-0"].unaccounted_s == 3.0
    assert accounts["worker-0"].overlap_s == 0.0
    assert accounts["worker-1"].by_kind == {SpanKind.GENERATE: 6.0, SpanKind.SYNC: 2.0}
    assert accounts["worker-1"].unaccounted_s == 3.0
    assert accounts["worker-1"].overlap_s == 1.0

    with TimelineWriter(tmp_path / "timeline.jsonl") as writer:
        writer.write(spans[0])
    line = json.loads((tmp_path / "timeline.jsonl").read_text())
    assert line == {"worker": "worker-0", "kind": "generate", "begin_s": 8.0, "end_s": 14.0, "step": 1}
    assert Span(**line | {"kind": SpanKind(line["kind"])}) == spans[0]


def test_phase_clock_charges_the_innermost_phase_once() -> None:
    """Catches nested phases counted twice, time between phases lost, and eval or start-up outside 'other'."""
    clock = FakeClock()
    phases = PhaseClock(clock)
    with phases.phase(Phase.START):
        clock.now += 3.0
    clock.now += 1.0
    with phases.phase(Phase.EVAL):
        clock.now += 2.0
        with phases.phase(Phase.GENERATE):
            clock.now += 10.0
        clock.now += 4.0
    with phases.phase(Phase.GENERATE):
        clock.now += 5.0
        with phases.phase(Phase.SYNC):
            clock.now += 0.5
        clock.now += 5.0
    with phases.phase(Phase.LEARN):
        clock.now += 7.0
    expected = {"generate": 20.0, "reward": 0.0, "learn": 7.0, "sync": 0.5, "other": 10.0}
    assert phases.breakdown_s() == expected
    assert sum(expected.values()) == clock.now - 100.0


def test_phase_clock_survives_an_exception_and_counts_open_phases() -> None:
    """Catches a phase left open by an error (all later time charged to it), and a snapshot that misses it."""
    clock = FakeClock()
    phases = PhaseClock(clock)

    def crash() -> None:
        with phases.phase(Phase.LEARN):
            clock.now += 2.0
            assert phases.breakdown_s()["learn"] == 2.0
            clock.now += 1.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        crash()
    clock.now += 4.0
    assert phases.breakdown_s() == {"generate": 0.0, "reward": 0.0, "learn": 3.0, "sync": 0.0, "other": 4.0}


def test_observability_imports_nothing_heavy_or_optional() -> None:
    """Catches `tlt --help` taking ten seconds, or needing an extra, because a log module imports it."""
    modules = [f"tlt.observability.{path.stem}" for path in _sources() if path.stem != "__init__"]
    heavy = ("torch", "ray", "vllm", "transformers", "wandb", "tensorboard")
    code = f"import sys, {', '.join(modules)}; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=_ROOT, check=False)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


_ROOT = Path(__file__).resolve().parents[2]


def _sources() -> list[Path]:
    sources = sorted((_ROOT / "tlt" / "observability").glob("*.py"))
    assert len(sources) > 5
    return sources
