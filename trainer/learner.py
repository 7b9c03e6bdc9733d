"""The learner: TRL's ``GRPOTrainer`` on our rollout pool, with the correction for train/inference mismatch on."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# TRL reads this when a trainer is built, to say that `rollout_func` is experimental. We pin TRL's minor version.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback

with warnings.catch_warnings():
    # TRL checks the version of vLLM for its own engine code, which is not used here.
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM versions")
    from trl import GRPOConfig, GRPOTrainer

from tlt.config.schema import LearnerSection, TrainConfig
from tlt.errors import ConfigError
from trainer.logprobs import completion_logprobs, scores_plain_logits
from trainer.trl_adapter import EncodedPrompt, PoolRollout, Prompt, RolloutSource, WeightPusher, make_rollout_func

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase, TrainerControl, TrainerState, TrainingArguments

MetricSink = Callable[[int, dict[str, float]], None]
"""Receives the number of the finished step and what TRL logged for it."""


class PoolGRPOTrainer(GRPOTrainer):
    """``GRPOTrainer`` that generates with a rollout source and weighs tokens by learner/engine probability.

    TRL has the correction that we want, but only with ``use_vllm``: the learner recomputes the log-probabilities
    that enter the PPO clip, and the loss is multiplied by the detached, capped ratio of these to the engine's. With
    ``use_vllm`` its constructor also starts a vLLM of its own. So it is built without, and the switch is
    turned afterwards. Besides the correction the switch then only makes TRL call ``vllm_generation.sync_weights()``
    before the first generation of each global step (TRL 1.16: ``_generate``); its other uses are TRL's own
    generation and its tool loop, which a ``rollout_func`` replaces. Nothing of it is written to checkpoints, and
    after a resume the first step syncs, as ``_last_loaded_step`` starts at -1.
    """

    def __init__(self, *, args: GRPOConfig, source: RolloutSource, rollout_func: PoolRollout, **kwargs: Any) -> None:
        if args.use_vllm:
            raise ConfigError("use_vllm=True starts TRL's own engine; leave it False, responses come from the source")
        super().__init__(args=args, rollout_func=rollout_func, **kwargs)
        self.use_vllm = True
        self.vllm_generation = WeightPusher(source, self.model)
        self._last_loaded_step = -1
        self._plain_logits = scores_plain_logits(self.model)
        self._needs_gradient: torch.Tensor | None = None

    def sync_weights(self) -> int:
        """Push the current weights now, e.g. to evaluate after the last step; returns the policy version."""
        version = self.vllm_generation.sync_weights()
        self._last_loaded_step = self.state.global_step
        return version

    def _send_telemetry(self) -> None:
        """Nothing leaves the machine."""

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """As TRL's, told which rows can have a gradient at all."""
        # A KL term, the only other source of gradient that we configure, reaches rows of advantage 0 too.
        if self.beta == 0.0:
            needs_gradient = inputs["advantages"] != 0  # [num_rows]
            # The loss must hang on the weights even if no row does.
            needs_gradient[0] |= not needs_gradient.any()
            self._needs_gradient = needs_gradient
        try:
            loss: torch.Tensor = super()._compute_loss(model, inputs)
        finally:
            self._needs_gradient = None
        return loss

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,  # [num_rows, num_prompt + num_completion]
        attention_mask: torch.Tensor,  # [num_rows, num_prompt + num_completion]
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """As TRL's; on a CPU without the work that :mod:`trainer.logprobs` saves.

        Not where TRL adds something to the plain language model: a mixture-of-experts loss, logits that are
        transformed after the LM head.
        """
        if self.accelerator.device.type != "cpu" or compute_aux_loss or not self._plain_logits:
            outputs: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
            outputs = super()._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                compute_aux_loss=compute_aux_loss,
                **images,
            )
            return outputs
        logps, entropies = completion_logprobs(
            self.accelerator.unwrap_model(model),
            input_ids,
            attention_mask,
            logits_to_keep,
            rows_per_pass=batch_size or len(input_ids),
            temperature=self.temperature,
            autocast=self.accelerator.autocast,
            needs_gradient=self._needs_gradient,
        )
        return logps, entropies if compute_entropy else None, None


