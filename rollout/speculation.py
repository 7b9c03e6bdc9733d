"""One engine's drafter as the engine sees it: how vLLM is told of it, which weights it may take, who chooses K."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.spec_controller import DraftClock, DraftPolicy, FixedK, SpecController
from rollout.weight_sync import DraftPacket
from tlt.draft.checkpoint import INFO_FILE, WEIGHTS_FILE
from tlt.errors import ConfigError, DraftRefusedError
from tlt.spec.policy import SpecPolicy, SpecPolicySettings

if TYPE_CHECKING:
    from rollout.engine import EngineSpec


_NOT_TRAINED = ("d2t", "t2d", "embed_tokens.weight")
"""Parts of a checkpoint that no update carries: the draft vocabulary is fixed, the embedding is the target's."""


class Speculation:
    """State of drafting in one engine."""

    def __init__(self, spec: EngineSpec, clock: DraftClock) -> None:
        self.draft_version = 0
        self._head = HeadFile(Path(spec.draft_path)) if spec.draft_path is not None else None
        self._policy = _make_policy(spec)
        self.controller = SpecController(self._policy, clock, spec.draft.max_draft_tokens)
        self._survival = self._head.survival if self._head is not None else ()
        self._expect("the start")

    def check(self, packet: DraftPacket) -> None:
        """Whether the drafter may be replaced by this one.

        Raises:
            DraftRefusedError: see :meth:`rollout.engine.RolloutEngine.load_draft`.
        """
        if self._head is None:
            raise DraftRefusedError("this engine drafts without a head, so there is none to replace")
        if packet.weights.version <= self.draft_version:
            raise DraftRefusedError(
                f"drafter version {packet.weights.version} is not newer than {self.draft_version}, which the engine "
                "has; versions must grow"
            )
        self._head.check(packet)

    def on_draft_changed(self, packet: DraftPacket) -> None:
        """The drafter was replaced: what was learned about acceptance no longer holds; step times still do."""
        self.draft_version = packet.weights.version
        self._survival = packet.survival
        self._expect("a swap")
        self.controller.forget_step()
        if isinstance(self._policy, SpecPolicy):
            promised = 1.0 + sum(packet.survival) if packet.survival else None
            self._policy.on_new_drafter(promised, k=max(len(packet.survival), 1))

    def on_policy_changed(self) -> None:
        """The target has new weights, to which the drafter may fit less well."""
        self._expect("new policy weights")
        self.controller.forget_step()
        if isinstance(self._policy, SpecPolicy):
            self._policy.on_weights_changed()

    def _expect(self, event: str) -> None:
        if self._survival:
            self.controller.watchdog.expect(event, self.draft_version, self._survival)

    def policy_state(self) -> Mapping[str, Any] | None:
        """What the policy has learned, as JSON; None if there is no policy."""
        return self._policy.to_json() if isinstance(self._policy, SpecPolicy) else None


class HeadFile:
    """The head that an engine starts with: what a replacement must look like."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        if not (folder / WEIGHTS_FILE).is_file():
            raise ConfigError(f"draft.path={folder} has no {WEIGHTS_FILE}; give the folder of an EAGLE-3 head")
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        self._shapes = {_canonical(name): shape for name, shape in shapes.items() if not name.endswith(_NOT_TRAINED)}
        info = folder / INFO_FILE
        content = json.loads(info.read_text(encoding="utf-8")) if info.is_file() else {}
        self.target: str | None = content["target"]["sha256"] if content else None
        """None for a head that was made elsewhere and does not say."""
        self.survival = tuple(content["acceptance"]["per_position"]) if "acceptance" in content else ()
        """Served acceptance on held-out prompts, per position; empty if it is not known."""

    def check(self, packet: DraftPacket) -> None:
        """Raises :class:`tlt.errors.DraftRefusedError` unless the packet fits in place of this head."""
        import torch

        if self.target is not None and packet.target != self.target:
            raise DraftRefusedError(f"the drafter was made for {packet.target}, the engine's target is {self.target}")
        got = {name: tuple(array.shape) for name, array in packet.weights.arrays.items()}
        wrong = sorted(
            f"{name} {got.get(name, 'missing')} instead of {self._shapes.get(name, 'nothing')}"
            for name in got.keys() | self._shapes.keys()
            if got.get(name) != self._shapes.get(name)
        )
        if wrong:
            raise DraftRefusedError(f"the drafter does not have the shapes of the running one: {'; '.join(wrong[:4])}")
        for name, tensor in packet.weights.tensors():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise DraftRefusedError(f"the drafter's {name} has values that are not finite")


def _canonical(name: str) -> str:
    """Both names of the one decoder layer are in use."""
    return name.replace("layers.0.", "midlayer.")


def speculation_args(spec: EngineSpec) -> dict[str, Any]:
    """vLLM's engine arguments for drafting; empty without it."""
    draft = spec.draft
    if draft.kind == "off":
        return {}
    most = draft.max_draft_tokens
    config: dict[str, Any] = {
        "num_speculative_tokens": most,
        # Makes K variable from step to step. The scheduler's choice goes before this table; on a GPU decode graphs
        # are captured for the values that stand in it.
        "num_speculative_tokens_per_batch_size": [(1, spec.section.max_num_seqs, most)],
    }
    if draft.kind == "eagle3":
        config |= {"method": "eagle3", "model": spec.draft_path, "draft_sample_method": draft.draft_sample_method}
    else:
        config |= {
            "method": "ngram",
            "prompt_lookup_min": draft.prompt_lookup_min,
            "prompt_lookup_max": draft.prompt_lookup_max,
        }
    return {
        "speculative_config": config,
        "scheduler_cls": "rollout.vllm_scheduler.AdaptiveScheduler",
        # The hook subclasses the synchronous scheduler, which is the only one on a CPU.
        "async_scheduling": False,
        "per_request_spec_decode_metrics": "summary",
    }


def _make_policy(spec: EngineSpec) -> DraftPolicy:
    if spec.draft.fixed is not None:
        return FixedK(spec.draft.fixed)
    settings = SpecPolicySettings(arms=spec.draft.arms)
    rng = random.Random(spec.seed)
    if spec.policy_state is not None:
        return SpecPolicy.from_json(spec.policy_state, settings, rng)
    return SpecPolicy(settings, None, rng)
