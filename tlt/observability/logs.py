"""Logging, set up once: one format, stderr for people, ``run.log`` for everything; stdout is for results."""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"

OUR_PACKAGES = ("tlt", "rollout", "trainer")

# Importing one of these sets a level, a handler of its own (vLLM's writes to stdout) and propagate=False.
CHATTY_LIBRARIES = (
    "vllm",
    "ray",
    "transformers",
    "trl",
    "accelerate",
    "datasets",
    "huggingface_hub",
    "httpx",
)

_CONSOLE_NAME = "tlt-console"
_FILE_NAME = "tlt-file"


class ConsoleHandler(logging.Handler):
    """Prints through a rich console, so that lines appear above a live display instead of through it.

    Unlike rich's own handler it never wraps: one record stays one line when stderr is a file.
    """

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record."""
        style = "bold red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else ""
        try:
            self._console.print(self.format(record), style=style, markup=False, highlight=False, soft_wrap=True)
        except Exception:  # noqa: BLE001 logging's contract: a handler reports its own failure and never raises
            self.handleError(record)


def setup_logging(level: int = logging.INFO, log_file: Path | None = None, console: Console | None = None) -> Console:
    """Send our log lines from ``level`` up to stderr and all of them to ``log_file``.

    Other libraries are heard from WARNING up, or with ``level=DEBUG`` from INFO up. May be called again,
    for example once the run folder is known: the earlier set-up is replaced. Returns the console, which the
    progress display must share.
    """
    console = console or Console(stderr=True)
    verbose = level <= logging.DEBUG
    formatter = logging.Formatter(FORMAT, DATE_FORMAT)
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if handler.name in (_CONSOLE_NAME, _FILE_NAME)]:
        root.removeHandler(old)
        old.close()

    to_console = ConsoleHandler(console)
    to_console.set_name(_CONSOLE_NAME)
    to_console.setLevel(level)
    to_console.setFormatter(formatter)
    if not verbose:
        # Python warnings of libraries tell a user of ours nothing; they stay in the file.
        to_console.addFilter(lambda record: record.name != "py.warnings")
    root.addHandler(to_console)
    if log_file is not None:
        to_file = logging.FileHandler(log_file, encoding="utf-8")
        to_file.set_name(_FILE_NAME)
        to_file.setFormatter(formatter)
        root.addHandler(to_file)

    root.setLevel(logging.INFO if verbose else logging.WARNING)
    for package in OUR_PACKAGES:
        logging.getLogger(package).setLevel(logging.DEBUG)
    logging.captureWarnings(True)
    adopt_library_loggers(level)
    return console


def adopt_library_loggers(level: int) -> None:
    """Give the libraries' log lines our format, destination and threshold.

    They set up logging at import, which undoes this: call it again after importing them.
    """
    for name in CHATTY_LIBRARIES:
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
        library.setLevel(logging.INFO if level <= logging.DEBUG else logging.WARNING)
    # vLLM warns on every CPU machine that Triton has no CPU backend; it needs none there.
    logging.getLogger("vllm.triton_utils").setLevel(logging.ERROR)
