"""Engines in processes of their own, as the benches and the losslessness check use them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.bench_engine import bench_engines
from rollout.engine import EngineSpec
from tlt.config.schema import DraftSection, RolloutSection
from tlt.types import RolloutRequest, SamplingSpec

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

SECTION = RolloutSection(enforce_eager=True, max_model_len=256, max_num_seqs=8, kv_cache_gib=0.1)


def requests(max_tokens: int) -> list[RolloutRequest]:
    prompts = [(5, 6, 7, 8), (9, 9, 9), (100, 3, 100, 3, 100, 3, 100)]
    sampling = SamplingSpec(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return [
        RolloutRequest(request_id=f"r{i}", prompt_key=f"r{i}", prompt_token_ids=prompt, sampling=sampling)
        for i, prompt in enumerate(prompts)
    ]


def test_ngram_drafts_are_verified_counted_and_change_nothing(tiny_llama_dir: Path) -> None:
    """Catches a model-free drafter that is never used or changes outputs, and timings that miss tokens or steps."""
    draft = DraftSection(kind="ngram", arms=(0, 1, 3), prompt_lookup_min=1, prompt_lookup_max=3)
    drafting = EngineSpec(model_path=str(tiny_llama_dir), dtype="float32", section=SECTION, draft=draft)
    with bench_engines([drafting]) as (with_drafts,):
        expected = [generated.token_ids for generated in with_drafts.generate(requests(40), 0)]
        assert with_drafts.spec_totals().num_drafted == (0, 0, 0)
        for k in (3, None):
            assert [generated.token_ids for generated in with_drafts.generate(requests(40), k)] == expected
        assert with_drafts.spec_totals().num_drafted[0] > 0
        timing = with_drafts.time_batch(requests(20), 0)
        # The first token of each response comes from the prefill, which is not timed.
        assert (timing.num_tokens, timing.num_steps) == (3 * 19, 19)
        assert timing.spec.steps_by_k == {0: 19}
        assert timing.seconds == pytest.approx(timing.spec.verify_s + timing.spec.draft_s, rel=0.5)
        assert timing.tokens_per_s > 0
