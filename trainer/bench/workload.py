"""Engines and prompts of a measurement, resolved from its configuration."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollout.engine import EngineSpec
from tlt.config.bench_schema import BenchConfig
from tlt.config.schema import DraftSection
from tlt.observability.json_files import write_json_atomic
from tlt.observability.provenance import collect_provenance
from tlt.types import RolloutRequest
from trainer.data import PromptItem, load_prompts
from trainer.policy import load_tokenizer, resolve_policy
from trainer.warmup import resolve_draft

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a measurement runs."""

    config: BenchConfig
    model_path: str
    draft_path: str | None
    prompts: tuple[PromptItem, ...]

    def spec(self, draft: DraftSection, *, draft_path: str | None = None) -> EngineSpec:
        """Recipe of an engine that drafts as ``draft`` says."""
        return EngineSpec(
            model_path=self.model_path,
            section=self.config.rollout,
            dtype=self.config.model.dtype,
            trust_remote_code=self.config.model.trust_remote_code,
            seed=self.config.run.seed,
            draft=draft,
            draft_path=draft_path,
        )

    @property
    def plain(self) -> EngineSpec:
        """An engine without a drafter: the baseline of every ratio."""
        return self.spec(DraftSection())

    @property
    def drafting(self) -> EngineSpec:
        """The engine that the configuration describes."""
        return self.spec(self.config.draft, draft_path=self.draft_path)

    def requests(
        self, batch: int, *, turn: int, max_tokens: int | Sequence[int], temperature: float | None = None
    ) -> list[RolloutRequest]:
        """``batch`` requests on prompts of their own for this turn; the same for every engine that is compared.

        With one ``max_tokens`` per request, each generates exactly that many.
        """
        rng = random.Random(f"{self.config.run.seed}/{batch}/{turn}")
        lengths = [max_tokens] * batch if isinstance(max_tokens, int) else max_tokens
        sampling = replace(self.config.rollout.sampling, ignore_eos=not isinstance(max_tokens, int))
        if temperature is not None:
            sampling = replace(sampling, temperature=temperature)
        return [
            RolloutRequest(
                request_id=f"{turn}-{index}",
                prompt_key=item.key,
                prompt_token_ids=item.token_ids,
                sampling=replace(sampling, max_tokens=length),
            )
            for index, (item, length) in enumerate(zip(rng.choices(self.prompts, k=batch), lengths, strict=True))
        ]


def load_workload(config: BenchConfig) -> Workload:
    """Resolve model, head and prompts; a ``sft:`` model or a ``draft:`` head that is missing is made first."""
    model_path = resolve_policy(config.model)
    tokenizer = load_tokenizer(model_path, config.model)
    prompts = load_prompts(config.data, num_eval=0, seed=config.run.seed, tokenizer=tokenizer)
    path = config.draft.path
    return Workload(
        config=config,
        model_path=model_path,
        draft_path=None if path is None else str(resolve_draft(path)),
        prompts=tuple(prompts.train),
    )


def write_results(config: BenchConfig, summary: Mapping[str, Any], argv: Sequence[str], **details: Any) -> None:
    """Keep a measurement with all that it rests on, in ``<dir>/<name>-<bench>.json``."""
    folder = Path(config.run.dir).expanduser() if config.run.dir is not None else Path("runs")
    path = folder.resolve() / f"{config.run.name}-{summary['bench']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, {**summary, **details, "provenance": collect_provenance(argv)})
    logger.info("every pair is in %s", path)
