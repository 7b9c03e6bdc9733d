"""Schema of ``tlt sft``: a short supervised training that teaches a model a response format before RL."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from tlt.config.schema import DataSection, ModelSection, NonNegativeInt, Section

SOLVED_TASKS = ("chain_sum", "chain_sum_long_tail")
"""Tasks that :mod:`trainer.traces` has a solver for."""


class SftRunSection(Section):
    """Name, place and seed of the model that is made."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")] = "cold-start"
    """First part of the model folder's name; a hash of everything that shapes the model is added."""
    dir: str | None = None
    """Folder that holds the model folders. Default: ``sft`` in the model cache."""
    seed: NonNegativeInt = 0
    """Also the seed of the questions. Choose one that RL on the same task does not use."""


class SftSection(Section):
    """Training through TRL's SFTTrainer; names are those of ``trl.SFTConfig`` where it has them."""

    num_held_out: PositiveInt = 32
    """Traces on other questions; their loss is reported and not trained on."""
    max_steps: PositiveInt = 70
    traces_per_step: PositiveInt = 12
    """Traces per optimizer step."""
    per_device_train_batch_size: PositiveInt = 1
    """Traces in one forward-backward pass; the rest is gradient accumulation. One at a time needs no padding,
    which on a CPU is a third faster than four; a GPU wants more."""
    learning_rate: PositiveFloat = 2e-4
    lr_scheduler_type: str = "constant"
    warmup_steps: NonNegativeInt = 0
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    max_grad_norm: PositiveFloat = 1.0
    bf16: bool = True
    """Autocast to bfloat16; weights and optimizer state stay in float32."""
    num_threads: PositiveInt | None = None
    """CPU threads. Default: every core that the process may use."""
    logging_steps: PositiveInt = 5

    @model_validator(mode="after")
    def _batch_divides(self) -> SftSection:
        if self.traces_per_step % self.per_device_train_batch_size:
            raise ValueError(
                f"per_device_train_batch_size={self.per_device_train_batch_size} does not divide "
                f"traces_per_step={self.traces_per_step}; choose a divisor of that number"
            )
        return self


class SftConfig(Section):
    """Everything ``tlt sft`` needs."""

    run: SftRunSection = SftRunSection()
    model: ModelSection = ModelSection()
    """The model to start from; ``dtype`` is the precision of the one that is saved."""
    data: DataSection
    """The questions. System prompt and template arguments must be those of the RL runs that follow."""
    sft: SftSection

    @model_validator(mode="after")
    def _tasks_have_a_solver(self) -> SftConfig:
        source = self.data.source
        tasks = list(source.tasks) if source.kind == "reasoning_gym" else [f"{source.kind} source"]
        unsolved = [task for task in tasks if task not in SOLVED_TASKS]
        if unsolved:
            raise ValueError(
                f"data.source: no solver writes traces for {', '.join(unsolved)}; "
                f"use reasoning_gym tasks out of {', '.join(SOLVED_TASKS)}"
            )
        return self
