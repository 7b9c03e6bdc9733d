"""Training data of a head: responses with the target's hidden states, packed into rows of bounded length.

A *position* i of a sequence is an anchor of one chain: the head reads the aux states of token i and the embedding of
token i + 1, and drafts tokens i + 2, i + 3, ... This is what an engine does when token i + 1 was just sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOOK_AHEAD = 8
"""Tokens behind the last counted anchor of a window: the longest chain that windows are cut for."""
PADDING = -1
"""Segment of a position that holds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSequence:
    """One prompt with its response, as the target saw it."""

    token_ids: Tensor  # [num_tokens] int64
    aux_hidden: Tensor  # [num_tokens, 3 * hidden]
    final_hidden: Tensor  # [num_tokens, hidden], after the target's last norm
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Tokens ``begin`` to ``end`` of a sequence; only anchors from ``counted`` to ``counted_end`` bear loss."""

    sequence: DraftSequence
    begin: int
    end: int
    counted: int
    counted_end: int

    @property
    def num_tokens(self) -> int:
        """Tokens in the window, context included."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """Windows that share a row; together at most ``tokens_per_row`` tokens."""

    windows: tuple[Window, ...]
    tokens_per_row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Rows as tensors; ``num_positions`` is the longest row's length."""

    token_ids: Tensor  # [num_rows, num_positions] int64
    positions: Tensor  # [num_rows, num_positions] int64, in the sequence
    segments: Tensor  # [num_rows, num_positions] int64, PADDING where there is no token
    aux_hidden: Tensor  # [num_rows, num_positions, 3 * hidden]
    final_hidden: Tensor  # [num_rows, num_positions, hidden]
    counted: Tensor  # [num_rows, num_positions] bool: chains from here bear loss

    @property
    def num_tokens(self) -> int:
        """Tokens in the batch, context included."""
        return int((self.segments != PADDING).sum())


def pack(sequences: Sequence[DraftSequence], *, tokens_per_row: int) -> list[PackedRow]:
    """Cut long sequences into windows and fill rows, longest window first (first-fit decreasing)."""
    windows = [window for sequence in sequences for window in cut(sequence, tokens_per_row)]
    rows: list[list[Window]] = []
    free: list[int] = []
    for window in sorted(windows, key=lambda window: -window.num_tokens):
        fitting = next((index for index, room in enumerate(free) if room >= window.num_tokens), None)
        if fitting is None:
            rows.append([window])
            free.append(tokens_per_row - window.num_tokens)
        else:
            rows[fitting].append(window)
            free[fitting] -= window.num_tokens
    return [PackedRow(windows=tuple(row), tokens_per_row=tokens_per_row) for row in rows]


def cut(sequence: DraftSequence, tokens_per_row: int) -> list[Window]:
    """Windows of at most ``tokens_per_row`` tokens in which every anchor of the response is counted once.

    Windows overlap: half of each is context on the left, which bears no loss, so that chains late in a response are
    trained with a context as they are served with one, and at their true positions.
    """
    assert tokens_per_row > 2 * LOOK_AHEAD, f"rows of {tokens_per_row} tokens leave no room for a window"
    length = len(sequence.token_ids)
    # The first draft of a response follows its first token, which the prefill has sampled.
    counted = max(sequence.num_prompt_tokens - 1, 0)
    context = tokens_per_row // 2
    windows = []
    begin = 0 if length <= tokens_per_row else max(0, counted - context)
    while counted < length:
        end = min(begin + tokens_per_row, length)
        counted_end = length if end == length else end - LOOK_AHEAD
        windows.append(Window(sequence=sequence, begin=begin, end=end, counted=counted, counted_end=counted_end))
        counted, begin = counted_end, max(0, counted_end - context)
    return windows


def collate(rows: Sequence[PackedRow]) -> PackedBatch:
    """Stack rows, padded on the right to the longest."""
    num_positions = max(sum(window.num_tokens for window in row.windows) for row in rows)
    first = rows[0].windows[0].sequence
    shape = len(rows), num_positions
    token_ids = torch.zeros(shape, dtype=torch.int64)
    positions = torch.zeros(shape, dtype=torch.int64)
    segments = torch.full(shape, PADDING)
    counted = torch.zeros(shape, dtype=torch.bool)
    aux_hidden = first.aux_hidden.new_zeros(*shape, first.aux_hidden.shape[1])
    final_hidden = first.final_hidden.new_zeros(*shape, first.final_hidden.shape[1])
    for row_index, row in enumerate(rows):
        start = 0
        for segment, window in enumerate(row.windows):
            source, place = slice(window.begin, window.end), slice(start, start + window.num_tokens)
            token_ids[row_index, place] = window.sequence.token_ids[source]
            positions[row_index, place] = torch.arange(window.begin, window.end)
            segments[row_index, place] = segment
            aux_hidden[row_index, place] = window.sequence.aux_hidden[source]
            final_hidden[row_index, place] = window.sequence.final_hidden[source]
            counted[row_index, start + window.counted - window.begin : start + window.counted_end - window.begin] = True
            start += window.num_tokens
    return PackedBatch(
        token_ids=token_ids,
        positions=positions,
        segments=segments,
        aux_hidden=aux_hidden,
        final_hidden=final_hidden,
        counted=counted,
    )
