"""Errors that a person is meant to read: what was given, which rule it breaks, what to do about it.

The command line turns every :class:`TltError` into one message on stderr and the exit code of its class;
anything else is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

from typing import ClassVar


class TltError(Exception):
    """A run failed for a reason that we can name (exit code 1)."""

    exit_code: ClassVar[int] = 1


class ConfigError(TltError):
    """The input is wrong: configuration, command line or data file (exit code 2)."""

    exit_code = 2


class ModelNotFoundError(ConfigError):
    """A model name is neither built in, nor a local folder, nor reachable on the hub."""


class PlacementError(TltError):
    """The cluster cannot give the devices that the run asks for, or did not give them in time."""


class WorkerStartError(TltError):
    """A rollout worker did not become ready (engine failed to start, or timed out)."""


class WorkerLostError(TltError):
    """A rollout worker died or stopped making progress, and its one restart is used up."""


class StaleWeightsError(TltError):
    """An engine refuses, or does not really use, the weights that it was given."""


class DraftRefusedError(TltError):
    """An engine refuses a drafter: stale version, other target, wrong shapes, or values that are not finite."""


class DraftTrainingError(TltError):
    """The training of a drafter cannot go on: its loss or a gradient is not finite."""
