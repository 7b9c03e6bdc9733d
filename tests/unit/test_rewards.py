"""Rewards: the functions by hand, and the runner against functions that raise, hang, die or hold the GIL."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tlt.config.schema import RewardSection, RewardSpec
from tlt.errors import ConfigError
from trainer.data import PromptItem
from trainer.rewards import RewardRunner, boxed_answer, final_answer
from trainer.rewards.functions import Answer, load_function

USER_MODULE = '''
import os, re, signal, subprocess

kept = []

def behave(*, prompt, completion, answer, metadata):
    """Does what the completion says."""
    if completion == "raise":
        raise RuntimeError("as asked")
    if completion == "loop":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass
    if completion == "gil":  # a catastrophic regular expression: C code that never gives the GIL back
        re.match("(a+)+$", "a" * 64 + "b")
    if completion == "die":
        os._exit(3)
    if completion == "nan":
        return float("nan")
    if completion == "text":
        return "1.0"
    if completion == "pid":
        return os.getpid()
    return len(completion) + len(prompt) * 100 + metadata["bonus"] + float(answer)

def hold_pipe(*, prompt, completion, answer, metadata):
    """Holds a named pipe open for as long as this process lives, or (child) its child does."""
    kept.append(open(metadata["pipe"], "w"))
    kept[0].write("open\\n")
    kept[0].flush()
    if completion == "child":
        subprocess.run(["sleep", "600"], pass_fds=[kept[0].fileno()])
    if completion == "gil":
        re.match("(a+)+$", "a" * 64 + "b")
    return 0.0

def wrong_signature(completion, answer): return 0.0
async def coroutine(*, prompt, completion, answer, metadata): return 0.0
'''

DRIVER = """
import sys
from tlt.config.schema import RewardSection, RewardSpec
from trainer.data import PromptItem
from trainer.rewards import RewardRunner

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[3])
    spec = RewardSpec(kind="python", function="behaving:hold_pipe")
    item = PromptItem(key="", messages=(), token_ids=(), answer="", task=None, metadata={"pipe": sys.argv[1]})
    runner = RewardRunner(RewardSection(functions=(spec,), timeout_s=0.5))
    while True:
        runner.score([item], [sys.argv[2]])
        sys.stdin.read()
