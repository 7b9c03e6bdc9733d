"""Training a head in bounded pieces: one micro-step is one forward, backward and update on one packed batch."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from tlt.draft.acceptance import ServedAcceptance
from tlt.draft.data import PackedBatch
from tlt.draft.loss import FrozenTarget, ttt_loss
from tlt.draft.model import Eagle3Head
from tlt.errors import DraftTrainingError


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTrainSettings:
    """Optimizer and objective."""

    num_ttt_steps: int = 5
    step_decay: float = 0.8
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 20
    total_steps: int = 500
    """Length of the cosine schedule; later steps keep its last learning rate."""
    min_learning_rate_share: float = 0.05
    bf16: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStep:
    """What one micro-step did."""

    loss: float
    num_tokens: int
    seconds: float
    acceptance: ServedAcceptance
    """Of the head before the update, on the batch that it was trained on."""


class DraftTrainer:
    """AdamW on float32 weights with a cosine schedule. Interruptible between micro-steps, never inside one."""

    def __init__(self, head: Eagle3Head, target: FrozenTarget, settings: DraftTrainSettings) -> None:
        self._head = head
        self._target = target
        self._settings = settings
        self._optimizer = torch.optim.AdamW(
            head.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, betas=(0.9, 0.95)
        )
        self._num_steps = 0

    @property
    def num_steps(self) -> int:
        """Updates so far, over all sessions."""
        return self._num_steps

    def micro_step(self, batch: PackedBatch) -> MicroStep:
        """One update.

        Raises:
            DraftTrainingError: loss or gradient is not finite. Weights and optimizer are as before the step.
        """
        begin, settings = time.perf_counter(), self._settings
        with torch.autocast(batch.token_ids.device.type, torch.bfloat16, enabled=settings.bf16):
            result = ttt_loss(
                self._head, self._target, batch, num_steps=settings.num_ttt_steps, step_decay=settings.step_decay
            )
        if result.loss.requires_grad:
            result.loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self._head.parameters(), settings.max_grad_norm)
            if not (torch.isfinite(result.loss) and torch.isfinite(norm)):
                self._optimizer.zero_grad()
                raise DraftTrainingError(
                    f"drafter training diverged at step {self._num_steps}: loss {result.loss.item()}, gradient norm "
                    f"{norm.item()}; lower the learning rate ({settings.learning_rate}), or look for bad hidden states"
                )
            for group in self._optimizer.param_groups:
                group["lr"] = self._learning_rate()
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._num_steps += 1
        return MicroStep(
            loss=result.loss.item(),
            num_tokens=batch.num_tokens,
            seconds=time.perf_counter() - begin,
            acceptance=ServedAcceptance(num_chains=result.num_chains, num_accepted=result.num_accepted),
        )

    def state_dict(self) -> dict[str, Any]:
        """Head, optimizer and place in the schedule."""
        return {
            "head": self._head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "num_steps": self._num_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where :meth:`state_dict` was taken."""
        self._head.load_state_dict(state["head"])
        # The optimizer keeps the tensors that it is given: without a copy, it and the one that the state was taken from
        # would go on to update the same moments.
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self._num_steps = state["num_steps"]

    def _learning_rate(self) -> float:
        settings, step = self._settings, self._num_steps
        if step < settings.warmup_steps:
            return settings.learning_rate * (step + 1) / settings.warmup_steps
        done = (step - settings.warmup_steps) / max(settings.total_steps - settings.warmup_steps, 1)
        low = settings.min_learning_rate_share
        return settings.learning_rate * (low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0))))
