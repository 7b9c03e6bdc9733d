"""What a run needs to read before it starts anything: model folder, tokenizer, prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tlt.config.schema import TrainConfig
from tlt.errors import ConfigError
from trainer.data import PromptSet, load_prompts
from trainer.policy import load_tokenizer, resolve_policy
from trainer.warmup import resolve_draft

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """Everything that can be wrong with the input has been found when this exists."""

    model_path: str
    """Local folder of the policy."""
    draft_path: str | None
    """Local folder of the drafter's head; None if the run drafts without one."""
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSet


def read_inputs(config: TrainConfig) -> RunInputs:
    """Resolve the model and the head (a cold start or warm-up is made now if it is missing) and read the prompts.

    Raises:
        ConfigError: a model or data source cannot be had, or gives fewer prompts than one step needs.
    """
    model_path = resolve_policy(config.model)
    tokenizer = load_tokenizer(model_path, config.model)
    prompts = load_prompts(config.data, num_eval=config.eval.num_prompts, seed=config.run.seed, tokenizer=tokenizer)
    if len(prompts.train) < config.learner.prompts_per_step:
        raise ConfigError(
            f"there are {len(prompts.train)} training prompts, and learner.prompts_per_step="
            f"{config.learner.prompts_per_step} wants that many different ones in each step; "
            "lower it, or give more prompts"
        )
    head = config.draft.path
    draft_path = None if head is None else str(resolve_draft(head))
    return RunInputs(model_path=model_path, draft_path=draft_path, tokenizer=tokenizer, prompts=prompts)
