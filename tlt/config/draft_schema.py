"""Schema of ``tlt draft warmup``: an EAGLE-3 head trained off line on responses of its target."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from tlt.config.schema import DataSection, Fraction, ModelSection, NonNegativeInt, RolloutSection, Section


class WarmupRunSection(Section):
    """Name, place and seed of the drafter that is made."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")] = "drafter"
    """First part of the drafter folder's name; a hash of everything that shapes the drafter is added."""
    dir: str | None = None
    """Folder that holds the drafter folders and the generated responses. Default: ``drafters`` in the model cache."""
    seed: NonNegativeInt = 0
    """Also the seed of the questions. Choose one that RL on the same task does not use."""


class HeadSection(Section):
    """Shape of the head; the rest follows the target."""

    draft_vocab_size: PositiveInt = 1024
    """Tokens that the head can draft: the most frequent ones of the training responses. Every one of them costs time
    in each drafted token; a token outside can never be accepted."""
    aux_layers: tuple[NonNegativeInt, ...] | None = None
    """Target layers whose inputs the head reads. Default: vLLM's, an early, the middle and a late one."""

    @model_validator(mode="after")
    def _three_layers(self) -> HeadSection:
        layers = self.aux_layers
        if layers is not None and (len(layers) != 3 or sorted(set(layers)) != list(layers)):
            raise ValueError(
                f"aux_layers={list(layers)} must be three ascending layers; EAGLE-3 fuses an early, a middle "
                "and a late one. Leave it out for the default"
            )
        return self


class ResponsesSection(Section):
    """What the head learns from: responses of the target, generated here or read from a file."""

    num_prompts: PositiveInt = 384
    num_generations: PositiveInt = 2
    """Responses per training prompt."""
    num_held_out: PositiveInt = 32
    """Prompts whose responses measure acceptance and are not trained on."""
    num_held_out_generations: PositiveInt = 4
    """Responses per held-out prompt."""
    path: str | None = None
    """A JSON-lines file of responses, such as ``responses/step-000001.jsonl`` of a run folder, in place of generating.
    All of it is used: the three numbers of prompts and generations above then have no effect, and ``num_held_out``
    of its prompts are held out, unless its lines say ``held_out`` themselves. Its responses count as drawn
    with the ``rollout`` section's temperature."""


class HeadTrainSection(Section):
    """Test-time training (EAGLE-3, arXiv 2503.01840): the head learns from its own chain, as it is served."""

    num_ttt_steps: Annotated[int, Field(ge=1, le=7)] = 5
    """Length of the chain that is trained; longer drafts than this are accepted less."""
    step_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Weight of a chain step relative to the one before."""
    learning_rate: PositiveFloat = 1e-3
    """Its peak; a cosine schedule over ``max_steps`` brings it down to a twentieth."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    max_grad_norm: PositiveFloat = 1.0
    warmup_fraction: Fraction = 0.05
    """Share of ``max_steps`` in which the learning rate rises from zero."""
    max_steps: PositiveInt
    tokens_per_row: Annotated[int, Field(ge=32)] = 256
    """Length of a packed row; longer sequences are cut into overlapping windows."""
    rows_per_step: PositiveInt = 4
    bf16: bool = True
    """Autocast to bfloat16; weights and optimizer state stay in float32."""
    eval_every: PositiveInt = 100
    """Steps between two measurements of acceptance; the last step is always followed by one."""
    patience: PositiveInt = 3
    """Measurements in a row without an improvement by more than the standard error, after which training stops."""
    num_threads: PositiveInt | None = None
    """CPU threads. Default: every core that the process may use."""


class WarmupConfig(Section):
    """Everything ``tlt draft warmup`` needs."""

    run: WarmupRunSection = WarmupRunSection()
    model: ModelSection = ModelSection()
    """The target; ``dtype`` is the precision that its responses and hidden states are computed in."""
    data: DataSection | None = None
    """The questions. System prompt and template arguments must be those of the runs that the drafter is for."""
    rollout: RolloutSection = RolloutSection()
    """Workers that generate the responses, and how they draw tokens; the head is trained on ``device``, too."""
    head: HeadSection = HeadSection()
    responses: ResponsesSection
    train: HeadTrainSection

    @model_validator(mode="after")
    def _generating_rules(self) -> WarmupConfig:
        if self.responses.path is not None:
            return self
        if self.data is None:
            raise ValueError(
                "responses.path is not set, so responses are generated, and that needs prompts; add a data section"
            )
        needed = self.data.max_prompt_length + self.rollout.max_completion_length
        if needed > self.rollout.max_model_len:
            raise ValueError(
                f"data.max_prompt_length + rollout.max_completion_length = {needed} is above "
                f"rollout.max_model_len={self.rollout.max_model_len}; raise max_model_len or lower one of the two"
            )
        source = self.data.source
        if source.kind == "reasoning_gym" and source.num_train < self.responses.num_prompts:
            raise ValueError(
                f"responses.num_prompts={self.responses.num_prompts} is above data.source.num_train="
                f"{source.num_train}; raise num_train or lower num_prompts"
            )
        return self
