"""What the rollout function asks of a source and hands to TRL, without TRL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.rollout_source import Scripted, ScriptedSource
from tlt.errors import ConfigError, TltError
from tlt.types import FinishReason, Response, RolloutRequest, SamplingSpec
from trainer.trl_adapter import PoolRollout, make_rollout_func, policy_state

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase
    from trl import GRPOTrainer

SAMPLING = SamplingSpec(max_tokens=8, temperature=0.7, stop=("###",))
MESSAGES = [{"role": "user", "content": "1 + 1?"}]


@dataclass
class StubTrainer:
    """The three attributes of a trainer that the rollout function reads."""

    model: Any = None
    state: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(global_step=0))
    accelerator: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(num_processes=1))

    def typed(self) -> GRPOTrainer:
        return cast("GRPOTrainer", self)


def two_tokens(index: int, request: RolloutRequest) -> Scripted:
    return Scripted(token_ids=(index, 7), logprobs=(-1.0, -2.0 - index))


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tiny_llama_dir)
    return loaded


def rollout(source: ScriptedSource, tokenizer: PreTrainedTokenizerBase, **options: Any) -> PoolRollout:
    return make_rollout_func(source, tokenizer, SAMPLING, push_weights=False, **options)


def test_columns_are_in_prompt_order(tokenizer: PreTrainedTokenizerBase) -> None:
    """Catches responses paired with the wrong prompt, and log-probabilities of another response."""
    source = ScriptedSource(two_tokens)
    columns = rollout(source, tokenizer)(["ab", "ab", "c"], StubTrainer().typed())
    assert columns["prompt_ids"] == [tokenizer("ab")["input_ids"]] * 2 + [tokenizer("c")["input_ids"]]
    assert columns["completion_ids"] == [[0, 7], [1, 7], [2, 7]]
    assert columns["logprobs"] == [[-1.0, -2.0], [-1.0, -3.0], [-1.0, -4.0]]
    assert columns["generate_s"] == [0.5, 1.5, 2.5]
    keys = [request.prompt_key for request in source.batches[0]]
    assert keys[0] == keys[1] != keys[2]


def test_messages_go_through_the_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Catches prompts that lack the generation prompt: the model would then continue the user's turn."""
    source = ScriptedSource(two_tokens)
    rollout(source, tokenizer)([MESSAGES], StubTrainer().typed())
    text = tokenizer.decode(list(source.batches[0][0].prompt_token_ids))
    assert text == "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"


def test_ids_and_seeds_never_repeat(tokenizer: PreTrainedTokenizerBase) -> None:
    """Catches siblings that share a seed (equal samples, no advantage) and ids reused within a step."""
    source = ScriptedSource(two_tokens)
    trainer = StubTrainer()
    function = rollout(source, tokenizer, seed=3)
    for step in (0, 0, 1):
        trainer.state.global_step = step
        function(["a", "a"], trainer.typed())
    requests = [request for batch in source.batches for request in batch]
    assert len({request.request_id for request in requests}) == 6
    assert len({request.sampling.seed for request in requests}) == 6
    assert {replace(request.sampling, seed=None) for request in requests} == {SAMPLING}

    again = ScriptedSource(two_tokens)
    rollout(again, tokenizer, seed=3)(["a", "a"], StubTrainer().typed())
    assert again.batches[0] == source.batches[0]


def test_only_responses_cut_by_the_limit_are_masked(tokenizer: PreTrainedTokenizerBase) -> None:
    """Catches TRL's rule (last token is not EOS), which also masks what a stop string ended."""
    reasons = [FinishReason.STOP, FinishReason.LENGTH]
    source = ScriptedSource(lambda i, r: replace(two_tokens(i, r), finish_reason=reasons[i]))
    columns = rollout(source, tokenizer, mask_truncated=True)(["a", "a"], StubTrainer().typed())
    assert columns["env_mask"] == [[1, 1], [0, 0]]
    assert columns["finish_reason"] == ["stop", "length"]
    assert "env_mask" not in rollout(source, tokenizer)(["a", "a"], StubTrainer().typed())


def test_weights_are_pushed_when_the_step_moves(tokenizer: PreTrainedTokenizerBase, tiny_llama_dir: Path) -> None:
    """Catches a plain TRL user sampling from stale weights, and a push for each of several calls in one step."""
    source = ScriptedSource(two_tokens)
    trainer = StubTrainer(model=load_model(tiny_llama_dir))
    function = make_rollout_func(source, tokenizer, SAMPLING)
    for step in (0, 0, 1):
        trainer.state.global_step = step
        function(["a"], trainer.typed())
    assert source.events == ["sync", "generate", "generate", "sync", "generate"]


class BrokenSource(ScriptedSource):
    """Returns what ``spoil`` makes of correct responses."""

    def __init__(self, spoil: Callable[[list[Response]], list[Response]]) -> None:
        super().__init__(two_tokens)
        self._spoil = spoil

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Response]:
        return self._spoil(super().generate(requests))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda responses: responses[::-1], "in another order"),
        (lambda responses: responses[:1], "answered 1 of 2"),
        (lambda responses: [replace(r, finish_reason=FinishReason.ABORT) for r in responses], "was aborted"),
        (lambda responses: [replace(r, token_ids=(), logprobs=()) for r in responses], "has 0 tokens"),
        (lambda responses: [replace(r, logprobs=(-1.0,)) for r in responses], "1 log-probabilities"),
    ],
)
def test_broken_promises_are_refused(
    spoil: Callable[[list[Response]], list[Response]], message: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Catches training on lost, shuffled, unfinished or empty responses; TRL would take the first three silently."""
    with pytest.raises(TltError, match=message):
        rollout(BrokenSource(spoil), tokenizer)(["a", "b"], StubTrainer().typed())


def test_several_processes_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    """Catches two learner processes that each drive the whole pool."""
    trainer = StubTrainer(accelerator=SimpleNamespace(num_processes=2))
    with pytest.raises(ConfigError, match="runs in 2 processes"):
        rollout(ScriptedSource(two_tokens), tokenizer)(["a"], trainer.typed())


def load_model(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder)
    return model


@pytest.mark.parametrize("wrapped", [False, True])
def test_policy_state_has_the_names_and_values_of_the_checkpoint(tiny_llama_dir: Path, wrapped: bool) -> None:
    """Catches names that an engine does not know, and a tied head that is sent twice."""
    import torch
    from safetensors.torch import load_file

    model = load_model(tiny_llama_dir)
    if wrapped:
        model = torch.compile(torch.nn.ModuleDict({"module": model})["module"])
    state = policy_state(model)
    checkpoint = load_file(tiny_llama_dir / "model.safetensors")
    assert state.keys() == checkpoint.keys()
    assert all(torch.equal(state[name], checkpoint[name]) for name in checkpoint)


def test_an_untied_head_is_sent() -> None:
    """Catches a rule that drops every LM head: the engines would keep the first one."""
    import torch

    body, head = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    assert set(policy_state(torch.nn.ModuleDict({"body": body, "lm_head": head}))) == {"body.weight", "lm_head.weight"}
    head.weight = body.weight
    assert set(policy_state(torch.nn.ModuleDict({"body": body, "lm_head": head}))) == {"body.weight"}


def test_adapters_are_refused() -> None:
    """Catches a LoRA run whose engines would silently stay at the base model."""
    import torch

    model = torch.nn.ModuleDict({"q_proj": torch.nn.ModuleDict({"lora_A": torch.nn.Linear(1, 1)})})
    with pytest.raises(ConfigError, match="LoRA is not supported"):
        policy_state(model)
