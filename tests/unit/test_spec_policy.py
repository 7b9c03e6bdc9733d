"""The policy finds the best number of draft tokens on machines where that is known, and costs next to nothing."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from statistics import median

import pytest

from tests.spec_machines import ARMS, Machine, calibrated, long_tail, play, random_machine
from tlt.errors import ConfigError
from tlt.spec.acceptance import AcceptancePrior, AcceptanceStats, geometric_rate
from tlt.spec.attribution import VerifiedStep
from tlt.spec.buckets import bucket_name, bucket_of
from tlt.spec.policy import SpecPolicy, SpecPolicySettings
from tlt.spec.step_time import StepSample, StepTimeModel
from tlt.spec.store import PolicyStore
from tlt.spec.watchdog import AcceptanceWatchdog, Verdict

MACHINES = range(20)
WORKLOADS = {"tail": long_tail, "one": lambda step: 1, "eight": lambda step: 8, "full": lambda step: 32}


def make_policy(machine: Machine, seed: int, *, calibrate: bool = True) -> SpecPolicy:
    model = calibrated(machine, seed) if calibrate else None
    return SpecPolicy(SpecPolicySettings(), model, random.Random(seed))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_regret_stays_under_three_percent_on_twenty_machines(workload: str) -> None:
    """Catches a policy that settles on a poor arm, explores too much, or credits a step's tokens to another arm."""
    for seed in MACHINES:
        machine = random_machine(seed)
        policy, rng = make_policy(machine, seed), random.Random(1000 + seed)
        spent, best, _ = play(machine, policy, WORKLOADS[workload], range(500), rng)
        assert spent / best < 1.03, f"machine {seed}: {spent / best:.3f}"


@pytest.mark.parametrize("workload", ["tail", "one"])
def test_regret_without_calibration_is_small_once_arms_were_tried(workload: str) -> None:
    """Catches a policy that needs calibration to work: after its first 100 steps it may lose no more than 5 %."""
    for seed in MACHINES:
        machine = random_machine(seed)
        policy, rng = make_policy(machine, seed, calibrate=False), random.Random(1000 + seed)
        play(machine, policy, WORKLOADS[workload], range(100), rng)
        spent, best, _ = play(machine, policy, WORKLOADS[workload], range(100, 500), rng)
        assert spent / best < 1.05, f"machine {seed}: {spent / best:.3f}"


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_a_useless_drafter_costs_at_most_three_percent(batch: int) -> None:
    """Catches exploration that goes on paying for a drafter whose drafts are never accepted."""
    for seed in MACHINES:
        machine = random_machine(seed, useless=True)
        policy, rng = make_policy(machine, seed), random.Random(seed)
        play(machine, policy, lambda step: batch, range(200), rng)
        spent, best, _ = play(machine, policy, lambda step: batch, range(200, 1200), rng)
        assert spent / best < 1.03, f"machine {seed}: {spent / best:.3f}"


def test_a_better_drafter_is_used_at_once() -> None:
    """Catches statistics of the old drafter that keep a good new one switched off."""
    machine = random_machine(3)
    useless = Machine(times=machine.times, rates=(0.0,) * max(ARMS))
    good = Machine(times=machine.times, rates=(0.9,) * max(ARMS))
    policy, rng = make_policy(machine, 3), random.Random(0)
    _, _, before = play(useless, policy, lambda step: 1, range(300), rng)
    assert median(before[200:]) == 0
    policy.on_new_drafter(None)
    _, _, after = play(good, policy, lambda step: 1, range(60), rng)
    assert median(after[20:]) >= 5


def test_a_new_drafter_resets_acceptance_and_keeps_step_times() -> None:
    """Catches a reset that makes the policy learn the machine anew at every swap."""
    machine = random_machine(5)
    policy = make_policy(machine, 5)
    play(machine, policy, lambda step: 4, range(100), random.Random(1))
    times = json.dumps(policy.to_json())
    policy.on_new_drafter(2.5, k=3)
    assert json.dumps(policy.to_json()) == times
    assert policy.expected_tokens[3] == pytest.approx(2.5, abs=0.01)


def test_two_equal_arms_do_not_flap() -> None:
    """Catches missing hysteresis: noise would switch between arms of equal worth all the time."""
    times = StepTimeModel(
        base_s=0.01,
        per_request_s=0.0,
        per_draft_token_s=0.0,
        draft_fixed_s=0.0,
        draft_base_s=0.0,
        draft_per_request_s=0.0,
    )
    # The second draft is never accepted and costs nothing, so K=1, 2, 3, ... are worth the same.
    machine = Machine(times=times, rates=(0.7, *(0.0,) * 6))
    policy = SpecPolicy(SpecPolicySettings(explore=0.0, explore_when_off=0.0), times, random.Random(0))
    _, _, chosen = play(machine, policy, lambda step: 4, range(400), random.Random(2))
    settled = chosen[100:]
    assert sum(a != b for a, b in zip(settled, settled[1:], strict=False)) <= 6


