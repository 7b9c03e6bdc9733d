"""What each worker did when: spans in ``timeline.jsonl``, and an account that shows what is missing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

from tlt.observability.json_files import JsonLinesWriter


class SpanKind(StrEnum):
    """What a worker does during a span."""

    GENERATE = "generate"
    EVAL = "eval"
    IDLE = "idle"
    SYNC = "sync"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One worker doing one thing. Spans of one worker do not overlap."""

    worker: str
    """``worker-0``, ``worker-1``, ..."""
    kind: SpanKind
    begin_s: float
    """Unix seconds, so that processes can be put side by side."""
    end_s: float
    step: int
    """RL step, from 1; 0 before the first."""


class TimelineWriter:
    """Appends spans to ``timeline.jsonl``."""

    def __init__(self, path: Path) -> None:
        # Spans are many and no run depends on the last few: not forced to the disk one by one.
        self._lines = JsonLinesWriter(path, durable=False)

    def write(self, span: Span) -> None:
        """Append one span. Raises ``TltError`` when the file cannot be written."""
        self._lines.write(
            {
                "worker": span.worker,
                "kind": span.kind.value,
                "begin_s": span.begin_s,
                "end_s": span.end_s,
                "step": span.step,
            }
        )

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(slots=True, kw_only=True)
class WorkerAccount:
    """Seconds of one worker inside a window. Kinds + unaccounted - overlap = window."""

    by_kind: dict[SpanKind, float] = field(default_factory=dict)
    unaccounted_s: float = 0.0
    """Inside no span."""
    overlap_s: float = 0.0
    """Counted more than once; not zero means that whoever writes the spans has a bug."""


def account(spans: Iterable[Span], begin_s: float, end_s: float) -> dict[str, WorkerAccount]:
    """Per worker, how the window from ``begin_s`` to ``end_s`` was spent; spans are clipped to the window."""
    accounts: dict[str, WorkerAccount] = {}
    covered_until: dict[str, float] = {}
    for span in sorted(spans, key=lambda span: span.begin_s):
        worker = accounts.setdefault(span.worker, WorkerAccount(unaccounted_s=end_s - begin_s))
        inside_s = min(span.end_s, end_s) - max(span.begin_s, begin_s)
        if inside_s <= 0:
            continue
        worker.by_kind[span.kind] = worker.by_kind.get(span.kind, 0.0) + inside_s
        already = covered_until.get(span.worker, begin_s)
        new_s = max(0.0, min(span.end_s, end_s) - max(span.begin_s, already))
        worker.unaccounted_s -= new_s
        worker.overlap_s += inside_s - new_s
        covered_until[span.worker] = max(already, min(span.end_s, end_s))
    return accounts
