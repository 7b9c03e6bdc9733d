"""Where step records go: ``metrics.jsonl`` always, TensorBoard and Weights & Biases by option.

The JSONL file is the record of the run, so a failure to write it ends the run. The other sinks are
conveniences: a failing one is logged once, counted in ``observability/sink_failures_count`` and never stops
training.
"""

from __future__ import annotations

import importlib
import logging
import numbers
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from tlt.config.schema import LoggingSection
from tlt.errors import ConfigError
from tlt.observability.json_files import JsonLinesWriter
from tlt.observability.run_folder import RunFolder

logger = logging.getLogger(__name__)

_KEY = re.compile(r"[a-z][a-z0-9_]*(/[A-Za-z0-9_.-]+)+")


class MetricSink(Protocol):
    """Takes one record of plain numbers per step."""

    def write(self, step: int, time_unix_s: float, metrics: Mapping[str, float]) -> None:
        """Store one record; keys are ``family/name_unit``."""
        ...

    def close(self) -> None:
        """Flush and release; not used again."""
        ...


class JsonlSink:
    """A line ``{"step": 3, "time_unix_s": ..., "reward/mean": ...}``, on disk when ``write`` returns."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLinesWriter(path, durable=True)

    def write(self, step: int, time_unix_s: float, metrics: Mapping[str, float]) -> None:
        """Append a line. Raises ``TltError`` when it cannot be written."""
        self._lines.write({"step": step, "time_unix_s": time_unix_s, **metrics})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


class TensorBoardSink:
    """Event files through TensorBoard's own writer, which needs neither torch nor TensorFlow."""

    def __init__(self, folder: Path) -> None:
        writer = _import_optional("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._event = _import_optional("tensorboard.compat.proto.event_pb2", "tensorboard").Event
        self._summary = _import_optional("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        self._writer = writer.EventFileWriter(str(folder))

    def write(self, step: int, time_unix_s: float, metrics: Mapping[str, float]) -> None:
        """One scalar per metric."""
        values = [self._summary.Value(tag=key, simple_value=value) for key, value in metrics.items()]
        self._writer.add_event(self._event(step=step, wall_time=time_unix_s, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Flush and stop the writer thread."""
        self._writer.close()


class WandbSink:
    """A Weights & Biases run; ``WANDB_MODE=offline`` keeps it on this machine."""

    def __init__(self, project: str, folder: RunFolder, resolved_config: Mapping[str, Any]) -> None:
        wandb = _import_optional("wandb", "wandb")
        try:
            self._run = wandb.init(
                project=project, name=folder.root.name, dir=str(folder.root), config=dict(resolved_config)
            )
        except wandb.Error as error:
            raise ConfigError(
                f"logging.wandb_project={project}: Weights & Biases did not start ({error}); "
                "run `wandb login`, set WANDB_MODE=offline, or leave logging.wandb_project out"
            ) from error

    def write(self, step: int, time_unix_s: float, metrics: Mapping[str, float]) -> None:
        """One history row."""
        self._run.log({**metrics, "time_unix_s": time_unix_s}, step=step)

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


class MetricsWriter:
    """Fans each step record out to the sinks, ``record`` first."""

    def __init__(
        self, record: MetricSink, optional: Sequence[MetricSink] = (), clock: Callable[[], float] = time.time
    ) -> None:
        """``clock`` gives Unix seconds."""
        self._record = record
        self._optional = tuple(optional)
        self._clock = clock
        self._failed: set[int] = set()
        self.num_sink_failures = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store the metrics of a step.

        Raises:
            TltError: ``metrics.jsonl`` cannot be written.
            ValueError, TypeError: a key that is not ``family/name_unit``, or a value that is no number.
        """
        now = self._clock()
        values = {key: _checked(key, value) for key, value in metrics.items()}
        if self._optional:
            values["observability/sink_failures_count"] = self.num_sink_failures
        self._record.write(step, now, values)
        for index, sink in enumerate(self._optional):
            try:
                sink.write(step, now, values)
            except Exception:  # an optional sink must not stop training; logged with its traceback
                self.num_sink_failures += 1
                if index not in self._failed:
                    self._failed.add(index)
                    logger.exception(
                        "%s failed at step %d; further failures are only counted", type(sink).__name__, step
                    )

    def close(self) -> None:
        """Close every sink, whatever the others do."""
        for sink in self._optional:
            try:
                sink.close()
            except Exception:  # teardown: the record still has to be closed
                logger.exception("%s did not close", type(sink).__name__)
        self._record.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_sinks(config: LoggingSection) -> None:
    """Raise ``ConfigError`` for an option whose package is missing; to be called before anything starts."""
    if config.tensorboard:
        _import_optional("tensorboard", "tensorboard")
    if config.wandb_project is not None:
        _import_optional("wandb", "wandb")


def open_metrics(folder: RunFolder, config: LoggingSection, resolved_config: Mapping[str, Any]) -> MetricsWriter:
    """The writer of a run with the sinks of ``config``; ``ConfigError`` for one that cannot start."""
    check_sinks(config)
    optional: list[MetricSink] = []
    if config.wandb_project is not None:
        optional.append(WandbSink(config.wandb_project, folder, resolved_config))
    if config.tensorboard:
        optional.append(TensorBoardSink(folder.tensorboard_dir))
    return MetricsWriter(JsonlSink(folder.metrics_path), optional)


def _import_optional(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"the {extra} log is switched on but cannot be imported ({error}); "
            f"run `pip install 'tlt-rl[{extra}]'`, or switch it off in the logging section"
        ) from error


def _checked(key: str, value: float) -> float:
    if not _KEY.fullmatch(key):
        raise ValueError(f"metric key {key!r} is not of the form family/name_unit, e.g. rollout/generate_s")
    # Numpy scalars are Real but not JSON; converting here keeps every sink simple.
    if not isinstance(value, numbers.Real):
        raise TypeError(f"metric {key} is {value!r}, a {type(value).__name__}; give a plain number")
    return int(value) if isinstance(value, numbers.Integral) else float(value)
