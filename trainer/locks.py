"""A lock between processes whose waiting is seen and ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from tlt.errors import TltError

logger = logging.getLogger(__name__)

_REPORT_EVERY_S = 30.0
_LIMIT_S = 7200.0
"""Longer than the longest work that is done under such a lock."""


@contextmanager
def file_lock(path: Path, purpose: str) -> Iterator[None]:
    """Hold the lock of ``path``; ``purpose`` tells a person what the other process is doing ("making ...").

    Raises:
        TltError: another process has held it for two hours.
    """
    lock = FileLock(path)
    begin = time.monotonic()
    while True:
        try:
            lock.acquire(timeout=_REPORT_EVERY_S)
            break
        except Timeout as error:
            waited_s = time.monotonic() - begin
            if waited_s > _LIMIT_S:
                raise TltError(
                    f"waited {waited_s:.0f} s for another process {purpose}; end it, then try again"
                ) from error
            logger.info("waiting for another process %s (%.0f s)", purpose, waited_s)
    try:
        yield
    finally:
        lock.release()
