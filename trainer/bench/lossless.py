"""Shows on this machine that drafting does not change what is generated: ``tlt doctor --lossless``.

Three checks, each of an engine that drafts against one that does not:

- tokens at temperature 0 are the same, with a fixed number of drafts and with the policy's;
- sampled tokens have the same distribution (two-sample chi-square at several positions, Holm-corrected);
- log-probabilities that come with drafted tokens are those of the model.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from statistics import fmean
from typing import Any

from rollout.bench_engine import EngineHandle, bench_engines
from rollout.engine import EngineSpec, Generated
from rollout.placement import ray_session
from tlt.config.bench_schema import BenchConfig
from trainer.bench.homogeneity import Comparison, compare, holm
from trainer.bench.workload import Workload, load_workload

logger = logging.getLogger(__name__)

ALPHA = 0.01
_POSITIONS = (1, 2, 4, 7)
"""Token positions that are compared, from 0. Position 0 comes from the prefill, where nothing is drafted."""
_TOKENS = 8
_TIE = 0.05
"""Nats. A token that differs from the baseline's is a tie if the two are this close: bfloat16 logits of a batch of
drafts and of a single token differ by rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LosslessReport:
    """Outcome of all checks."""

    token_identical: bool
    """Every greedy response is the baseline's, up to ties within rounding."""
    num_ties: int
    """Responses that leave the baseline at a tie."""
    p_values: tuple[float, ...]
    """Holm-corrected."""
    power_for_5pct: float
    """Least power over the positions that could show a difference at all."""
    logprob_error: float
    """Mean absolute difference to a recompute, nats."""
    acceptance_length: float

    @property
    def passed(self) -> bool:
        """Whether every check did."""
        return (
            self.token_identical
            and min(self.p_values) > ALPHA
            and self.power_for_5pct > 0.8
            and self.logprob_error < 0.02
            and self.acceptance_length > 1.0
        )

    def to_json(self) -> dict[str, Any]:
        """For the JSON line."""
        return {
            "passed": self.passed,
            "token_identical": self.token_identical,
            "num_ties": self.num_ties,
            "p_values": list(self.p_values),
            "power_for_5pct": self.power_for_5pct,
            "logprob_error_nats": self.logprob_error,
            "acceptance_length": self.acceptance_length,
        }


def check_lossless(config: BenchConfig, *, num_samples: int = 6000, num_greedy: int = 24) -> LosslessReport:
    """Run the checks; minutes on a CPU."""
    workload = load_workload(config)
    with ray_session(), bench_engines([workload.plain, *_drafting(workload)]) as (plain, *drafting):
        greedy = [_compare_greedy(workload, plain, engine, num_greedy) for engine in drafting]
        logger.info("greedy responses compared")
        baseline = _sample(workload, plain, None, num_samples)
        comparisons: list[Comparison] = []
        tests = len(drafting) * len(_POSITIONS)
        for engine in drafting:
            tokens = _sample(workload, engine, config.draft.max_draft_tokens, num_samples)
            for position in _POSITIONS:
                pair = (_at(baseline, position), _at(tokens, position))
                comparisons.append(compare(*pair, alpha=ALPHA / tests))
            logger.info("%d sampled responses compared", num_samples)
        error = fmean(_logprob_error(workload, engine) for engine in drafting)
        length = drafting[0].spec_totals().acceptance_length
    able = [comparison.power for comparison in comparisons if comparison.power > 0.0]
    return LosslessReport(
        token_identical=all(identical for identical, _ in greedy),
        num_ties=sum(ties for _, ties in greedy),
        p_values=tuple(holm([comparison.p_value for comparison in comparisons])),
        power_for_5pct=min(able, default=0.0),
        logprob_error=error,
        acceptance_length=length or 1.0,
    )


def _drafting(workload: Workload) -> list[EngineSpec]:
    """The configured engine; with a head also the other way of picking drafts."""
    draft = workload.config.draft
    if draft.kind != "eagle3":
        return [workload.drafting]
    return [
        workload.spec(draft.model_copy(update={"draft_sample_method": method}), draft_path=workload.draft_path)
        for method in ("greedy", "probabilistic")
    ]


def _compare_greedy(workload: Workload, plain: EngineHandle, drafting: EngineHandle, batch: int) -> tuple[bool, int]:
    requests = workload.requests(batch, turn=0, max_tokens=workload.config.bench.num_tokens, temperature=0.0)
    expected = plain.generate(requests)
    identical, ties = True, 0
    for k in (1, workload.config.draft.max_draft_tokens, None):
        for want, got in zip(expected, drafting.generate(requests, k), strict=True):
            if want.token_ids == got.token_ids:
                continue
            tie = _is_tie(want, got)
            ties += tie
            identical &= tie
    return identical, ties


def _is_tie(want: Generated, got: Generated) -> bool:
    """Whether the first difference is between two tokens that the model finds equally good."""
    pairs = zip(want.token_ids, got.token_ids, want.logprobs, got.logprobs, strict=False)
    first = next(((a, b) for token, other, a, b in pairs if token != other), None)
    return first is not None and abs(first[0] - first[1]) < _TIE


def _sample(workload: Workload, engine: EngineHandle, k: int | None, num_samples: int) -> list[Generated]:
    """Responses to one prompt, in batches as large as the engine takes."""
    template = workload.requests(1, turn=1, max_tokens=[_TOKENS])[0]
    most = workload.config.rollout.max_num_seqs
    responses: list[Generated] = []
    numbers = count()
    while len(responses) < num_samples:
        batch = min(most, num_samples - len(responses))
        responses += engine.generate([replace(template, request_id=f"sample-{next(numbers)}") for _ in range(batch)], k)
    return responses


def _at(responses: Sequence[Generated], position: int) -> list[int]:
    return [response.token_ids[position] for response in responses]


def _logprob_error(workload: Workload, engine: EngineHandle) -> float:
    """Against the engine's own scoring of the finished text, without drafts. At the temperature 1 that it scores."""
    requests = workload.requests(8, turn=2, max_tokens=32, temperature=1.0)
    errors = []
    for request, response in zip(
        requests, engine.generate(requests, workload.config.draft.max_draft_tokens), strict=True
    ):
        scored = engine.score([*request.prompt_token_ids, *response.token_ids])[-len(response.token_ids) :]
        errors += [abs(a - b) for a, b in zip(scored, response.logprobs, strict=True)]
    return fmean(errors)
