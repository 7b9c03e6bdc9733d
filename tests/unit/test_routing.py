"""Router and length history: who gets what, and that nothing is lost or answered twice."""

from __future__ import annotations

import random

import pytest

from tlt.routing import LengthHistory, Router
from tlt.types import FinishReason, Response, RolloutRequest, SamplingSpec


def request(name: str, *, key: str | None = None, prompt_length: int = 4) -> RolloutRequest:
    return RolloutRequest(
        request_id=name,
        prompt_key=key or name,
        prompt_token_ids=tuple(range(prompt_length)),
        sampling=SamplingSpec(max_tokens=64),
    )


def response(name: str, worker: int, *, num_tokens: int = 1) -> Response:
    return Response(
        request_id=name,
        prompt_key=name,
        token_ids=(0,) * num_tokens,
        logprobs=(0.0,) * num_tokens,
        finish_reason=FinishReason.STOP,
        policy_version=0,
        worker=worker,
        generate_s=0.0,
    )


def ids(router_assignments: list, worker: int) -> list[str]:  # type: ignore[type-arg]
    return [r.request_id for a in router_assignments if a.worker == worker for r in a.requests]


def test_longest_expected_goes_first_and_load_stays_even() -> None:
    """Catches a queue in submission order, and a first worker that takes everything while others idle."""
    history = LengthHistory()
    requests = [request("short", prompt_length=1), request("long", prompt_length=9), request("mid", prompt_length=5)]
    router = Router(requests, history, capacity=8)
    assignments = router.assign([0, 1])
    assert ids(assignments, 0) == ["long", "short"]
    assert ids(assignments, 1) == ["mid"]


def test_capacity_holds_back_the_rest() -> None:
    """Catches handing out more than a worker has room for, which would undo the on-demand order."""
    router = Router([request(f"r{i}") for i in range(5)], LengthHistory(), capacity=2)
    assert sum(len(a.requests) for a in router.assign([0, 1])) == 4
    assert router.assign([0, 1]) == []
    first = min(router.held(0))
    assert router.record(response(first, worker=0))
    assert len(ids(router.assign([0, 1]), 0)) == 1


def test_history_beats_prompt_length_and_scales_unknown_prompts() -> None:
    """Hand-computed: one 4-token prompt answered with 40 tokens makes an unseen 5-token prompt count 50."""
    history = LengthHistory(smoothing=0.5)
    history.record(request("a"), 40)
    assert history.expected_length(request("a")) == 40
    assert history.expected_length(request("b", prompt_length=5)) == 50
    history.record(request("a"), 20)
    assert history.expected_length(request("a")) == 30


def test_a_lost_workers_requests_go_out_again_and_late_answers_are_refused() -> None:
    """Catches a request answered twice: by the worker that was given up, then by its replacement."""
    router = Router([request("a"), request("b")], LengthHistory(), capacity=1)
    router.assign([0, 1])
    [lost] = router.release(0)
    assert not router.record(response(lost, worker=0))
    other = next(iter(router.held(1)))
    assert router.record(response(other, worker=1))
    assert ids(router.assign([1]), 1) == [lost]
    assert router.record(response(lost, worker=1))
    assert router.done
    assert [r.request_id for r in router.responses()] == ["a", "b"]


@pytest.mark.parametrize("seed", range(20))
def test_everything_comes_back_exactly_once_under_random_loss(seed: int) -> None:
    """Invariant over random interleavings of answers and losses: each request has one response, in order."""
    rng = random.Random(seed)
    requests = [request(f"r{i}", prompt_length=rng.randint(1, 9)) for i in range(40)]
    router = Router(requests, LengthHistory(), capacity=3)
    answered: list[str] = []
    while not router.done:
        router.assign(range(3))
        worker = rng.randrange(3)
        if rng.random() < 0.2:
            router.release(worker)
        elif held := sorted(router.held(worker)):
            chosen = rng.choice(held)
            assert router.record(response(chosen, worker=worker))
            answered.append(chosen)
    assert sorted(answered) == sorted(r.request_id for r in requests)
    assert [r.request_id for r in router.responses()] == [r.request_id for r in requests]


def test_repeated_ids_are_refused() -> None:
    """Catches two requests sharing an id, of which one would silently get the other's response."""
    with pytest.raises(ValueError, match="request ids repeat"):
        Router([request("a"), request("a")], LengthHistory(), capacity=1)
