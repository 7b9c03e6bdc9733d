"""JSON on disk that any reader accepts and that a crash does not leave half written."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tlt.errors import TltError


def strict_json(value: Any, *, indent: int | None = None) -> str:
    """JSON text with null for ``NaN`` and ``Infinity``, which Python writes and strict readers refuse."""
    return json.dumps(_finite(value), allow_nan=False, ensure_ascii=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_finite(item) for item in value]
    return value


def write_json_atomic(path: Path, value: Any) -> None:
    """Replace ``path`` as a whole: after a crash at any moment it holds the old or the new content.

    Raises:
        TltError: the file cannot be written (disk full, folder gone).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    text = strict_json(value, indent=2) + "\n"
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        # The rename itself lives in the folder: without this it may be lost in a power cut.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


class JsonLinesWriter:
    """Appends one JSON object per line, each in one unbuffered write: readers never wait for a flush."""

    def __init__(self, path: Path, *, durable: bool) -> None:
        """``durable`` also forces each line to the disk: for few lines that must survive a power cut."""
        self._path = path
        self._durable = durable
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise _cannot_write(path, error) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append ``record``.

        Raises:
            TltError: the line is not on the disk (typically: disk full).
        """
        line = (strict_json(record) + "\n").encode()
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self._durable:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise _cannot_write(self._path, error) from error

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _cannot_write(path: Path, error: OSError) -> TltError:
    return TltError(
        f"cannot write {path}: {error.strerror or error}; free disk space or choose another run.dir, then start again"
    )
