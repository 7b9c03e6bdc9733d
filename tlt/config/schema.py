"""The one configuration schema. Unknown keys are errors; every rule that spans keys is checked here.

Where a field means the same as in TRL's ``GRPOConfig`` or vLLM's engine arguments it carries the same name.
Components receive their own section, never the whole.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from tlt.types import SamplingSpec

NonNegativeInt = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base of every section: strict keys, frozen values, defaults validated like anything else."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, protected_namespaces=()
    )


class RunSection(Section):
    """Where results go and what is random."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")] = "run"
    dir: str | None = None
    """Folder that holds the run's own folder ``<dir>/<name>``. Default: ``runs`` in the working folder, or
    ``~/tlt-runs`` inside a Ray job (whose working folder is a temporary copy)."""
    seed: NonNegativeInt = 0
    overwrite: bool = False
    """Replace the folder of an earlier run of the same name; otherwise such a folder is an error."""


class ModelSection(Section):
    """The policy."""

    name: str = "smollm2-135m"
    """Built-in name, local folder, or hub id."""
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision of the rollout engines; the learner's is ``learner.bf16``."""


class ReasoningGymSource(Section):
    """Procedural, seeded tasks of the reasoning-gym library."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    tasks: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]
    """Task name -> its own parameters (``{}`` for the task's defaults). Several tasks are mixed evenly."""
    num_train: PositiveInt = 1024
    """Number of distinct training prompts."""


class JsonlSource(Section):
    """A JSON-lines file; each line has ``prompt`` (text) or ``messages`` (chat), and ``answer``."""

    kind: Literal["jsonl"]
    path: str
    eval_path: str | None = None
    """Held-out file. Without one, the last ``eval.num_prompts`` lines of ``path`` are held out."""


class HubSource(Section):
    """A Hugging Face dataset."""

    kind: Literal["hub"]
    dataset: str
    subset: str | None = None
    split: str = "train"
    eval_split: str | None = None
    prompt_column: str = "prompt"
    answer_column: str = "answer"


class DataSection(Section):
    """Prompts."""

    source: Annotated[ReasoningGymSource | JsonlSource | HubSource, Field(discriminator="kind")]
    system_prompt: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    """Passed to the chat template, e.g. ``enable_thinking: false``."""
    max_prompt_length: PositiveInt = 512
    """Tokens, after the chat template."""
    overlong_prompts: Literal["drop", "truncate_left", "error"] = "drop"


class RewardSpec(Section):
    """One reward function and its weight in the sum."""

    kind: Literal["math_verify", "reasoning_gym", "exact", "format", "python"]
    weight: float = 1.0
    function: str | None = None
    """``package.module:function`` for ``kind: python``."""

    @model_validator(mode="after")
    def _function_goes_with_python(self) -> RewardSpec:
        if (self.kind == "python") != (self.function is not None):
            raise ValueError(
                "'function' is needed for, and only allowed with, kind: python; "
                "write e.g. {kind: python, function: my_package.rewards:score}"
            )
        return self


class RewardSection(Section):
    """Rewards of a response: the weighted sum of ``functions``."""

    functions: Annotated[tuple[RewardSpec, ...], Field(min_length=1)] = (RewardSpec(kind="math_verify"),)
    timeout_s: PositiveFloat = 5.0
    """Per answer; one that takes longer scores 0 and is counted."""
    num_processes: PositiveInt = 1


class RolloutSection(Section):
    """The rollout pool and its engines."""

    num_workers: PositiveInt = 2
    device: Literal["cpu", "gpu"] = "cpu"
    cores_per_worker: PositiveInt = 1
    tensor_parallel_size: PositiveInt = 1
    """GPUs per worker; on CPU it must be 1."""
    max_num_seqs: PositiveInt = 32
    """Largest running batch of one worker."""
    max_model_len: PositiveInt = 1024
    kv_cache_gib: PositiveFloat = 1.0
    """KV cache of one CPU engine."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Share of a GPU's memory that its engine may take."""
    enforce_eager: bool = False
    """Skip compilation: starts in seconds instead of about a minute, generates 25-60 % slower at small batch."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: NonNegativeInt = 0
    max_completion_length: PositiveInt = 256
    min_tokens: NonNegativeInt = 0
    stop: tuple[str, ...] = ()
    start_timeout_s: PositiveFloat = 300.0
    """A worker that is not ready by then has failed to start."""
    worker_timeout_s: PositiveFloat = 120.0
    """A worker with work that makes no progress for this long is restarted, once."""

    @property
    def sampling(self) -> SamplingSpec:
        """How responses of a rollout are drawn."""
        return SamplingSpec(
            max_tokens=self.max_completion_length,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_tokens=self.min_tokens,
            stop=self.stop,
        )

    @model_validator(mode="after")
    def _device_rules(self) -> RolloutSection:
        if self.device == "cpu" and self.tensor_parallel_size != 1:
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size} needs GPUs; "
                "set rollout.device=gpu, or tensor_parallel_size=1 and more num_workers"
            )
        if self.min_tokens > self.max_completion_length:
            raise ValueError(
                f"min_tokens={self.min_tokens} is above max_completion_length={self.max_completion_length}; lower it"
            )
        return self


class DraftSection(Section):
    """Speculative drafting. It changes the speed of a rollout and never its distribution."""

    kind: Literal["off", "eagle3", "ngram"] = "off"
    """``eagle3``: a trained head; ``ngram``: prompt lookup, without a model (the paper's TLT-Base)."""
    path: str | None = None
    """Head of ``kind: eagle3``: a folder in the published EAGLE-3 layout, or ``draft:CONFIG`` for the one that
    ``tlt draft warmup CONFIG`` makes."""
    arms: tuple[NonNegativeInt, ...] = (0, 1, 2, 3, 5, 7)
    """Numbers of draft tokens that the policy chooses from at every engine step. 0 must be among them: it is what
    drafting falls back to where it does not pay."""
    fixed: NonNegativeInt | None = None
    """Draft this many tokens in every step, without a policy (for measurements)."""
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    """How the head picks its drafts. Both are lossless; probabilistic ones are accepted more often at high
    temperature, and cost work over the whole vocabulary."""
    prompt_lookup_min: PositiveInt = 2
    """Shortest n-gram that ``kind: ngram`` looks up."""
    prompt_lookup_max: PositiveInt = 5

    @property
    def adaptive(self) -> bool:
        """Whether a policy chooses how many tokens to draft."""
        return self.kind != "off" and self.fixed is None

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens that a step may draft; the engine plans its memory for it."""
        return max(self.arms) if self.fixed is None else self.fixed

    @model_validator(mode="after")
    def _rules(self) -> DraftSection:
        if (self.kind == "eagle3") != (self.path is not None):
            raise ValueError(
                f"draft.path={self.path} with draft.kind={self.kind}: a head is needed for, and only used with, "
                "kind eagle3; set draft.path to a head's folder or draft:configs/drafter_cpu.yaml, or remove it"
            )
        if sorted(set(self.arms)) != list(self.arms) or 0 not in self.arms or len(self.arms) < 2:
            raise ValueError(
                f"draft.arms={list(self.arms)} must be ascending, without repetition, and contain 0 and another number"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"draft.prompt_lookup_min={self.prompt_lookup_min} is above "
                f"prompt_lookup_max={self.prompt_lookup_max}; lower it"
            )
        if self.kind != "off" and self.max_draft_tokens == 0:
            raise ValueError(f"draft.fixed=0 never drafts; set draft.kind=off instead of {self.kind}")
        return self


class LearnerSection(Section):
    """GRPO through TRL; names and meanings are those of ``trl.GRPOConfig``."""

    max_steps: PositiveInt = 10
    prompts_per_step: PositiveInt = 8
    """Distinct prompts per optimizer step; the batch is this times ``num_generations`` responses."""
    num_generations: Annotated[int, Field(ge=2)] = 8
    per_device_train_batch_size: PositiveInt = 16
    """Responses in one forward-backward pass (memory); the rest is gradient accumulation."""
    learning_rate: PositiveFloat = 1e-6
    lr_scheduler_type: str = "constant"
    warmup_steps: NonNegativeInt = 0
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    max_grad_norm: PositiveFloat = 1.0
    beta: Annotated[float, Field(ge=0.0)] = 0.0
    epsilon: PositiveFloat = 0.2
    epsilon_high: PositiveFloat | None = None
    num_iterations: PositiveInt = 1
    loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo"] = "dapo"
    scale_rewards: Literal["group", "batch", "none"] = "group"
    mask_truncated_completions: bool = False
    bf16: bool = True
    """Autocast to bfloat16 in the learner; weights and optimizer state stay in float32."""
    gradient_checkpointing: bool = False
    num_threads: PositiveInt | None = None
    """CPU threads of the learner. Default: every core that the process may use."""
    importance_sampling: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "off"] = (
        "token_truncate"
    )
    """Correction of the train/inference mismatch: a detached weight learner/engine on the loss."""
    importance_sampling_cap: Annotated[float, Field(gt=1.0)] = 3.0

    @property
    def num_responses(self) -> int:
        """Responses per optimizer step."""
        return self.prompts_per_step * self.num_generations

    @model_validator(mode="after")
    def _batch_divides(self) -> LearnerSection:
        if self.num_responses % self.per_device_train_batch_size:
            raise ValueError(
                f"per_device_train_batch_size={self.per_device_train_batch_size} does not divide the "
                f"{self.num_responses} responses of a step (prompts_per_step x num_generations); "
                "choose a divisor of that number"
            )
        return self


class EvalSection(Section):
    """Greedy evaluation on held-out prompts."""

    num_prompts: NonNegativeInt = 200
    """0 switches evaluation off."""
    every: NonNegativeInt = 0
    """Also evaluate after every so many steps; 0: only before and after training."""


class LoggingSection(Section):
    """Besides ``metrics.jsonl``, which is always written."""

    tensorboard: bool = False
    wandb_project: str | None = None


class TrainConfig(Section):
    """Everything ``tlt train`` needs."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection
    rewards: RewardSection = RewardSection()
    rollout: RolloutSection = RolloutSection()
    draft: DraftSection = DraftSection()
    learner: LearnerSection = LearnerSection()
    eval: EvalSection = EvalSection()
    logging: LoggingSection = LoggingSection()

    @model_validator(mode="after")
    def _cross_section_rules(self) -> TrainConfig:
        needed = self.data.max_prompt_length + self.rollout.max_completion_length
        if needed > self.rollout.max_model_len:
            raise ValueError(
                f"data.max_prompt_length + rollout.max_completion_length = {needed} is above "
                f"rollout.max_model_len={self.rollout.max_model_len}; raise max_model_len or lower one of the two"
            )
        cut = self.rollout.top_p < 1.0 or self.rollout.top_k > 0 or self.rollout.min_tokens > 0
        if cut and self.learner.importance_sampling != "off":
            raise ValueError(
                f"rollout.top_p={self.rollout.top_p}, top_k={self.rollout.top_k}, min_tokens={self.rollout.min_tokens} "
                "cut the support of the engine's distribution, which the learner does not renormalise; set top_p=1, "
                "top_k=0 and min_tokens=0, or learner.importance_sampling=off"
            )
        scorers = [f.kind for f in self.rewards.functions]
        if "reasoning_gym" in scorers and self.data.source.kind != "reasoning_gym":
            raise ValueError(
                "reward kind reasoning_gym needs data.source.kind=reasoning_gym (its scorer reads the task's "
                "metadata); use math_verify or exact"
            )
        return self
