"""Progress, logs and summary: what a person reads, on a terminal and in a file."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tlt.observability.json_files import write_json_atomic
from tlt.observability.logs import adopt_library_loggers, setup_logging
from tlt.observability.phases import Phase
from tlt.observability.progress import (
    LiveView,
    PlainView,
    Progress,
    ProgressState,
    open_view,
    render_line,
    time_left_s,
)
from tlt.observability.summary import EvalResult, RunSummary, edge_means, paired_stderr, print_summary

SHOW_CURSOR = "\x1b[?25h"
HIDE_CURSOR = "\x1b[?25l"


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    """Logging is global: hand it back as it was found."""
    names = ["tlt", "rollout", "trainer", "vllm", "ray", "transformers", "py.warnings"]
    loggers = [logging.getLogger(), *map(logging.getLogger, names)]
    saved = [(item, item.level, item.handlers[:], item.propagate) for item in loggers]
    yield
    logging.captureWarnings(False)
    for item, level, handlers, propagate in saved:
        for handler in set(item.handlers) - set(handlers):
            handler.close()
        item.setLevel(level)
        item.handlers[:] = handlers
        item.propagate = propagate


def terminal(width: int = 200) -> Console:
    """A terminal that is really a string."""
    return Console(file=StringIO(), force_terminal=True, width=width, _environ={"TERM": "xterm"})


def text_of(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_line_says_everything_while_generating() -> None:
    """Catches swapped figures (done/total, busy/idle) and a time left that counts the current step twice.

    Two steps took 60 s; the third began 10 s ago: 20 s of it and 27 steps of 30 s are left = 830 s.
    """
    state = ProgressState(
        num_steps=30,
        num_workers=3,
        started_s=0.0,
        phase=Phase.GENERATE,
        step=3,
        step_started_s=83.0,
        num_timed_steps=2,
        timed_steps_s=60.0,
        responses_done=41,
        responses_total=64,
        tokens_per_s=511.6,
        workers_busy=1,
        reward=0.4119,
    )
    assert render_line(state, 93.0) == (
        "step 3/30 · generate · responses 41/64 · workers 1 busy 2 idle · 512 tok/s · reward 0.412 · "
        "0:01:33 elapsed · about 0:13:50 left"
    )
    learning = render_line(replace(state, phase=Phase.LEARN), 93.0)
    assert "responses" not in learning
    assert "workers" not in learning


def test_time_left_at_the_edges() -> None:
    """Catches division by zero before the first step, negative times for a slow step, and resumed runs."""
    start = ProgressState(num_steps=6, num_workers=1, started_s=0.0)
    assert time_left_s(start, 50.0) is None
    assert render_line(start, 50.0) == "step 0/6 · start · 0:00:50 elapsed"
    slow = replace(start, step=2, step_started_s=100.0, num_timed_steps=1, timed_steps_s=10.0)
    assert time_left_s(slow, 500.0) == 40.0
    done = replace(start, step=6, num_timed_steps=6, timed_steps_s=60.0)
    assert time_left_s(done, 500.0) == 0.0
    # Resumed at step 4 of 6: one step finished here, in 10 s; two are left.
    resumed = replace(start, step=4, num_timed_steps=1, timed_steps_s=10.0)
    assert time_left_s(resumed, 500.0) == 20.0


def run_one_step(progress: Progress, clock: FakeClock) -> None:
    progress.begin_step(1)
    progress.enter(Phase.GENERATE)
    for done in range(1, 21):
        clock.now += 1.0
        progress.rollout(done=done, total=20, busy=1, tokens_per_s=100.0)
    progress.enter(Phase.LEARN)
    clock.now += 2.0
    progress.end_step(reward=0.5)


def test_plain_lines_are_spaced_and_each_step_has_one(caplog: pytest.LogCaptureFixture) -> None:
    """Catches a log with one line per poll (gigabytes in a long run), and steps that leave none.

    Shown at 0 s (start), then polled each second for 20 s: lines at 0, 5, 10, 15, 20 and the step's own.
    """
    clock = FakeClock()
    with (
        caplog.at_level(logging.INFO, "tlt"),
        Progress(PlainView(5.0, clock), num_steps=2, num_workers=2, clock=clock) as progress,
    ):
        run_one_step(progress, clock)
    lines = caplog.messages
    assert len(lines) == 6
    assert [line.split(" · ")[2] for line in lines[1:5]] == [f"responses {n}/20" for n in (5, 10, 15, 20)]
    expected = "step 1/2 finished in 22.0 s · 100 tok/s · reward 0.500 · 0:00:22 elapsed"
    assert lines[5] == expected + " · about 0:00:22 left"


def test_live_line_shares_the_terminal_with_the_log() -> None:
    """Catches log lines drawn through the live line or lost, and a state that never reaches the screen."""
    clock = FakeClock()
    console = terminal()
    setup_logging(logging.INFO, console=console)
    with Progress(LiveView(console, clock), num_steps=2, num_workers=2, clock=clock) as progress:
        run_one_step(progress, clock)
        logging.getLogger("trainer.x").warning("look [bold]here[/bold]")
        progress.enter(Phase.EVAL)
    output = text_of(console)
    assert "step 1/2 · eval · 100 tok/s · reward 0.500 · 0:00:22 elapsed" in output
    assert "WARNING trainer.x: look [bold]here[/bold]" in output
    assert "step 1/2 finished in 22.0 s" in output
    assert output.count(HIDE_CURSOR) == output.count(SHOW_CURSOR) == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_terminal_comes_back_after_an_error(error: type[BaseException]) -> None:
    """Catches a terminal without a cursor, or a stderr still redirected, after a crash or Ctrl-C."""
    console = terminal()
    stderr = sys.stderr

    def crash() -> None:
        with Progress(LiveView(console), num_steps=2, num_workers=1) as progress:
            progress.enter(Phase.GENERATE)
            raise error

    with pytest.raises(error):
        crash()
    output = text_of(console)
    assert HIDE_CURSOR in output
    assert output.rindex(SHOW_CURSOR) > output.rindex(HIDE_CURSOR)
    assert sys.stderr is stderr


def test_live_only_where_somebody_looks() -> None:
    """Catches cursor codes in job logs and files, and dumb terminals."""
    assert isinstance(open_view(terminal()), LiveView)
    assert isinstance(open_view(Console(file=StringIO(), _environ={})), PlainView)
    dumb = Console(file=StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(open_view(dumb), PlainView)


def test_logs_go_where_they_belong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches DEBUG lines missing from run.log, chatter and wrapped lines on stderr, and a dirty stdout."""
    path = tmp_path / "run.log"
    setup_logging(logging.INFO)
    setup_logging(logging.INFO, path)
    long = "x" * 300
    logging.getLogger("tlt.a").debug("detail")
    logging.getLogger("rollout.b").info("news %s", long)
    logging.getLogger("vllm.engine").info("chatter")
    logging.getLogger("some.library").info("chatter")
    logging.getLogger("ray.worker").warning("trouble")
    warnings.warn("old api", FutureWarning, stacklevel=1)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        f"INFO rollout.b: news {long}",
        "WARNING ray.worker: trouble",
    ]
    log = path.read_text()
    assert "DEBUG tlt.a: detail" in log
    assert log.count("news") == 1
    assert "chatter" not in log
    assert "old api" in log


