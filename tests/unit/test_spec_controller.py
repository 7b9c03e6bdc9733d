"""Steps are booked to the right choice, and counts add up."""

from __future__ import annotations

import pytest

from rollout.spec_controller import DraftClock, SpecController
from tlt.spec.attribution import VerifiedStep
from tlt.spec.totals import SpecTotals


class Recorder:
    """A policy that asks for scripted numbers and keeps what it is told."""

    def __init__(self, choices: list[int]) -> None:
        self.choices = choices
        self.observed: list[VerifiedStep] = []

    def choose(self, batch: int) -> int:
        return self.choices.pop(0)

    def observe(self, step: VerifiedStep) -> None:
        self.observed.append(step)


def step(
    controller: SpecController,
    clock: DraftClock,
    at: tuple[float, float],
    draft_s: float,
    emitted: list[tuple[int, int]],
    *,
    prefill: bool = False,
) -> int:
    k = controller.begin_step(at[0], batch=len(emitted), has_prefill=prefill)
    clock.seconds = draft_s
    controller.end_step(at[1], emitted=emitted)
    return k


def test_a_choice_is_rewarded_with_the_step_that_verifies_it() -> None:
    """Hand-computed. Catches a reward that mixes the drafting of one choice with the verification of another."""
    clock, policy = DraftClock(), Recorder([3, 2, 0])
    controller = SpecController(policy, clock, 3)
    step(controller, clock, (0.0, 1.0), 0.5, [(0, 1), (0, 1)], prefill=True)
    step(controller, clock, (1.0, 1.5), 0.1, [(3, 2), (3, 4)])
    assert policy.observed == [], "the first step held prefill, so nothing is known of its choice"
    step(controller, clock, (1.5, 1.9), 0.0, [(2, 3)])
    (seen,) = policy.observed
    assert (seen.batch, seen.k, seen.num_tokens) == (1, 2, 3)
    assert seen.draft_s == pytest.approx(0.1)
    assert seen.verify_s == pytest.approx(0.4)
    assert (seen.num_drafted, seen.num_accepted) == ((1, 1), (1, 1))


def test_forgotten_steps_and_forced_choices_teach_nothing() -> None:
    """Catches a policy that learns from the step across a swap, or from a measurement's choices."""
    clock, policy = DraftClock(), Recorder([1, 1, 1])
    controller = SpecController(policy, clock, 1)
    step(controller, clock, (0.0, 1.0), 0.1, [(0, 1)])
    controller.forget_step()
    step(controller, clock, (1.0, 2.0), 0.1, [(1, 2)])
    controller.forced = 0
    assert step(controller, clock, (2.0, 3.0), 0.0, [(1, 1)]) == 0
    assert policy.observed == []


def test_totals_count_positions_and_choices() -> None:
    """Hand-computed. Catches acceptance that counts the token behind the drafts as a draft."""
    clock = DraftClock()
    controller = SpecController(Recorder([2, 2, 0]), clock, 2)
    step(controller, clock, (0.0, 1.0), 0.25, [(0, 1), (0, 1)])
    before = controller.totals
    step(controller, clock, (1.0, 2.0), 0.25, [(2, 3), (2, 1)])
    step(controller, clock, (2.0, 3.0), 0.0, [(2, 2), (1, 2)])
    spent = controller.totals - before
    assert (spent.num_drafted, spent.num_accepted) == ((4, 3), (3, 1))
    assert spent.acceptance_length == pytest.approx(2.0)
    assert spent.steps_by_k == {0: 1, 2: 1}
    assert (spent.draft_s, spent.verify_s) == (pytest.approx(0.25), pytest.approx(1.75))
    metrics = (spent + spent).metrics()
    assert metrics["spec/acceptance_pos2"] == pytest.approx(1 / 3)
    assert metrics["spec/mean_k"] == pytest.approx(1.0)
    assert SpecTotals().acceptance_length is None


def test_a_collapse_switches_drafting_off_for_that_version(caplog: pytest.LogCaptureFixture) -> None:
    """Catches acceptance that falls to 1.0 after a change, while outputs stay right and nobody notices."""
    clock = DraftClock()
    controller = SpecController(Recorder([2] * 60), clock, 2)
    controller.watchdog.expect("a swap", 3, (0.7, 0.5))
    chosen = [step(controller, clock, (float(t), t + 0.5), 0.1, [(2, 1)] * 8) for t in range(30)]
    assert chosen == [2] * 25 + [0] * 5  # 25 steps of 8 verifications are the 200 that the verdict needs
    assert controller.totals.num_collapses == 1
    assert "version 3: acceptance length 1.00 where 2.20 was expected, after a swap" in caplog.text
    controller.watchdog.expect("a swap", 4, (0.7, 0.5))
    assert step(controller, clock, (40.0, 41.0), 0.1, [(2, 3)]) == 2
