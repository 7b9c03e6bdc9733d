"""Notices when a drafter that should be accepted no longer is, while outputs stay right and nothing else shows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """State of the check after an event."""

    PENDING = "pending"
    """Too few verifications since the event."""
    OK = "ok"
    COLLAPSED = "collapsed"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceCheck:
    """Both figures of a check, at the number of draft tokens that was really used."""

    verdict: Verdict
    event: str
    version: int
    expected: float
    """Acceptance length that was promised."""
    measured: float | None
    """None while nothing was verified."""


class AcceptanceWatchdog:
    """Compares acceptance after an event (drafter swap, new weights, wake-up) with what was promised for it."""

    MIN_VERIFICATIONS = 200
    """Standard error of one position's rate below 0.036."""
    COLLAPSE_SHARE = 0.4
    """Of the promised accepted drafts per verification; what is left below it is no fluctuation."""

    def __init__(self) -> None:
        self._event = ""
        self._version = 0
        self._survival: tuple[float, ...] = ()
        self._num_verifications = 0
        self._expected_accepted = 0.0
        self._num_accepted = 0
        self._collapsed = False

    @property
    def collapsed(self) -> bool:
        """Whether the version that is watched has collapsed."""
        return self._collapsed

    def expect(self, event: str, version: int, survival: tuple[float, ...]) -> None:
        """Start a check: ``survival[j]`` is the promised share of verifications that accept drafts 0..j.

        A version that has collapsed stays so; only another version is given a new chance.
        """
        if self._collapsed and version == self._version:
            return
        self._event, self._version, self._survival = event, version, survival
        self._num_verifications = self._num_accepted = 0
        self._expected_accepted = 0.0
        self._collapsed = False

    def observe(self, num_drafted: tuple[int, ...], num_accepted: tuple[int, ...]) -> AcceptanceCheck | None:
        """Book a step's verifications (per position); None before the first :meth:`expect`."""
        if not self._survival:
            return None
        if num_drafted:
            self._num_verifications += num_drafted[0]
            self._num_accepted += sum(num_accepted)
            self._expected_accepted += sum(d * s for d, s in zip(num_drafted, self._survival, strict=False))
        return self.check()

    def check(self) -> AcceptanceCheck:
        """The verdict so far."""
        count = self._num_verifications
        if count >= self.MIN_VERIFICATIONS and self._num_accepted < self.COLLAPSE_SHARE * self._expected_accepted:
            self._collapsed = True
        verdict = Verdict.OK if count >= self.MIN_VERIFICATIONS else Verdict.PENDING
        return AcceptanceCheck(
            verdict=Verdict.COLLAPSED if self._collapsed else verdict,
            event=self._event,
            version=self._version,
            expected=1.0 + self._expected_accepted / count if count else 1.0 + sum(self._survival),
            measured=1.0 + self._num_accepted / count if count else None,
        )