class StepMetrics(TrainerCallback):
    """Hands each step's TRL metrics on, under TRL's names."""

    def __init__(self, sink: MetricSink) -> None:
        self._sink = sink

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float | None] | None = None,
        **kwargs: Any,
    ) -> None:
        """Called by the trainer after each step, and once more at the end with totals, which are left out."""
        if logs is not None and "loss" in logs:
            # TRL logs None for a metric without any value in this step.
            self._sink(state.global_step, {name: float(value) for name, value in logs.items() if value is not None})


def build_learner(
    config: TrainConfig,
    *,
    model_path: str,
    tokenizer: PreTrainedTokenizerBase,
    dataset: datasets.Dataset,
    source: RolloutSource,
    reward_func: Callable[..., list[float]],
    output_dir: Path,
    callbacks: Sequence[TrainerCallback] = (),
    encode: Callable[[Prompt], EncodedPrompt] | None = None,
) -> PoolGRPOTrainer:
    """The trainer of a run; ``train()`` runs all steps.

    Args:
        config: The run.
        model_path: Folder of the policy; loaded in float32.
        tokenizer: The policy's.
        dataset: Column ``prompt`` (text or messages); all columns reach ``reward_func``.
        source: Generates, and takes the new weights before each rollout.
        reward_func: TRL reward function.
        output_dir: For TRL's own files; nothing is saved during training.
        callbacks: Trainer callbacks, e.g. :class:`StepMetrics`.
        encode: Prompt -> tokens; default: the tokenizer with ``data.chat_template_kwargs``.
    """
    num_threads = config.learner.num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads)
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, trust_remote_code=config.model.trust_remote_code
    )
    rollout_func = make_rollout_func(
        source,
        tokenizer,
        config.rollout.sampling,
        encode=encode,
        chat_template_kwargs=config.data.chat_template_kwargs,
        mask_truncated=config.learner.mask_truncated_completions,
        push_weights=False,
    )
    trainer = PoolGRPOTrainer(
        model=model,
        reward_funcs=reward_func,
        args=grpo_config(config, output_dir),
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=list(callbacks),
        source=source,
        rollout_func=rollout_func,
    )
    # With disable_tqdm the trainer prints its logs to stdout, which belongs to the command line.
    trainer.remove_callback(PrinterCallback)
    return trainer


def grpo_config(config: TrainConfig, output_dir: Path) -> GRPOConfig:
    """TRL's configuration for a run: one optimizer step uses, and one rollout makes, ``num_responses`` responses."""
    learner, rollout = config.learner, config.rollout
    on_cpu = rollout.device == "cpu"
    return GRPOConfig(
        output_dir=str(output_dir),
        seed=config.run.seed,
        use_cpu=on_cpu,
        bf16=learner.bf16,
        gradient_checkpointing=learner.gradient_checkpointing,
        disable_dropout=True,
        # Batch: responses per optimizer step = responses per rollout.
        max_steps=learner.max_steps,
        num_generations=learner.num_generations,
        per_device_train_batch_size=learner.per_device_train_batch_size,
        gradient_accumulation_steps=learner.num_responses // learner.per_device_train_batch_size,
        num_iterations=learner.num_iterations,
        dataloader_pin_memory=not on_cpu,
        # Optimizer.
        optim="adamw_torch_fused",
        learning_rate=learner.learning_rate,
        lr_scheduler_type=learner.lr_scheduler_type,
        warmup_steps=learner.warmup_steps,
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_grad_norm,
        # Loss. TRL divides the learner's logits by the temperature, so that its log-probabilities are the sampler's.
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_completion_length=rollout.max_completion_length,
        beta=learner.beta,
        epsilon=learner.epsilon,
        epsilon_high=learner.epsilon_high,
        loss_type=learner.loss_type,
        scale_rewards=learner.scale_rewards,
        **_importance_sampling(learner),
        # Files and logs are the run folder's business.
        save_strategy="no",
        report_to="none",
        logging_strategy="steps",
        logging_steps=1,
        disable_tqdm=True,
    )


def _importance_sampling(learner: LearnerSection) -> dict[str, Any]:
    if learner.importance_sampling == "off":
        return {"vllm_importance_sampling_correction": False}
    return {
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": learner.importance_sampling,
        "vllm_importance_sampling_clip_max": learner.importance_sampling_cap,
    }
