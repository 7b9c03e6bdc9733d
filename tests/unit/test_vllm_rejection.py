"""Our verification of drafts draws from exactly the distribution that it should, whatever was drafted."""

from __future__ import annotations

import math

import pytest
import torch

pytestmark = pytest.mark.vllm

VOCAB = 300
"""More than one chunk of the search, and no multiple of it."""


def target_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3.0


def verify_many(logits: torch.Tensor, drafts: list[int], *, n: int, **given: object) -> torch.Tensor:
    """``n`` identical requests with these drafts; emitted tokens ``[n, len(drafts) + 1]``."""
    from rollout.vllm_rejection import verify

    arguments: dict = {  # type: ignore[type-arg]
        "draft_probs": None,
        "temperature": torch.ones(n),
        "top_k": None,
        "top_p": None,
        "generators": {},
        "width": len(drafts) + 1,
    }
    verdict = verify(
        logits=logits.repeat(n, 1),
        counts=torch.full((n,), len(drafts)),
        draft_token_ids=torch.tensor(drafts * n),
        **(arguments | given),
    )
    return verdict.token_ids


def assert_same_distribution(tokens: torch.Tensor, probs: torch.Tensor) -> None:
    """Chi-square at p > 1e-4, cells of expectation under 10 pooled; Wilson-Hilferty for the quantile."""
    expected = probs.double() * tokens.numel()
    counts = torch.bincount(tokens, minlength=probs.numel()).double()
    large = expected >= 10
    observed = torch.cat([counts[large], counts[~large].sum().view(1)])
    expectation = torch.cat([expected[large], expected[~large].sum().view(1)])
    statistic = ((observed - expectation) ** 2 / expectation.clamp(min=1e-9)).sum().item()
    freedom = observed.numel() - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < bound, f"chi-square {statistic:.1f} above {bound:.1f} at {freedom} degrees of freedom"


@pytest.mark.parametrize("rank", [0, 1, 50])
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_the_first_token_has_the_targets_distribution_whatever_is_drafted(rank: int, temperature: float) -> None:
    """Catches a recovered token that is drawn from p instead of max(p - q, 0), and a temperature that is ignored."""
    torch.manual_seed(rank)
    logits = target_logits(2)
    draft = int(logits[0].argsort(descending=True)[rank])
    n = 5_000
    tokens = verify_many(logits, [draft], n=n, temperature=torch.full((n,), temperature))
    assert_same_distribution(tokens[:, 0], (logits[0] / temperature).softmax(-1))
    after = tokens[tokens[:, 1] >= 0]
    assert (after[:, 0] == draft).all()
    if len(after) > 1000:
        assert_same_distribution(after[:, 1], (logits[1] / temperature).softmax(-1))


def test_drafts_drawn_from_a_distribution_leave_the_target_unchanged() -> None:
    """Catches an acceptance test that forgets q: random drafts would be accepted too rarely, and p be distorted."""
    torch.manual_seed(1)
    n, logits, q = 5_000, target_logits(2), target_logits(1, seed=9).softmax(-1)
    drafts = torch.multinomial(q[0], n, replacement=True)
    from rollout.vllm_rejection import verify

    verdict = verify(
        logits=logits.repeat(n, 1),
        counts=torch.ones(n, dtype=torch.long),
        draft_token_ids=drafts,
        draft_probs=q.repeat(n, 1),
        temperature=torch.ones(n),
        top_k=None,
        top_p=None,
        generators={},
        width=2,
    )
    assert_same_distribution(verdict.token_ids[:, 0], logits[0].softmax(-1))


def test_top_k_and_top_p_cut_the_support() -> None:
    """Catches filters that reach only the bonus token, or rows of another request."""
    torch.manual_seed(2)
    n, logits = 4_000, target_logits(2)
    order = logits[0].argsort(descending=True)
    tokens = verify_many(logits, [int(order[5])], n=n, top_k=torch.full((n,), 3))
    assert set(tokens[:, 0].tolist()) <= set(order[:3].tolist())
    kept = int((logits[0].softmax(-1)[order].cumsum(0) < 0.6).sum()) + 1
    tokens = verify_many(logits, [int(order[0])], n=n, top_p=torch.full((n,), 0.6))
    assert set(tokens[:, 0].tolist()) <= set(order[:kept].tolist())


