"""A rollout source without engines: answers from a script and writes down what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tlt.types import FinishReason, Response, RolloutRequest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripted:
    """What the source answers to one request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason = FinishReason.STOP


Script = Callable[[int, RolloutRequest], Scripted]
"""Position of a request in its batch, and the request -> answer."""


class ScriptedSource:
    """Implements ``trainer.trl_adapter.RolloutSource``."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.events: list[str] = []
        """"sync" and "generate", in the order of the calls."""
        self.batches: list[list[RolloutRequest]] = []
        self.states: list[dict[str, torch.Tensor]] = []
        """Copies of the weights of each sync."""

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Response]:
        """Answer as the script says, with the version of the last sync."""
        self.events.append("generate")
        self.batches.append(list(requests))
        responses = []
        for index, request in enumerate(requests):
            answer = self._script(index, request)
            responses.append(
                Response(
                    request_id=request.request_id,
                    prompt_key=request.prompt_key,
                    token_ids=answer.token_ids,
                    logprobs=answer.logprobs,
                    finish_reason=answer.finish_reason,
                    policy_version=len(self.states),
                    worker=index % 2,
                    generate_s=0.5 + index,
                )
            )
        return responses

    def sync_weights(self, state: Mapping[str, torch.Tensor]) -> int:
        """Keep a copy of ``state``; its number is the policy version."""
        self.events.append("sync")
        self.states.append({name: tensor.detach().clone() for name, tensor in state.items()})
        return len(self.states)
