"""Waiting for another process is seen, and a lock is free again after its holder failed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from filelock import FileLock

from tlt.errors import TltError
from trainer import locks


def test_waiting_is_logged_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a silent wait without end for a process that hangs under the lock."""
    monkeypatch.setattr(locks, "_REPORT_EVERY_S", 0.05)
    monkeypatch.setattr(locks, "_LIMIT_S", 0.12)
    with (
        caplog.at_level(logging.INFO),
        FileLock(tmp_path / "x.lock"),
        pytest.raises(TltError, match="another process making x"),
        locks.file_lock(tmp_path / "x.lock", "making x"),
    ):
        pass
    assert "waiting for another process making x" in caplog.text


def test_the_lock_is_free_after_a_failure(tmp_path: Path) -> None:
    """Catches a lock that stays held when what runs under it raises."""
    with pytest.raises(RuntimeError), locks.file_lock(tmp_path / "x.lock", "making x"):
        raise RuntimeError
    FileLock(tmp_path / "x.lock").acquire(timeout=0).lock.release()
