"""The ``tlt`` command: parse first, import heavy things later.

Exit codes: 0 ok, 1 the run failed, 2 bad input, 128 + n ended by signal n.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tlt.config.bench_schema import BenchConfig
from tlt.config.draft_schema import WarmupConfig
from tlt.config.loader import dump_config, load_config, schema_of
from tlt.config.sft_schema import SftConfig
from tlt.errors import TltError
from tlt.observability.logs import setup_logging

logger = logging.getLogger(__name__)


class Terminated(BaseException):
    """A signal asked the process to end; unwinds like KeyboardInterrupt, so that everything is closed."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"ended by {signal.Signals(signum).name}")
        self.signum = signum


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    arguments = _parser().parse_args(argv)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _terminate)
    # Read when the libraries are imported: their bars would tear the live display, and no usage report is sent.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    setup_logging(_level(arguments))
    try:
        arguments.command(arguments)
    except TltError as error:
        logger.error("%s", error)
        return error.exit_code
    except Terminated as end:
        logger.error("%s", end)
        return 128 + end.signum
    return 0


_signals_seen: list[int] = []
_IMPATIENT = 3
"""The first signal starts a clean-up, which a second one must not interrupt; the third ends the process at once."""


def _terminate(signum: int, frame: FrameType | None) -> None:
    _signals_seen.append(signum)
    if len(_signals_seen) == 1:
        raise Terminated(signum)
    if len(_signals_seen) >= _IMPATIENT:
        os._exit(128 + signum)


def _level(arguments: argparse.Namespace) -> int:
    return logging.DEBUG if arguments.verbose else logging.INFO


def _train(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.config, arguments.overrides)

    from tlt.observability.summary import print_summary
    from trainer.loop import run_training

    summary = run_training(config, argv=sys.argv, level=_level(arguments))
    print_summary(summary)
    if arguments.json:
        print(json.dumps(summary.to_json()))


def _sft(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.config, arguments.overrides, SftConfig)

    from trainer.sft import run_sft

    print(run_sft(config))


def _draft_warmup(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.config, arguments.overrides, WarmupConfig)

    from trainer.warmup import run_warmup

    print(run_warmup(config))


def _bench(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.config, arguments.overrides, BenchConfig)
    if arguments.bench == "spec":
        from trainer.bench.spec import bench_spec

        summary = bench_spec(config, sys.argv)
    elif arguments.bench == "useless-drafter":
        from trainer.bench.useless_drafter import bench_useless_drafter

        summary = bench_useless_drafter(config, sys.argv)
    else:
        from trainer.bench.calibrate import bench_calibrate

        summary = bench_calibrate(config)
    print(json.dumps(summary))


def _doctor(arguments: argparse.Namespace) -> None:
    from trainer.doctor import Status, examine

    findings = examine()
    if not arguments.json:
        for finding in findings:
            print(f"{finding.status:<10}  {finding.what:<40} {finding.detail}")
    report: dict[str, Any] = {"findings": [dataclasses.asdict(finding) for finding in findings]}
    passed = all(finding.status is not Status.BROKEN for finding in findings)
    if arguments.lossless:
        config = load_config(arguments.config, arguments.overrides, BenchConfig)

        from trainer.bench.lossless import check_lossless

        lossless = check_lossless(config)
        report |= lossless.to_json()
        passed &= lossless.passed
        if not arguments.json:
            print("\n".join(f"{name}: {value}" for name, value in lossless.to_json().items()))
    if arguments.json:
        print(json.dumps(report))
    if not passed:
        raise TltError("the check failed; see the lines marked BROKEN and the figures above")


def _model_fetch(arguments: argparse.Namespace) -> None:
    from trainer.models import fetch_model

    print(fetch_model(arguments.name))


def _config_show(arguments: argparse.Namespace) -> None:
    print(dump_config(load_config(arguments.config, arguments.overrides, schema_of(arguments.config))), end="")


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("-v", "--verbose", action="store_true", help="log details, and what libraries say")
    configured = argparse.ArgumentParser(add_help=False, parents=[common])
    configured.add_argument("config", type=Path, help="YAML file; see configs/")
    configured.add_argument(
        "overrides", nargs="*", metavar="key.sub=value", help="overrides of the file, e.g. learner.max_steps=5"
    )
    measured = argparse.ArgumentParser(add_help=False, parents=[common])
    measured.add_argument("config", type=Path, nargs="?", default=Path("configs/bench_cpu.yaml"), help="YAML file")
    measured.add_argument("overrides", nargs="*", metavar="key.sub=value", help="overrides of the file")

    parser = argparse.ArgumentParser(prog="tlt", description="GRPO on Ray and vLLM")
    parser.add_argument("--version", action="version", version=f"tlt-rl {importlib.metadata.version('tlt-rl')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", parents=[configured], help="train a policy with GRPO")
    train.add_argument("--json", action="store_true", help="print the summary as one JSON object on the last line")
    train.set_defaults(command=_train)

    sft = commands.add_parser("sft", parents=[configured], help="make a cold-started model by supervised training")
    sft.set_defaults(command=_sft)

    draft = commands.add_parser("draft", help="work with drafters").add_subparsers(required=True)
    warmup = draft.add_parser("warmup", parents=[configured], help="train a drafter on responses of its target")
    warmup.set_defaults(command=_draft_warmup)

    bench = commands.add_parser("bench", help="measure drafting on this machine").add_subparsers(required=True)
    for name, what in {
        "spec": "speed with and without drafting, by batch size",
        "useless-drafter": "what a random drafter costs",
        "calibrate": "fit the step-time model that the policy starts from",
    }.items():
        one = bench.add_parser(name, parents=[measured], help=what)
        one.set_defaults(command=_bench, bench=name)

    doctor = commands.add_parser("doctor", parents=[measured], help="check this machine")
    doctor.add_argument("--lossless", action="store_true", help="also show that drafting changes no output (minutes)")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.set_defaults(command=_doctor)

    config = commands.add_parser("config", help="work with configurations").add_subparsers(required=True)
    show = config.add_parser("show", parents=[configured], help="print the resolved configuration")
    show.set_defaults(command=_config_show)

    model = commands.add_parser("model", help="work with models").add_subparsers(required=True)
    fetch = model.add_parser("fetch", parents=[common], help="put a built-in model into the cache, print its folder")
    fetch.add_argument("name", help="e.g. smollm2-135m")
    fetch.set_defaults(command=_model_fetch)
    return parser


if __name__ == "__main__":
    sys.exit(main())
