"""One training run, from configuration to summary.

    TRL GRPOTrainer.train()          RolloutDriver                  RolloutPool (worker actors)
      each step:
        sync_weights      ------->   time, probe       ------->     load_weights on all workers
        rollout_func      ------->   time, show        ------->     generate, on demand
        reward function   ------->   TrainingRewards   ------->     scoring processes
        forward, backward, optimizer step (this process)
      on_log              ------->   metrics.jsonl, progress, evaluation

TRL owns the loop; everything else is called from it, in this process and thread. Only pool and scoring
processes work beside it, and both are waited for before the next thing happens.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tlt.config.loader import dump_config
from tlt.config.schema import TrainConfig
from tlt.observability.json_files import write_json_atomic
from tlt.observability.logs import setup_logging
from tlt.observability.phases import PhaseClock
from tlt.observability.provenance import collect_provenance
from tlt.observability.run_folder import RunFolder, default_base
from tlt.observability.sinks import check_sinks
from tlt.observability.summary import RunSummary
from trainer.inputs import read_inputs
from trainer.run import TrainingRun

logger = logging.getLogger(__name__)


def run_training(config: TrainConfig, *, argv: Sequence[str], level: int = logging.INFO) -> RunSummary:
    """Train as ``config`` says; returns what ``summary.json`` holds.

    Raises:
        ConfigError: something in the input is wrong; nothing has been trained.
        TltError: the run failed. The policy and the summary of the finished steps are in the run folder.
    """
    check_sinks(config.logging)
    base = Path(config.run.dir) if config.run.dir else default_base(Path.cwd(), os.environ)
    logger.info("run folder: %s", (base / config.run.name).absolute())
    clock = PhaseClock()
    # Before the folder is touched: bad input must neither delete an earlier run nor leave half a new one.
    inputs = read_inputs(config)
    folder = RunFolder.create(base, config.run.name, config.run.overwrite)
    console = setup_logging(level, folder.log_path)
    folder.config_path.write_text(dump_config(config), encoding="utf-8")
    write_json_atomic(folder.provenance_path, collect_provenance(argv))
    with ExitStack() as stack:
        run = TrainingRun.start(stack, config, folder, inputs, clock, console)
        try:
            run.evaluate()
            run.train()
            run.evaluate()
            run.save_policy_state()
            run.completed = True
        except BaseException as error:
            # Said before the clean-up, which may fail too and would then hide it.
            logger.info("the run ends early (%s: %s); keeping what is done", type(error).__name__, error)
            raise
        finally:
            run.save()
    assert run.summary is not None
    return run.summary