def test_verbose_hears_the_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches -v that stays silent exactly when somebody hunts for an engine's problem."""
    setup_logging(logging.DEBUG)
    logging.getLogger("tlt.a").debug("detail")
    logging.getLogger("vllm.engine").info("engine says")
    logging.getLogger("some.library").info("library says")
    logging.getLogger("some.library").debug("far too much")
    error = capsys.readouterr().err
    assert "detail" in error
    assert "engine says" in error
    assert "library says" in error
    assert "far too much" not in error


def test_library_that_sets_itself_up_at_import_is_adopted(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches vLLM's own handler, which writes INFO lines to stdout, surviving our set-up."""
    setup_logging(logging.INFO)
    library = logging.getLogger("vllm")
    library.addHandler(logging.StreamHandler(sys.stdout))
    library.setLevel(logging.INFO)
    library.propagate = False
    adopt_library_loggers(logging.INFO)
    library.info("chatter")
    library.warning("trouble")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("WARNING vllm: trouble") == 1
    assert "chatter" not in captured.err


def test_paired_standard_error_by_hand() -> None:
    """Catches a pooled or population formula.

    Differences 1, 0, 0, 1: mean 0.5, squared deviations sum to 1, variance 1/3, standard error sqrt(1/12).
    """
    assert paired_stderr([0, 1, 0, 0], [1, 1, 0, 1]) == pytest.approx((1 / 12) ** 0.5)
    # The same gain for every prompt has no noise, however much the prompts differ.
    assert paired_stderr([0.0, 0.5, 0.25], [0.25, 0.75, 0.5]) == 0.0
    with pytest.raises(ValueError, match="shorter|longer"):
        paired_stderr([1.0, 0.0], [1.0])
    with pytest.raises(ValueError, match="at least two"):
        paired_stderr([1.0], [0.0])


def test_edge_means_by_hand() -> None:
    """Catches off-by-one windows and a crash on a run without steps."""
    assert edge_means([float(i) for i in range(1, 11)]) == (3.0, 8.0)
    assert edge_means([1.0, 3.0]) == (2.0, 2.0)
    assert edge_means([]) == (None, None)


def summary(**changes: object) -> RunSummary:
    before = EvalResult(
        accuracy=0.11, format_rate=0.9, accuracy_any_format=0.5, reward=0.11, num_prompts=200, mean_tokens=101.5
    )
    plain = RunSummary(
        completed=True,
        eval_before=before,
        eval_after=replace(before, accuracy=0.25, format_rate=1.0),
        eval_stderr=0.03,
        reward_first5=0.1,
        reward_last5=0.3,
        steps=30,
        tokens_per_s=512.4,
        breakdown_s={"generate": 100.0, "reward": 5.5, "learn": 80.0, "sync": 4.5, "other": 10.0},
        idle_s={"worker-0": 12.5, "worker-1": 31.0},
        responses=1920,
        workers=2,
        policy_version=30,
        files={"policy": "/data/" + "long/" * 40 + "policy", "log": "/data/run.log"},
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_summary_json_is_readable_by_a_machine(tmp_path: Path) -> None:
    """Catches eval_after - eval_before that is no number, a renamed key, and phases that do not add up."""
    path = tmp_path / "summary.json"
    write_json_atomic(path, summary().to_json())
    data = json.loads(path.read_text())
    wanted = "eval_before eval_after eval_stderr reward_first5 reward_last5 steps tokens_per_s wall_s breakdown_s"
    assert set(wanted.split()) | {"responses", "workers", "policy_version"} <= set(data)
    assert data["eval_after"] - data["eval_before"] == pytest.approx(0.14)
    assert data["eval"]["after"]["format_rate"] == 1.0
    assert set(data["breakdown_s"]) == {"generate", "reward", "learn", "sync", "other"}
    assert sum(data["breakdown_s"].values()) == data["wall_s"] == 200.0


def test_an_accuracy_of_zero_is_not_null() -> None:
    """Catches truth tests on numbers: a model that starts at 0.0 was evaluated; one without eval was not."""
    zero = EvalResult(
        accuracy=0.0, format_rate=0.0, accuracy_any_format=0.5, reward=0.0, num_prompts=200, mean_tokens=1.0
    )
    assert summary(eval_before=zero).to_json()["eval_before"] == 0.0
    none = summary(eval_before=None, eval_after=None, eval_stderr=None).to_json()
    assert none["eval_before"] is none["eval_after"] is none["eval"]["before"] is None


def test_summary_in_a_file_is_plain_and_paths_stay_whole() -> None:
    """Catches colour codes in a pipe, a table cut at 80 columns, and paths broken over two lines."""
    console = Console(file=StringIO(), _environ={})
    print_summary(summary(), console)
    output = text_of(console)
    assert "\x1b" not in output
    assert "0.110 -> 0.250  (+0.140, standard error 0.030)" in output
    assert "100.0 s   50%" in output
    assert "0:03:20" in output
    assert any("worker-1" in line and "31.0 s" in line for line in output.splitlines())
    table = [line for line in output.splitlines() if "/data" not in line]
    assert max(map(len, table)) <= 100
    assert "policy  /data/" + "long/" * 40 + "policy\n" in output
    assert output.endswith("log     /data/run.log\n")


def test_summary_without_eval_or_steps_still_prints() -> None:
    """Catches a crash in the very last line of a run that was stopped early or had evaluation off."""
    console = terminal()
    empty = dict.fromkeys(["generate", "reward", "learn", "sync", "other"], 0.0)
    bare = summary(
        completed=True,
        eval_before=None,
        eval_after=None,
        eval_stderr=None,
        reward_first5=None,
        reward_last5=None,
        breakdown_s=empty,
        idle_s={},
        files={},
    )
    print_summary(bare, console)
    assert "eval accuracy" not in text_of(console)
    assert "wall time" in text_of(console)