"""


def prompt_item(answer: str = "1", **metadata: object) -> PromptItem:
    return PromptItem(
        key="k",
        messages=({"role": "user", "content": "?"},),
        token_ids=(1,),
        answer=answer,
        task=None,
        metadata=metadata or {"bonus": 0.5},
    )


def score(kind: str, completion: str, reference: str) -> float:
    function = load_function(RewardSpec.model_validate({"kind": kind}), {})
    return function(Answer(prompt=(), completion=completion, reference=reference, task=None, metadata=None))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{58}.", "58"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed { 7 }", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\{}", r"\{"),
        (r"\boxed{\text{a \boxed{3}}}", "3"),
        (r"\boxed{}", ""),
        (r"\boxed{58", None),
        (r"\fbox{58} boxed{58}", None),
        ("", None),
    ],
)
def test_boxed_answer(text: str, expected: str | None) -> None:
    """Catches a regular expression that stops at the first closing brace, or takes the first box."""
    assert boxed_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{58}", 1.0),
        (r"\boxed{1} \boxed{1}", 0.0),
        (r"\boxed{1} \boxed{", 0.0),
        (r"\boxed{ }", 0.0),
        (r"\boxed{58", 0.0),
        ("58", 0.0),
    ],
)
def test_format(text: str, expected: float) -> None:
    """Catches a format reward that can be had with many boxes or an empty one."""
    assert score("format", text, "58") == expected


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        (r"it is \boxed{a  b}", "a b", 1.0),
        (" a\nb ", "a b", 1.0),
        (r"a b \boxed{c}", "a b", 0.0),
        ("the answer is a b", "a b", 0.0),
        (r"\boxed{ab}", "a b", 0.0),
    ],
)
def test_exact(text: str, reference: str, expected: float) -> None:
    """Catches a comparison that ignores the box, or joins words."""
    assert score("exact", text, reference) == expected


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        (r"26 + 32 = 58, so \boxed{58.0}", "58", 1.0),
        (r"58? No: \boxed{59}", "58", 0.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{1+x}", "x+1", 1.0),
        (r"\boxed{1000}", "1,000", 1.0),
        ("the sum is 58", "58", 1.0),
        ("no number here", "58", 0.0),
    ],
)
def test_math_verify(text: str, reference: str, expected: float) -> None:
    """Catches a reference that is not read as LaTeX, and a number before the box that counts."""
    assert score("math_verify", text, reference) == expected


@pytest.mark.parametrize("kind", ["math_verify", "exact"])
def test_no_reference_answer_is_an_error(kind: str) -> None:
    """Catches tasks without a single answer scoring 0 for ever, silently, or 1 for an empty box."""
    with pytest.raises(ValueError, match="no reference answer"):
        score(kind, r"\boxed{}", "")


def test_reasoning_gym_scorer_uses_the_box_and_the_parameters() -> None:
    """Catches a scorer that sees the whole response, or the task's default parameters."""
    function = load_function(
        RewardSpec(kind="reasoning_gym"),
        {"decimal_arithmetic": {"min_num_decimal_places": 1, "max_num_decimal_places": 1}},
    )

    def given(completion: str) -> float:
        prompt = ({"role": "user", "content": "1.5 + 1.5 = ?"},)
        return function(
            Answer(prompt=prompt, completion=completion, reference="3.0", task="decimal_arithmetic", metadata={})
        )

    assert given(r"\boxed{3.0}") == 1.0
    assert given(r"3.0 \boxed{4.0}") == 0.0
    assert given("3.0") == 0.0
    assert given(r"\boxed{3.04}") == 1.0  # one decimal place counts; with the default of three it would be wrong