def test_uneven_requests_keep_their_own_rows() -> None:
    """Greedy and hand-built. Catches row offsets that are wrong when requests have 0, 2 and 1 drafts."""
    from rollout.vllm_rejection import verify

    logits = torch.full((6, VOCAB), -5.0)
    for row, token in enumerate([7, 11, 12, 13, 21, 22]):
        logits[row, token] = 5.0
    verdict = verify(
        logits=logits,
        counts=torch.tensor([0, 2, 1]),
        draft_token_ids=torch.tensor([11, 99, 21]),
        draft_probs=None,
        temperature=None,
        top_k=None,
        top_p=None,
        generators={},
        width=3,
    )
    assert verdict.token_ids.tolist() == [[7, -1, -1], [11, 12, -1], [21, 22, -1]]
    expected = torch.log_softmax(logits, -1)
    assert verdict.logprobs[1, 0].item() == pytest.approx(expected[1, 11].item())
    assert verdict.logprobs[2, 1].item() == pytest.approx(expected[5, 22].item())


def test_a_seed_decides_whatever_else_is_in_the_batch() -> None:
    """Catches random numbers whose use depends on the other requests of the batch."""
    from rollout.vllm_rejection import verify

    logits = target_logits(2)
    draft = int(logits[0].argmax())
    alone = verify(
        logits=logits,
        counts=torch.tensor([1]),
        draft_token_ids=torch.tensor([draft]),
        draft_probs=None,
        temperature=torch.ones(1),
        top_k=None,
        top_p=None,
        generators={0: torch.Generator().manual_seed(5)},
        width=2,
    )
    other = target_logits(4, seed=3)
    together = verify(
        logits=torch.cat([other, logits]),
        counts=torch.tensor([3, 1]),
        draft_token_ids=torch.tensor([1, 2, 3, draft]),
        draft_probs=None,
        temperature=torch.ones(2),
        top_k=None,
        top_p=None,
        generators={1: torch.Generator().manual_seed(5)},
        width=4,
    )
    assert together.token_ids[1, :2].tolist() == alone.token_ids[0].tolist()


def test_drawing_never_picks_a_token_of_weight_zero() -> None:
    """Catches the edges of the search: the first and last index, and a whole chunk of zeros."""
    from rollout.vllm_rejection import draw

    weights = torch.zeros(4, VOCAB)
    weights[0, 0] = weights[1, VOCAB - 1] = weights[2, 270] = 1.0
    weights[3, [3, 290]] = torch.tensor([0.25, 0.75])
    for uniform in (0.0, 0.2499999, 0.25, 0.5, 1.0 - 2**-53):
        drawn = draw(weights, torch.full((4,), uniform, dtype=torch.float64)).tolist()
        assert drawn[:3] == [0, VOCAB - 1, 270]
        assert drawn[3] == (3 if uniform < 0.25 else 290)


def test_the_cpu_bug_that_loses_temperatures_is_repaired() -> None:
    """Catches vLLM's CPU stand-in for ``expand_kernel``, which fills a copy of its output (see vllm_compat)."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    from rollout.vllm_compat import expand_is_broken, repair_expand

    if not current_platform.is_cpu():
        pytest.skip("the stand-in is the CPU backend's")
    current_platform.register_triton_kernel_overrides()  # as vLLM's worker does when it starts
    repair_expand()
    assert not expand_is_broken()
    expanded = rejection_sampler.expand_batch_to_tokens(
        torch.tensor([0.0, 0.7]), torch.tensor([1, 3]), 3, replace_from=0, replace_to=1
    )
    assert expanded.tolist() == pytest.approx([1.0, 0.7, 0.7])
