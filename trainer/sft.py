"""The cold start: a short supervised training on solver-written traces, kept and found again by content.

Reasoning models get their response format before reinforcement learning begins. ``tlt sft CONFIG`` makes such
a model with TRL's SFTTrainer; a training configuration names it as ``model.name: sft:CONFIG``. The folder's
name carries a hash of everything that shapes the weights, so the same configuration never trains twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from trl import SFTConfig as TrlSftConfig
from trl import SFTTrainer

from tlt.config.loader import load_config
from tlt.config.sft_schema import SftConfig
from tlt.errors import ConfigError
from trainer.data import PromptItem, load_prompts
from trainer.locks import file_lock
from trainer.models import add_files, cache_dir, resolve_model
from trainer.traces import write_trace

logger = logging.getLogger(__name__)

PREFIX = "sft:"
"""A model name that starts like this means the model that ``tlt sft`` makes from the file named after it."""
SUMMARY_FILE = "sft.json"
_RECIPE_VERSION = 1
"""Part of the content hash. Raise it when the code here changes what a configuration produces."""


def resolve_sft(name: str) -> Path:
    """The model folder that ``sft:configs/cold_start_cpu.yaml`` stands for; trains it first if it is missing.

    Raises:
        ConfigError: the name lacks the prefix, or its file is wrong.
    """
    if not name.startswith(PREFIX):
        raise ConfigError(f"model name '{name}' has no '{PREFIX}' in front; write e.g. {PREFIX}configs/x.yaml")
    return run_sft(load_config(Path(name.removeprefix(PREFIX)), (), SftConfig))


def run_sft(config: SftConfig) -> Path:
    """Train, or find the result of the same training, and return the model folder.

    The folder holds safetensors in ``model.dtype``, the tokenizer with its chat template, and ``sft.json``
    with the configuration, losses, trace lengths and times. It appears in one piece when everything is
    written. Safe to call from several processes at once: one trains, the others wait for it.

    Raises:
        ConfigError: unknown model, or task parameters that the task refuses.
    """
    base = Path(resolve_model(config.model.name, config.model.revision))
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=config.model.trust_remote_code)
    prompts = load_prompts(config.data, num_eval=config.sft.num_held_out, seed=config.run.seed, tokenizer=tokenizer)
    train, held_out = (encode_traces(items, tokenizer) for items in (prompts.train, prompts.eval))
    parent = Path(config.run.dir).expanduser().resolve() if config.run.dir is not None else cache_dir() / "sft"
    folder = parent / f"{config.run.name}-{_content_hash(config, base, train)}"
    parent.mkdir(parents=True, exist_ok=True)
    with file_lock(parent / f"{folder.name}.lock", f"training {folder.name}"):
        if folder.is_dir():
            logger.info("cold start: using %s (same model, traces and settings)", folder)
            return folder
        with tempfile.TemporaryDirectory(dir=parent, prefix=".unfinished-") as scratch:
            made = Path(scratch) / "model"
            _train(config, base, tokenizer, train, held_out, made)
            made.rename(folder)
    logger.info("cold start: saved %s", folder)
    return folder


def encode_traces(items: Sequence[PromptItem], tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """``input_ids`` and ``labels`` (-100 on the prompt) of each item with its worked solution.

    The response ends with the end-of-sequence token and nothing after it: the chat template would add a line
    break there, which no rollout ever samples.
    """
    rows = []
    for item in items:
        trace = tokenizer(write_trace(item), add_special_tokens=False).input_ids
        prompt, response = list(item.token_ids), [*trace, tokenizer.eos_token_id]
        rows.append({"input_ids": prompt + response, "labels": [-100] * len(prompt) + response})
    return Dataset.from_list(rows)


def _train(
    config: SftConfig,
    base: Path,
    tokenizer: PreTrainedTokenizerBase,
    train: Dataset,
    held_out: Dataset,
    folder: Path,
) -> None:
    """Run the training and write the finished model into ``folder``."""
    started = time.monotonic()
    if config.sft.num_threads is not None:
        torch.set_num_threads(config.sft.num_threads)
    set_seed(config.run.seed)
    # Master weights in float32 (small updates vanish in bfloat16); autocast makes the products bfloat16.
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, trust_remote_code=config.model.trust_remote_code
    )
    trainer = _make_trainer(config, model, tokenizer, train, held_out, folder.parent / "trl")
    lengths = sorted(sum(label != -100 for label in labels) for labels in train["labels"])
    logger.info(
        "cold start: %d steps of %d traces (about %d response tokens)",
        config.sft.max_steps,
        config.sft.traces_per_step,
        config.sft.traces_per_step * sum(lengths) / len(lengths),
    )
    loss_before = trainer.evaluate()["eval_loss"]
    trainer.train()
    loss_after = trainer.evaluate()["eval_loss"]
    logger.info("cold start: held-out loss %.3f -> %.3f", loss_before, loss_after)

    model.to(dtype=getattr(torch, config.model.dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    summary = {
        "config": config.model_dump(mode="json"),
        "recipe_version": _RECIPE_VERSION,
        "held_out_loss": {"before": loss_before, "after": loss_after},
        "train_loss": {str(log["step"]): log["loss"] for log in trainer.state.log_history if "loss" in log},
        "response_tokens": {f"p{p}": lengths[(len(lengths) - 1) * p // 100] for p in (0, 10, 50, 90, 100)},
        "wall_s": round(time.monotonic() - started, 1),
    }
    (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n")


def _make_trainer(
    config: SftConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: Dataset,
    held_out: Dataset,
    scratch: Path,
) -> SFTTrainer:
    sft = config.sft
    arguments = TrlSftConfig(
        output_dir=str(scratch),
        max_steps=sft.max_steps,
        per_device_train_batch_size=sft.per_device_train_batch_size,
        per_device_eval_batch_size=sft.per_device_train_batch_size,
        gradient_accumulation_steps=sft.traces_per_step // sft.per_device_train_batch_size,
        learning_rate=sft.learning_rate,
        lr_scheduler_type=sft.lr_scheduler_type,
        warmup_steps=sft.warmup_steps,
        weight_decay=sft.weight_decay,
        max_grad_norm=sft.max_grad_norm,
        bf16=sft.bf16,
        optim="adamw_torch",
        seed=config.run.seed,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        gradient_checkpointing=False,
        logging_steps=sft.logging_steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        # Rows are tokenized by the path that rollouts use, and must not be cut.
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
    )
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        callbacks=[_LogLines()],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class _LogLines(TrainerCallback):
    """One line per logging interval, with the time that is left."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._started = time.monotonic()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        step, elapsed_s = state.global_step, time.monotonic() - self._started
        logger.info(
            "cold start: step %d/%d, loss %.3f, %.0f s, %.0f s left",
            step,
            state.max_steps,
            logs["loss"],
            elapsed_s,
            elapsed_s / step * (state.max_steps - step),
        )


def _content_hash(config: SftConfig, base: Path, train: Dataset) -> str:
    """Twelve hexadecimal digits over all that shapes the result: base model, traces, settings, this code.

    Where a result is kept, how it is reported and on how many threads it was made are left out.
    """
    settings = config.model_dump(mode="json", include={"sft", "model", "run"})
    for section, keys in {
        "run": ("name", "dir"),
        "model": ("name", "revision"),
        "sft": ("logging_steps", "num_threads", "num_held_out"),
    }.items():
        for key in keys:
            del settings[section][key]
    digest = hashlib.sha256(json.dumps([_RECIPE_VERSION, settings], sort_keys=True).encode())
    for row in train:
        digest.update(json.dumps([row["input_ids"], row["labels"]]).encode())
    add_files(digest, base)
    return digest.hexdigest()[:12]