@pytest.fixture(scope="module")
def user_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder, on the path, of a module ``behaving`` with the functions above."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "behaving.py").write_text(USER_MODULE)
    (folder / "broken.py").write_text("raise KeyError('oh no')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


BEHAVE = RewardSpec(kind="python", function="behaving:behave", weight=2.0)


@pytest.fixture(scope="module")
def runner(user_module: Path) -> Iterator[RewardRunner]:
    """Two functions, one process, half a second per answer."""
    section = RewardSection(functions=(RewardSpec(kind="format", weight=-0.5), BEHAVE), timeout_s=0.5)
    with RewardRunner(section) as started:
        yield started


def test_weighted_sum_and_order(runner: RewardRunner) -> None:
    """Catches scores given to the wrong answer or function, forgotten weights, lost arguments."""
    batch = runner.score([prompt_item("3"), prompt_item("4", bonus=0.25)], [r"\boxed{1}", "four"])
    # behave: 9 characters + 100 + 0.5 + 3 = 112.5; 4 + 100 + 0.25 + 4 = 108.25
    assert batch.by_function == {"format": (1.0, 0.0), "behaving:behave": (112.5, 108.25)}
    assert batch.total == (-0.5 + 225.0, 216.5)
    assert batch.errors == batch.timeouts == {"format": 0, "behaving:behave": 0}


def test_failures_are_counted_and_leave_others_alone(runner: RewardRunner) -> None:
    """Catches one bad answer that hangs the batch, loses its neighbours' scores, or is not counted.

    "loop" ignores SIGTERM, and "gil" also blocks every Python-level time-out, signal handlers included.
    """
    completions = ["ok", "raise", "loop", "x", "nan", "gil", "text", "die", "ok"]
    batch = runner.score([prompt_item()] * len(completions), completions)
    good = {0: 103.5, 3: 102.5, 8: 103.5}
    assert batch.by_function["behaving:behave"] == tuple(good.get(i, 0.0) for i in range(len(completions)))
    assert batch.errors == {"format": 0, "behaving:behave": 4}  # raise, nan, text, die
    assert batch.timeouts == {"format": 0, "behaving:behave": 2}  # loop, gil


def test_child_of_a_hanging_function_is_killed(user_module: Path, tmp_path: Path) -> None:
    """Catches programs, started by a scorer that timed out, that run on for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    spec = RewardSpec(kind="python", function="behaving:hold_pipe")
    with RewardRunner(RewardSection(functions=(spec,), timeout_s=0.5)) as runner:
        batch = runner.score([prompt_item(pipe=str(pipe))], ["child"])
    assert batch.timeouts == {"behaving:hold_pipe": 1}
    assert os.read(end, 100) == b"open\n"
    assert select.select([end], [], [], 10)[0], "the child is still there"
    assert os.read(end, 100) == b""
    os.close(end)


def test_processes_are_kept_and_ignore_ctrl_c(runner: RewardRunner) -> None:
    """Catches a process per batch (seconds of imports each), and a Ctrl-C that kills the scorers."""
    name = "behaving:behave"
    pid = runner.score([prompt_item()], ["pid"]).by_function[name][0]
    os.kill(int(pid), signal.SIGINT)
    assert runner.score([prompt_item()], ["pid"]).by_function[name][0] == pid


def test_death_between_batches_costs_nothing(runner: RewardRunner) -> None:
    """Catches an idle process, killed for memory, that breaks the runner or costs a score."""
    pid = int(runner.score([prompt_item()], ["pid"]).by_function["behaving:behave"][0])
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    batch = runner.score([prompt_item()], ["ok"])
    assert batch.by_function["behaving:behave"] == (103.5,)
    assert batch.errors["behaving:behave"] == 0


def test_cheap_answers_are_scored_quickly(runner: RewardRunner) -> None:
    """Catches a round trip per answer that costs milliseconds: 256 scores must take well under a second."""
    assert runner.score([prompt_item()] * 128, ["ok"] * 128).seconds < 1.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("behaving", "must be written package.module:function"),
        ("nowhere_to_be_found:score", "ModuleNotFoundError.*check the name"),
        ("broken:score", "KeyError: 'oh no'"),
        ("behaving:missing", "no plain function 'missing'"),
        ("behaving:coroutine", "no plain function 'coroutine'"),
        ("behaving:wrong_signature", "give it these four keyword arguments"),
    ],
)
def test_bad_user_function(user_module: Path, function: str, message: str) -> None:
    """Catches a mistake that would show only after the first rollout, as an all-zero reward."""
    with pytest.raises(ConfigError, match=message):
        load_function(RewardSpec(kind="python", function=function), {})


def test_runner_refuses_before_it_scores(user_module: Path) -> None:
    """Catches an import error that stays inside the process, and two functions whose metrics would mix."""
    with pytest.raises(ConfigError, match="KeyError: 'oh no'"):
        RewardRunner(RewardSection(functions=(RewardSpec(kind="python", function="broken:score"),)))
    with pytest.raises(ConfigError, match="'behaving:behave' is listed twice"):
        RewardRunner(RewardSection(functions=(BEHAVE, BEHAVE)))


@pytest.mark.parametrize("state", ["idle", "gil"])
def test_nothing_outlives_a_killed_driver(user_module: Path, tmp_path: Path, state: str) -> None:
    """Catches orphans: the pipe ends only when the scoring process is gone, though it held the GIL."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    driver = subprocess.Popen(
        [sys.executable, str(script), str(pipe), state, str(user_module)],
        stdin=subprocess.PIPE,
        env=environment,
    )
    with pipe.open() as end:
        assert end.readline() == "open\n"
        driver.kill()
        driver.communicate()
        assert select.select([end], [], [], 30)[0], "a scoring process is still there"
        assert end.read() == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{7}, not 8", "7"),
        ("Step 1: 6 + 7 = 13.\nThe final answer is 13.", "13"),
        ("The answer is $-4$.", "-4"),
        ("", ""),
    ],
)
def test_final_answer(text: str, expected: str) -> None:
    """Catches correctness without format that counts the full stop, or prefers a later number to the box."""
    assert final_answer(text) == expected
