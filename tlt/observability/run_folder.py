"""The folder of one run: where everything lies, and whether a new run may use it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tlt.errors import ConfigError

RUNS_DIR_VARIABLE = "TLT_RUNS_DIR"

# Where Ray unpacks what `ray job submit --working-dir` uploaded; it deletes that copy after the job.
_RAY_COPY = ("runtime_resources", "working_dir_files")


def default_base(cwd: Path, env: Mapping[str, str]) -> Path:
    """Folder that holds the run folders when ``run.dir`` is not set.

    ``$TLT_RUNS_DIR`` if set; else ``~/tlt-runs`` inside a Ray job whose working folder is an uploaded copy;
    else ``runs`` under ``cwd``.
    """
    chosen = env.get(RUNS_DIR_VARIABLE)
    if chosen:
        return cwd / Path(chosen).expanduser()
    if in_ray_upload(cwd):
        return Path.home() / "tlt-runs"
    return cwd / "runs"


def in_ray_upload(path: Path) -> bool:
    """Whether ``path`` lies in the copy of the working folder that Ray makes for a job."""
    return _RAY_COPY in zip(path.parts, path.parts[1:], strict=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Absolute paths of one run's files. :meth:`create` makes a new one, the constructor names an old one.

    Example:
        >>> RunFolder(root=Path("/data/runs/first")).metrics_path.name
        'metrics.jsonl'
    """

    root: Path

    @classmethod
    def create(cls, base: Path, name: str, overwrite: bool = False, min_free_gib: float = 1.0) -> RunFolder:
        """Make ``base/name`` ready for a new run; ``overwrite`` deletes an earlier run there.

        Raises:
            ConfigError: the folder has files of an earlier run (or, with ``overwrite``, of something that is
                no run), cannot be written, lies in a Ray job's temporary copy, or its disk has under
                ``min_free_gib`` free.
        """
        root = (base.expanduser() / name).resolve()
        if in_ray_upload(root):
            raise ConfigError(
                f"run folder {root} lies in the copy of the working folder that Ray deletes after the job; "
                f"give an absolute run.dir outside of it, or set {RUNS_DIR_VARIABLE}"
            )
        folder = cls(root=root)
        try:
            folder._empty(overwrite)
            for path in (root, folder.responses_dir, folder.checkpoints_dir):
                path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=root):
                pass
        except OSError as error:
            raise ConfigError(
                f"cannot use {root} as run folder: {error.strerror or error}; "
                f"choose a folder that you may write with run.dir=FOLDER"
            ) from error
        free_gib = shutil.disk_usage(root).free / 2**30
        if free_gib < min_free_gib:
            raise ConfigError(
                f"the disk of {root} has {free_gib:.2f} GiB free and a run needs at least {min_free_gib:g}; "
                "free some space, or put the run on another disk with run.dir=FOLDER"
            )
        return folder

    def _empty(self, overwrite: bool) -> None:
        """Leave no file of an earlier run. Empty folders do not count: a start that failed leaves them."""
        files = [path for path in self.root.rglob("*") if not path.is_dir()]
        if not files:
            return
        if not overwrite:
            raise ConfigError(
                f"run folder {self.root} has the files of an earlier run; "
                "give another run.name, or replace it with run.overwrite=true"
            )
        if not (self.config_path.exists() or self.provenance_path.exists() or files == [self.log_path]):
            raise ConfigError(
                f"{self.root} has files but neither {self.config_path.name} nor {self.provenance_path.name}: "
                "it is not the folder of a run, so run.overwrite=true does not delete it; "
                "give another run.name or run.dir"
            )
        for path in self.root.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    @property
    def config_path(self) -> Path:
        """The configuration as it was used, defaults included."""
        return self.root / "config.resolved.yaml"

    @property
    def provenance_path(self) -> Path:
        """See :mod:`tlt.observability.provenance`."""
        return self.root / "provenance.json"

    @property
    def metrics_path(self) -> Path:
        """One line per step."""
        return self.root / "metrics.jsonl"

    @property
    def timeline_path(self) -> Path:
        """One line per span of a worker."""
        return self.root / "timeline.jsonl"

    @property
    def responses_dir(self) -> Path:
        """One JSONL file of responses per step."""
        return self.root / "responses"

    @property
    def checkpoints_dir(self) -> Path:
        """State to resume from."""
        return self.root / "checkpoints"

    @property
    def policy_dir(self) -> Path:
        """The trained model, in Hugging Face format; written at the end, so not there before."""
        return self.root / "policy"

    @property
    def tensorboard_dir(self) -> Path:
        """TensorBoard event files, if asked for."""
        return self.root / "tensorboard"

    @property
    def summary_path(self) -> Path:
        """See :class:`tlt.observability.summary.RunSummary`."""
        return self.root / "summary.json"

    @property
    def log_path(self) -> Path:
        """Everything that was logged."""
        return self.root / "run.log"
