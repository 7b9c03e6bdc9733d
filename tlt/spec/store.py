"""What the policy has learned about a model on a machine, kept for the next run."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tlt.observability.json_files import write_json_atomic

logger = logging.getLogger(__name__)

_FORMAT = 1


class PolicyStore:
    """A folder with one JSON file per model and machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, *key: str) -> Path:
        """File of a key: whatever shapes step times (model, processor, cores, drafter kind)."""
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        return self._folder / f"{digest}.json"

    def load(self, *key: str) -> Mapping[str, Any] | None:
        """The state of a key; None, with a warning where a file is broken, if there is none to use."""
        path = self.path(*key)
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT or content["key"] != list(key):
                raise ValueError("other format or key")
            state: Mapping[str, Any] = content["state"]
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("%s is not a policy state (%s); starting without it", path, error)
            return None
        return state

    def save(self, state: Mapping[str, Any], *key: str) -> Path:
        """Replace the state of a key; returns its file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self.path(*key)
        write_json_atomic(path, {"format": _FORMAT, "key": list(key), "state": state})
        return path
