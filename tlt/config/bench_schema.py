"""Schema of the measuring commands: ``tlt bench ...`` and ``tlt doctor --lossless``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt, model_validator

from tlt.config.schema import DataSection, DraftSection, ModelSection, NonNegativeInt, RolloutSection, Section


class BenchRunSection(Section):
    """Name, place and seed of a measurement."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")] = "bench"
    dir: str | None = None
    """Folder that the results go into, as ``<dir>/<name>.json``. Default: ``runs`` in the working folder."""
    seed: NonNegativeInt = 0


class BenchSection(Section):
    """What is measured."""

    batches: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1, 2, 4, 8, 16, 32)
    """Numbers of requests that run at once."""
    num_tokens: PositiveInt = 128
    """Tokens of each response. Give the task problems that need more, or responses end early and batches shrink."""
    pairs: PositiveInt = 7
    """Interleaved repetitions; each is one turn of every column on the same prompts."""
    fixed: tuple[PositiveInt, ...] = (1, 2, 3, 5)
    """Numbers of draft tokens measured without a policy."""


class BenchConfig(Section):
    """Everything that ``tlt bench`` needs."""

    run: BenchRunSection = BenchRunSection()
    model: ModelSection = ModelSection()
    data: DataSection
    rollout: RolloutSection = RolloutSection()
    """Of each engine; ``num_workers`` is not used."""
    draft: DraftSection
    bench: BenchSection = BenchSection()

    @model_validator(mode="after")
    def _fits(self) -> BenchConfig:
        if self.draft.kind == "off":
            raise ValueError("draft.kind=off leaves nothing to compare; set draft.kind to eagle3 or ngram")
        needed = self.data.max_prompt_length + self.bench.num_tokens
        if needed > self.rollout.max_model_len:
            raise ValueError(
                f"data.max_prompt_length + bench.num_tokens = {needed} is above "
                f"rollout.max_model_len={self.rollout.max_model_len}; raise max_model_len or lower one of the two"
            )
        if max(self.bench.batches) > self.rollout.max_num_seqs:
            raise ValueError(
                f"bench.batches has {max(self.bench.batches)}, above rollout.max_num_seqs="
                f"{self.rollout.max_num_seqs}; raise max_num_seqs"
            )
        above = [k for k in self.bench.fixed if k > self.draft.max_draft_tokens]
        if above:
            raise ValueError(
                f"bench.fixed has {above}, above the most that the engine is planned for, "
                f"{self.draft.max_draft_tokens} (draft.arms); add it to draft.arms"
            )
        return self
