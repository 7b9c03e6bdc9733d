"""A simulated engine with a known best number of draft tokens, for tests of the policy. Seconds are simulated."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tlt.spec.attribution import VerifiedStep
from tlt.spec.policy import SpecPolicy
from tlt.spec.step_time import StepSample, StepTimeModel

ARMS = (0, 1, 2, 3, 5, 7)
Batches = Callable[[int], int]
"""Step number -> running batch."""


@dataclass(frozen=True)
class Machine:
    """True step times and acceptance; steps are 10 % noisy, and one in fifty takes five times as long."""

    times: StepTimeModel
    rates: tuple[float, ...]
    """Chance per position that a draft is accepted once those before it are."""

    def step_s(self, batch: int, k: int) -> float:
        return self.times.verify_s(batch, k) + self.times.draft_s(batch, k)

    def expected_tokens(self, k: int) -> float:
        tokens, survival = 1.0, 1.0
        for rate in self.rates[:k]:
            survival *= rate
            tokens += survival
        return tokens

    def tokens_per_s(self, batch: int, k: int) -> float:
        return batch * self.expected_tokens(k) / self.step_s(batch, k)

    def best(self, batch: int) -> int:
        return max(ARMS, key=lambda k: self.tokens_per_s(batch, k))

    def noise(self, rng: random.Random) -> float:
        return rng.gauss(1.0, 0.1) * (5.0 if rng.random() < 0.02 else 1.0)

    def run_step(self, batch: int, k: int, rng: random.Random) -> VerifiedStep:
        """The step that verifies k drafts of each request."""
        drafted, accepted = [batch] * k, [0] * k
        num_tokens = 0
        for _ in range(batch):
            num_tokens += 1
            for position in range(k):
                if rng.random() >= self.rates[position]:
                    break
                accepted[position] += 1
                num_tokens += 1
        return VerifiedStep(
            batch=batch,
            k=k,
            num_tokens=num_tokens,
            draft_s=self.times.draft_s(batch, k) * abs(self.noise(rng)),
            verify_s=self.times.verify_s(batch, k) * abs(self.noise(rng)),
            num_drafted=tuple(drafted),
            num_accepted=tuple(accepted),
        )


def random_machine(seed: int, *, useless: bool = False) -> Machine:
    """Constants between a small CPU (10 ms steps) and a large GPU; a drafter of random quality."""
    rng = random.Random(seed)
    base = 10 ** rng.uniform(-2.3, -1.5)
    first = rng.uniform(0.3, 0.9)
    return Machine(
        times=StepTimeModel(
            base_s=base,
            per_request_s=base * rng.uniform(0.01, 0.15),
            per_draft_token_s=base * rng.uniform(0.002, 0.12),
            draft_fixed_s=base * rng.uniform(0.0, 0.05),
            draft_base_s=base * rng.uniform(0.03, 0.15),
            draft_per_request_s=base * rng.uniform(0.0, 0.01),
        ),
        rates=tuple(0.0 if useless else first * rng.uniform(0.9, 1.0) ** position for position in range(max(ARMS))),
    )


def calibrated(machine: Machine, seed: int) -> StepTimeModel:
    """A model fitted to a short calibration of the machine."""
    rng = random.Random(seed)
    samples = []
    for batch in (1, 4, 16, 32):
        for k in (0, 1, 3, 7):
            for _ in range(9):
                step = machine.run_step(batch, k, rng)
                samples.append(StepSample(batch=batch, k=k, draft_s=step.draft_s, verify_s=step.verify_s))
    return StepTimeModel.fit(samples)


def long_tail(step: int) -> int:
    """32 running requests that finish one after the other, half of them in the first third of 500 steps."""
    return max(1, round(32 * 0.5 ** (step / 110)))


def play(
    machine: Machine, policy: SpecPolicy, batches: Batches, steps: range, rng: random.Random
) -> tuple[float, float, list[int]]:
    """Simulated seconds of the policy and of the best arm for the same tokens; and the arms chosen.

    Times are the noiseless ones of each choice: the policy sees noise, its judge does not.
    """
    spent = best = 0.0
    chosen = []
    for step in steps:
        batch = batches(step)
        k = policy.choose(batch)
        policy.observe(machine.run_step(batch, k, rng))
        expected = batch * machine.expected_tokens(k)
        spent += machine.step_s(batch, k)
        best += expected / machine.tokens_per_s(batch, machine.best(batch))
        chosen.append(k)
    return spent, best, chosen
