"""TRL's metric names -> ours (``family/name_unit``)."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAMES = {
    "loss": "learner/loss",
    "grad_norm": "learner/grad_norm",
    "learning_rate": "learner/learning_rate",
    "entropy": "learner/entropy_nats",
    "kl": "learner/kl_nats",
    "step_time": "learner/step_s",
    "frac_reward_zero_std": "reward/zero_variance_share",
    "reward_std": "reward/group_std",
    "sampling/sampling_logp_difference/mean": "mismatch/mean_abs_logprob_nats",
    "sampling/sampling_logp_difference/max": "mismatch/max_abs_logprob_nats",
    "sampling/importance_sampling_ratio/min": "mismatch/min_ratio",
    "sampling/importance_sampling_ratio/mean": "mismatch/mean_ratio",
    "sampling/importance_sampling_ratio/max": "mismatch/max_ratio",
    "clip_ratio/region_mean": "learner/clip_share",
}
_OURS = re.compile(r"reward$|rewards/|completions/|num_tokens$|epoch$")
"""Measured on our side under other names, or without meaning here."""


def learner_metrics(logged: Mapping[str, float]) -> dict[str, float]:
    """The learner's part of a step's record; what has no name of ours is kept under ``trl/``."""
    renamed = {}
    for name, value in logged.items():
        if name in _NAMES:
            renamed[_NAMES[name]] = value
        elif not _OURS.match(name):
            renamed[f"trl/{name}"] = value
    return renamed
