"""Where the speculation policy's knowledge of a machine is kept between runs."""

from __future__ import annotations

from tlt.config.schema import DraftSection, RolloutSection
from tlt.observability.provenance import hardware
from tlt.spec.store import PolicyStore
from trainer.models import cache_dir


def policy_store() -> PolicyStore:
    """Beside the models, in the cache folder."""
    return PolicyStore(cache_dir() / "policy")


def policy_key(model: str, rollout: RolloutSection, draft: DraftSection) -> tuple[str, ...]:
    """All that shapes step times: model, machine, cores or devices of an engine, how it runs, what drafts.

    The learner's load on shared cores is not in it: the policy corrects for what it meets.
    """
    return (
        model,
        str(hardware()["cpu_model"]),
        rollout.device,
        str(rollout.tensor_parallel_size if rollout.device == "gpu" else rollout.cores_per_worker),
        "eager" if rollout.enforce_eager else "compiled",
        draft.kind,
        ",".join(map(str, draft.arms)),
    )
