"""The shell around inference engines.

``engine`` is the seam; ``vllm_engine`` and ``fake_engine`` stand behind it. ``worker`` drives one engine, ``actors``
puts it into a Ray actor, ``placement`` finds devices, ``member`` watches one actor, ``pool`` runs a rollout over all
of them. ``weight_sync`` is what travels, ``record`` what is known afterwards. Nothing here knows TRL or the learner.
"""

from __future__ import annotations

from rollout.engine import EngineSpec
from rollout.placement import ray_session
from rollout.pool import RolloutPool
from tlt.config.schema import RolloutSection

__all__ = ["EngineSpec", "RolloutPool", "RolloutSection", "ray_session"]
