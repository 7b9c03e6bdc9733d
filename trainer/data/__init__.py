"""Prompts: where they come from (``sources``), how they become tokens (``render``), the types (``prompts``).

:func:`load_prompts` is the one way in. ``sources`` yields raw prompts, train and held out apart; ``render``
leaves out duplicates and applies the chat template and the rule for over-long prompts. ``procedural`` wraps
the reasoning-gym library and is also used by the reward of that name.
"""

from __future__ import annotations

from trainer.data.prompts import PromptIndex, PromptItem, PromptSet, train_dataset
from trainer.data.render import load_prompts

__all__ = ["PromptIndex", "PromptItem", "PromptSet", "load_prompts", "train_dataset"]
