"""Rewards: the functions (``functions``), a process that can be killed (``process``), a batch (``runner``).

:class:`RewardRunner` owns the processes and hands them one (answer, function) pair at a time. ``boxed`` finds
the final answer in a response.
"""

from __future__ import annotations

from trainer.rewards.boxed import boxed_answer, final_answer
from trainer.rewards.runner import RewardBatch, RewardRunner

__all__ = ["RewardBatch", "RewardRunner", "boxed_answer", "final_answer"]