def test_the_reward_belongs_to_the_arm_that_drafted() -> None:
    """Hand-computed: 2 requests, K=1 accepted by one. Catches tokens or times that are booked on another arm."""
    model = StepTimeModel(
        base_s=0.010,
        per_request_s=0.001,
        per_draft_token_s=0.0005,
        draft_fixed_s=0.0,
        draft_base_s=0.002,
        draft_per_request_s=0.0,
    )
    policy = SpecPolicy(SpecPolicySettings(arms=(0, 1)), model, random.Random(0))
    step = VerifiedStep(batch=2, k=1, num_tokens=3, draft_s=0.004, verify_s=0.026, num_drafted=(2,), num_accepted=(1,))
    policy.observe(step)
    # acceptance: (1 + 0.6 * 2) / (2 + 2) = 0.55; modelled 0.013 + 0.002 s, measured 0.030 s: a factor of 2, worth 1 of
    # 1 + 16 steps: 18 / 17
    assert policy.value(2, 1) == pytest.approx(2 * 1.55 / (0.015 * 18 / 17))
    assert policy.value(2, 0) == pytest.approx(2 / 0.012)


def test_choosing_and_learning_cost_under_fifty_microseconds() -> None:
    """Catches work per engine step that grows with the history."""
    machine = random_machine(1)
    policy, rng = make_policy(machine, 1), random.Random(0)
    steps = [machine.run_step(8, 3, rng) for _ in range(50)]
    costs = []
    for index in range(3000):
        begin = time.perf_counter()
        policy.choose(8)
        policy.observe(steps[index % len(steps)])
        costs.append(time.perf_counter() - begin)
    assert median(costs) < 50e-6


def test_state_survives_a_round_trip_and_a_broken_file_is_no_crash(tmp_path: Path) -> None:
    """Catches step times that are lost between runs, and a run that cannot start because of an old file."""
    machine = random_machine(2)
    policy = make_policy(machine, 2)
    play(machine, policy, lambda step: 4, range(50), random.Random(1))
    store = PolicyStore(tmp_path / "policy")
    assert store.load("model", "cpu") is None
    path = store.save(policy.to_json(), "model", "cpu")
    state = store.load("model", "cpu")
    assert state == json.loads(json.dumps(policy.to_json()))
    assert state is not None
    again = SpecPolicy.from_json(state, SpecPolicySettings(), random.Random(0))
    assert again.model == policy.model
    path.write_text("{not json")
    assert store.load("model", "cpu") is None


def test_the_fit_recovers_the_coefficients_of_clean_samples() -> None:
    """Catches swapped features and a negative coefficient."""
    true = StepTimeModel(
        base_s=0.01,
        per_request_s=0.001,
        per_draft_token_s=0.0003,
        draft_fixed_s=0.0005,
        draft_base_s=0.002,
        draft_per_request_s=0.0001,
    )
    samples = [
        StepSample(batch=batch, k=k, draft_s=true.draft_s(batch, k), verify_s=true.verify_s(batch, k))
        for batch in (1, 4, 16)
        for k in (0, 1, 3)
    ]
    fitted = StepTimeModel.fit(samples)
    for name, value in true.to_json().items():
        assert fitted.to_json()[name] == pytest.approx(value, rel=1e-2)
    with pytest.raises(ConfigError, match="at least one"):
        StepTimeModel.fit([])


def test_expected_tokens_follow_the_counts() -> None:
    """Hand-computed. Catches unconditional rates multiplied as if they were conditional."""
    stats = AcceptanceStats(3, prior=AcceptancePrior(rate=0.6, weight=2.0, chain_weight=2.0), memory=1e12)
    stats.observe((498, 498), (298, 148))
    # (298 + 1.2) / 500 = 0.5984; (148 + 2 * 0.5984) / 300 = 0.4973; the third takes the rate of the second
    tokens = [stats.expected_tokens(k) for k in range(4)]
    assert tokens == pytest.approx([1.0, 1.5984, 1.8960, 2.0440], abs=1e-3)
    assert geometric_rate(1.0 + 0.5 + 0.25, 2) == pytest.approx(0.5)


def test_buckets_are_the_powers_of_two() -> None:
    """Catches an off-by-one at the upper edge of a bucket."""
    assert [bucket_of(batch) for batch in (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33)] == [0, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
    assert [bucket_name(bucket) for bucket in range(5)] == ["1", "2", "3-4", "5-8", "9-16"]


def test_the_watchdog_reports_a_collapse_with_both_figures() -> None:
    """Hand-computed. Catches a silent fall to acceptance 1.0, and one that a new version inherits."""
    watchdog = AcceptanceWatchdog()
    assert watchdog.observe((10,), (5,)) is None
    watchdog.expect("swap", 1, (0.6, 0.3))
    check = watchdog.observe((100, 100), (20, 5))
    assert check is not None
    assert check.verdict is Verdict.PENDING
    check = watchdog.observe((100, 100), (20, 5))
    assert check is not None
    assert check.verdict is Verdict.COLLAPSED  # 0.25 accepted per verification, under 0.4 * 0.9
    assert check.expected == pytest.approx(1.9)
    assert check.measured == pytest.approx(1.25)
    watchdog.expect("weights", 1, (0.6, 0.3))
    assert watchdog.check().verdict is Verdict.COLLAPSED
    watchdog.expect("swap", 2, (0.6, 0.3))
    check = watchdog.observe((200, 200), (100, 40))
    assert check is not None
    assert check.verdict is Verdict.OK
