"""The pool with real engines: computes what ``transformers`` computes, and serves a plain TRL trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rollout import EngineSpec, RolloutPool, RolloutSection
from tlt.types import Response, RolloutRequest, SamplingSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.usefixtures("ray_cluster")]

NUM_PROMPTS = 20
MAX_TOKENS = 24
TIE = 1e-3
"""Two tokens this close in log-probability may come out in either order."""


@pytest.fixture(scope="module")
def pool(ray_cluster: None, tiny_llama_dir: Path) -> Iterator[RolloutPool]:
    section = RolloutSection(enforce_eager=True, max_model_len=128, max_num_seqs=8, kv_cache_gib=0.1)
    spec = EngineSpec(model_path=str(tiny_llama_dir), dtype="float32", trust_remote_code=False, seed=0, section=section)
    with RolloutPool.start(section, [spec, spec], dtype="float32") as started:
        yield started


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype="float32")
    return loaded.eval()


def prompts(vocab_size: int) -> list[tuple[int, ...]]:
    """Lengths 3 to 41, so that prefix blocks, batching and both workers are exercised."""
    return [tuple((7 * i + 13 * j) % (vocab_size - 20) + 10 for j in range(3 + 2 * i)) for i in range(NUM_PROMPTS)]


def generate(pool: RolloutPool, tag: str, token_lists: list[tuple[int, ...]]) -> list[Response]:
    sampling = SamplingSpec(max_tokens=MAX_TOKENS, temperature=0.0)
    return pool.generate(
        [
            RolloutRequest(request_id=f"{tag}-{i}", prompt_key=f"{i}", prompt_token_ids=ids, sampling=sampling)
            for i, ids in enumerate(token_lists)
        ]
    )


def assert_greedy(model: PreTrainedModel, prompt: tuple[int, ...], response: Response) -> None:
    """Every token is the model's first choice given the tokens before it, or ties with it; logprobs agree."""
    import torch

    ids = torch.tensor([[*prompt, *response.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]  # [num_tokens, vocab]
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, torch.tensor(response.token_ids)[:, None])[:, 0]
    assert (logprobs.max(dim=-1).values - chosen <= TIE).all()
    # At temperature 0 the processed distribution is a point: vLLM reports raw log-probabilities there.
    torch.testing.assert_close(torch.tensor(response.logprobs), chosen, atol=2e-3, rtol=0)


def check_all(pool: RolloutPool, model: PreTrainedModel, tag: str) -> list[Response]:
    token_lists = prompts(model.config.vocab_size)
    responses = generate(pool, tag, token_lists)
    assert {r.worker for r in responses} == {0, 1}
    for prompt, response in zip(token_lists, responses, strict=True):
        assert len(response.token_ids) >= 1
        assert_greedy(model, prompt, response)
    return responses


def test_greedy_output_equals_transformers_before_and_after_an_update(
    pool: RolloutPool, model: PreTrainedModel
) -> None:
    """Catches wrong rope, packing or dtype handling; and after the update a stale lm_head or prefix cache.

    The second run uses the same prompts, whose old keys and values are in the prefix cache.
    """
    import torch

    before = check_all(pool, model, "before")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * 0.5)
    tied = model.config.tie_word_embeddings
    state = {name: t for name, t in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    pool.sync_weights(state)
    after = check_all(pool, model, "after")
    changed = sum(a.token_ids != b.token_ids for a, b in zip(before, after, strict=True))
    assert changed > NUM_PROMPTS // 2, "the update was too small for this test to mean anything"


def test_a_plain_trl_trainer_generates_with_the_pool(
    pool: RolloutPool, model: PreTrainedModel, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    """README's example with a real pool. Catches a hand-over that only the scripted source of the unit tests survives.

    After the last step the engines must still have the weights that the last rollout used: one push per step.
    """
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from trainer.trl_adapter import make_rollout_func

    versions: list[int] = []

    def reward(completions: list[str], policy_version: list[int], **_: object) -> list[float]:
        versions.append(policy_version[0])
        return [float(len(text)) for text in completions]

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    sampling = SamplingSpec(max_tokens=8)
    args = GRPOConfig(
        str(tmp_path),
        max_completion_length=8,
        per_device_train_batch_size=4,
        num_generations=2,
        max_steps=2,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    before = pool.policy_version
    GRPOTrainer(
        str(tiny_llama_dir),
        reward,
        args,
        Dataset.from_dict({"prompt": [f"{i} + {i} =" for i in range(8)]}),
        processing_class=tokenizer,
        rollout_func=make_rollout_func(pool, tokenizer, sampling),
    ).train()
    assert versions == [before + 1, before + 2]
    assert pool.policy_version == before + 2
