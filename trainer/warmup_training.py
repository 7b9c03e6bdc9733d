"""The training loop of a warm-up: shuffled batches, acceptance on held-out responses, the best head is kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice

import torch

from tlt.config.draft_schema import HeadTrainSection
from tlt.draft.acceptance import ServedAcceptance, evaluate_acceptance
from tlt.draft.data import DraftSequence, PackedBatch, PackedRow, collate, pack
from tlt.draft.loss import FrozenTarget
from tlt.draft.model import Eagle3Head
from tlt.draft.trainer import DraftTrainer, DraftTrainSettings

logger = logging.getLogger(__name__)

REPORTED_LENGTHS = (1, 2, 3, 5)
"""Numbers of draft tokens that acceptance is reported for, whatever the length of the trained chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """How a training went; the head itself holds the best weights."""

    acceptance: ServedAcceptance
    """Of the head that is kept, on the held-out responses."""
    best_step: int
    num_steps: int
    num_tokens: int
    """In the batches trained on, prompts included."""
    losses: dict[int, float]
    """Mean since the measurement before, by step."""
    train_s: float
    eval_s: float

    @property
    def tokens_per_s(self) -> float:
        """Training alone, without measurements."""
        return self.num_tokens / self.train_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Best:
    acceptance: ServedAcceptance
    step: int
    weights: dict[str, torch.Tensor]


class Plateau:
    """Whether a figure has stopped growing, in view of its noise.

    Small steps add up: each measurement is compared with the last one that counted as progress, not with the last.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._reference: float | None = None
        self._num_flat = 0

    def observe(self, value: float, stderr: float) -> bool:
        """Take a measurement; True when ``patience`` of them in a row have brought no more than ``stderr``."""
        if self._reference is None or value > self._reference + stderr:
            self._reference, self._num_flat = value, 0
        else:
            self._num_flat += 1
        return self._num_flat >= self._patience


def train_head(
    head: Eagle3Head,
    target: FrozenTarget,
    train: Sequence[DraftSequence],
    held_out: Sequence[DraftSequence],
    section: HeadTrainSection,
    *,
    seed: int,
) -> Trained:
    """Train ``head`` in place; at the end it has the weights with the longest acceptance at ``num_ttt_steps``.

    Raises:
        DraftTrainingError: the loss or a gradient is not finite.
    """
    device, trainer = head.d2t.device, DraftTrainer(head, target, _settings(section))
    stream = shuffled_batches(pack(train, tokens_per_row=section.tokens_per_row), section.rows_per_step, seed=seed)
    measured = held_out_rows(held_out, section)
    depth = max(section.num_ttt_steps, *REPORTED_LENGTHS)
    plateau, best = Plateau(section.patience), None
    num_tokens, train_s, eval_s, step = 0, 0.0, 0.0, 0
    losses: dict[int, float] = {}
    while step < section.max_steps:
        begin = time.monotonic()
        num_steps = min(section.eval_every, section.max_steps - step)
        done = [trainer.micro_step(to_device(batch, device)) for batch in islice(stream, num_steps)]
        middle = time.monotonic()
        acceptance = ServedAcceptance()
        for rows in measured:
            batch = to_device(collate(rows), device)
            acceptance += evaluate_acceptance(head, target, [batch], num_steps=depth, bf16=section.bf16)
        end = time.monotonic()
        step += num_steps
        num_new_tokens = sum(micro.num_tokens for micro in done)
        num_tokens, train_s, eval_s = num_tokens + num_new_tokens, train_s + middle - begin, eval_s + end - middle
        losses[step] = sum(micro.loss for micro in done) / num_steps
        left_s = (train_s + eval_s) / step * (section.max_steps - step)
        _log(f"{step}/{section.max_steps}", losses[step], acceptance, num_new_tokens / (middle - begin), left_s)
        length = acceptance.acceptance_length(section.num_ttt_steps)
        if best is None or length > best.acceptance.acceptance_length(section.num_ttt_steps):
            weights = {name: value.detach().clone() for name, value in head.state_dict().items()}
            best = _Best(acceptance=acceptance, step=step, weights=weights)
        if plateau.observe(length, acceptance.stderr(section.num_ttt_steps)):
            logger.info("drafter: no longer improving; training ends after %d of %d steps", step, section.max_steps)
            break
    assert best is not None, "max_steps is positive"
    head.load_state_dict(best.weights)
    return Trained(
        acceptance=best.acceptance,
        best_step=best.step,
        num_steps=step,
        num_tokens=num_tokens,
        losses=losses,
        train_s=train_s,
        eval_s=eval_s,
    )


def shuffled_batches(rows: Sequence[PackedRow], rows_per_step: int, *, seed: int) -> Iterator[PackedBatch]:
    """Endless batches; each epoch has every row once, in another order, and batches run on across its end."""
    generator = torch.Generator().manual_seed(seed)

    def stream() -> Iterator[PackedRow]:
        while True:
            for index in torch.randperm(len(rows), generator=generator).tolist():
                yield rows[index]

    endless = stream()
    while True:
        yield collate(list(islice(endless, rows_per_step)))


def held_out_rows(sequences: Sequence[DraftSequence], section: HeadTrainSection) -> list[list[PackedRow]]:
    """Rows by batch, with whole sequences in each: served drafts see all of their context, windows would cut it off."""
    tokens_per_row = max(section.tokens_per_row, *(len(sequence.token_ids) for sequence in sequences))
    rows = pack(sequences, tokens_per_row=tokens_per_row)
    rows_per_batch = max(1, section.rows_per_step * section.tokens_per_row // tokens_per_row)
    return [rows[start : start + rows_per_batch] for start in range(0, len(rows), rows_per_batch)]


def to_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """The batch where the head is: hidden states are kept in main memory, which has room for all of them."""
    return PackedBatch(**{field.name: getattr(batch, field.name).to(device) for field in fields(batch)})


def _settings(section: HeadTrainSection) -> DraftTrainSettings:
    return DraftTrainSettings(
        num_ttt_steps=section.num_ttt_steps,
        step_decay=section.step_decay,
        learning_rate=section.learning_rate,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
        warmup_steps=round(section.warmup_fraction * section.max_steps),
        total_steps=section.max_steps,
        bf16=section.bf16,
    )


def _log(step: str, loss: float, acceptance: ServedAcceptance, tokens_per_s: float, left_s: float) -> None:
    lengths = ", ".join(f"K={k} {acceptance.acceptance_length(k):.2f}" for k in REPORTED_LENGTHS)
    logger.info(
        "drafter: step %s, loss %.3f, acceptance length %s; %.0f tokens/s (%.0f per core), %.0f s left",
        step,
        loss,
        lengths,
        tokens_per_s,
        tokens_per_s / torch.get_num_threads(),
        left_s,
    )
