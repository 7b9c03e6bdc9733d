"""Run folder, JSON files and provenance: what must never be lost, overwritten or half written."""

from __future__ import annotations

import json
import math
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tlt.errors import ConfigError, TltError
from tlt.observability.json_files import JsonLinesWriter, write_json_atomic
from tlt.observability.provenance import collect_provenance, git_state
from tlt.observability.run_folder import RunFolder, default_base


def test_default_base_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches results written into the copy that Ray deletes, and TLT_RUNS_DIR losing to either default."""
    monkeypatch.setenv("HOME", "/home/someone")
    upload = Path("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_0")
    assert default_base(Path("/work"), {}) == Path("/work/runs")
    assert default_base(upload, {}) == Path("/home/someone/tlt-runs")
    assert default_base(upload / "sub", {"TLT_RUNS_DIR": "/data/runs"}) == Path("/data/runs")
    assert default_base(Path("/work"), {"TLT_RUNS_DIR": "~/r"}) == Path("/home/someone/r")
    assert default_base(Path("/work"), {"TLT_RUNS_DIR": "rel"}) == Path("/work/rel")


def test_relative_folder_inside_a_ray_upload_is_refused(tmp_path: Path) -> None:
    """Catches an explicit run.dir=runs under `ray job submit`, whose results vanish with the job."""
    base = tmp_path / "runtime_resources" / "working_dir_files" / "pkg" / "runs"
    with pytest.raises(ConfigError, match="absolute run.dir"):
        RunFolder.create(base, "a", overwrite=False)
    assert not base.exists()


def test_paths_are_absolute_and_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a relative root: workers have another working folder and would write elsewhere."""
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create(Path("runs"), "a", overwrite=False)
    assert folder.root == tmp_path.resolve() / "runs" / "a"
    names = [
        folder.config_path.name,
        folder.provenance_path.name,
        folder.metrics_path.name,
        folder.timeline_path.name,
        folder.summary_path.name,
        folder.log_path.name,
    ]
    assert names == [
        "config.resolved.yaml",
        "provenance.json",
        "metrics.jsonl",
        "timeline.jsonl",
        "summary.json",
        "run.log",
    ]
    assert folder.responses_dir.is_dir()
    assert folder.checkpoints_dir.is_dir()
    assert not folder.policy_dir.exists()


def test_earlier_run_is_kept_unless_overwrite(tmp_path: Path) -> None:
    """Catches silent mixing of two runs, and an overwrite that leaves old files behind."""
    folder = RunFolder.create(tmp_path, "a", overwrite=False)
    # A start that failed before writing anything must not block the next one.
    assert RunFolder.create(tmp_path, "a", overwrite=False) == folder
    folder.config_path.write_text("x")
    (folder.responses_dir / "step-1.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=r"run\.name.*run\.overwrite=true"):
        RunFolder.create(tmp_path, "a", overwrite=False)
    assert folder.config_path.read_text() == "x"
    RunFolder.create(tmp_path, "a", overwrite=True)
    assert [path for path in folder.root.rglob("*") if path.is_file()] == []


def test_overwrite_spares_a_folder_that_is_no_run(tmp_path: Path) -> None:
    """Catches run.dir=/home run.name=me run.overwrite=true deleting somebody's files."""
    (tmp_path / "me").mkdir()
    precious = tmp_path / "me" / "thesis.tex"
    precious.write_text("years")
    with pytest.raises(ConfigError, match="not the folder of a run"):
        RunFolder.create(tmp_path, "me", overwrite=True)
    assert precious.read_text() == "years"


def test_overwrite_does_not_follow_links(tmp_path: Path) -> None:
    """Catches an overwrite that deletes the data set a run linked to."""
    outside = tmp_path / "data"
    outside.mkdir()
    (outside / "train.jsonl").write_text("{}")
    folder = RunFolder.create(tmp_path, "a", overwrite=False)
    folder.config_path.write_text("x")
    (folder.root / "link").symlink_to(outside)
    RunFolder.create(tmp_path, "a", overwrite=True)
    assert (outside / "train.jsonl").exists()
    assert not (folder.root / "link").is_symlink()


def test_unusable_places_are_refused_with_a_remedy(tmp_path: Path) -> None:
    """Catches a traceback, or hours of training, before a run finds out that it cannot write."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir"):
        RunFolder.create(tmp_path / "file", "a", overwrite=False)
    with pytest.raises(ConfigError, match=r"GiB free.*run\.dir"):
        RunFolder.create(tmp_path, "a", overwrite=False, min_free_gib=1e9)


def test_atomic_write_leaves_the_old_file_on_failure(tmp_path: Path) -> None:
    """Catches a summary that is emptied first: a value that is no JSON must not destroy the old one."""
    path = tmp_path / "summary.json"
    write_json_atomic(path, {"a": 1, "b": [math.nan, math.inf]})
    assert json.loads(path.read_text()) == {"a": 1, "b": [None, None]}
    with pytest.raises(TypeError):
        write_json_atomic(path, {"a": object()})
    assert json.loads(path.read_text())["a"] == 1
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(TltError, match="cannot write"):
        write_json_atomic(tmp_path / "gone" / "summary.json", {})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux' /dev/full")
def test_full_disk_is_an_error_at_the_line_itself() -> None:
    """Catches buffered writes: the failure would show at exit, after training without a record."""
    with (
        JsonLinesWriter(Path("/dev/full"), durable=False) as lines,
        pytest.raises(TltError, match="No space"),
    ):
        lines.write({"step": 1})


def test_git_state_follows_the_checkout(tmp_path: Path) -> None:
    """Catches naming a commit that is not what ran: dirty trees, foreign repositories, no commit yet."""

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert git_state(tmp_path) is None
    git("init")
    assert git_state(tmp_path) is None
    (tmp_path / "code.py").write_text("1")
    git("add", "code.py")
    git("commit", "-m", "first")
    assert git_state(tmp_path) == {"sha": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "code.py").write_text("2")
    assert git_state(tmp_path) == {"sha": git("rev-parse", "HEAD"), "dirty": True}
    (tmp_path / "site-packages").mkdir()
    assert git_state(tmp_path / "site-packages") is None


def test_provenance_is_json_and_has_no_host_name(tmp_path: Path) -> None:
    """Catches facts that cannot be written, local time passed off as UTC, and leaking the machine's name."""
    started = datetime.fromisoformat("2026-01-02T03:04:05+02:00")
    path = tmp_path / "provenance.json"
    write_json_atomic(path, collect_provenance(["tlt", "train", "x.yaml"], started))
    facts = json.loads(path.read_text())
    assert facts["argv"] == ["tlt", "train", "x.yaml"]
    assert facts["started_utc"] == "2026-01-02T01:04:05+00:00"
    assert set(facts["hardware"]) == {"platform", "cpu_model", "usable_cores", "memory_gib"}
    assert facts["hardware"]["usable_cores"] >= 1
    assert facts["hardware"]["memory_gib"] > 0.1
    assert facts["packages"]["numpy"] is not None
    assert datetime.fromisoformat(collect_provenance([])["started_utc"]).tzinfo == UTC
