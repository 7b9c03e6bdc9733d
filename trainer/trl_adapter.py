"""The rollout pool as TRL sees it: a ``rollout_func`` and a source of fresh policy weights.

Any TRL user can pass :func:`make_rollout_func` to a plain ``GRPOTrainer``; it then pushes the trainer's weights
itself, once per optimizer step. Our own trainer (:class:`trainer.learner.PoolGRPOTrainer`) lets TRL ask for that
through :class:`WeightPusher`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from tlt.errors import ConfigError, TltError
from tlt.types import FinishReason, Response, RolloutRequest, SamplingSpec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase
    from trl import GRPOTrainer

Prompt = str | list[dict[str, str]]
"""A prompt as TRL hands it over: text, or a list of messages."""


class RolloutSource(Protocol):
    """What generates: :class:`rollout.pool.RolloutPool`, alone or watched, and the fake of the tests."""

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Response]:
        """One response per request, in request order; blocks until the last is there."""
        ...

    def sync_weights(self, state: Mapping[str, torch.Tensor]) -> int:
        """Make all later responses come from ``state`` (checkpoint names); returns the policy version."""
        ...


class EncodedPrompt(Protocol):
    """A prompt's tokens, and a key that is equal for equal prompts (:class:`trainer.data.PromptItem` is one)."""

    @property
    def key(self) -> str:
        """Stable over steps and runs."""
        ...

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens after the chat template."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoded:
    key: str
    token_ids: tuple[int, ...]


def make_rollout_func(
    source: RolloutSource,
    tokenizer: PreTrainedTokenizerBase,
    sampling: SamplingSpec,
    *,
    encode: Callable[[Prompt], EncodedPrompt] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    mask_truncated: bool = False,
    seed: int | None = None,
    push_weights: bool = True,
) -> PoolRollout:
    """A ``rollout_func`` for TRL's ``GRPOTrainer`` that generates with ``source``.

    Args:
        source: Where responses come from; it outlives the trainer.
        tokenizer: Turns prompts into tokens the way TRL does, unless ``encode`` is given.
        sampling: Keep its ``temperature`` and ``max_tokens`` equal to ``GRPOConfig.temperature`` (by which TRL divides
            its own logits) and ``max_completion_length``.
        encode: Prompt -> tokens, instead of the tokenizer.
        chat_template_kwargs: For the chat template, when ``encode`` is not given.
        mask_truncated: Leave responses that hit the token limit out of the loss. Use it in place of TRL's
            ``mask_truncated_completions``, which asks whether the last token is EOS and so takes a response that a
            stop string ended for a truncated one.
        seed: Makes each response reproducible on its own (with an engine that supports seeds per request).
        push_weights: Push the trainer's weights when its global step has moved. False where something else does.

    Beside the tokens, reward functions receive the columns ``policy_version``, ``finish_reason`` ("stop" or
    "length"), ``worker`` and ``generate_s``.
    """
    if encode is None:
        encode = _TokenizerEncoder(tokenizer, chat_template_kwargs or {})
    return PoolRollout(
        source, sampling, encode=encode, mask_truncated=mask_truncated, seed=seed, push_weights=push_weights
    )


class PoolRollout:
    """The callable behind :func:`make_rollout_func`."""

    def __init__(
        self,
        source: RolloutSource,
        sampling: SamplingSpec,
        *,
        encode: Callable[[Prompt], EncodedPrompt],
        mask_truncated: bool,
        seed: int | None,
        push_weights: bool,
    ) -> None:
        self._source = source
        self._sampling = sampling
        self._encode = encode
        self._mask_truncated = mask_truncated
        self._seed = seed
        self._push_weights = push_weights
        self._pushed_step: int | None = None
        self._call_step: int | None = None
        self._call = 0

    def __call__(self, prompts: Sequence[Prompt], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Generate once for each of ``prompts``, which TRL has already repeated ``num_generations`` times.

        Raises:
            ConfigError: the trainer runs in several processes, or trains a LoRA adapter.
            TltError: the source broke its promise (order, completeness, at least one token).
        """
        if trainer.accelerator.num_processes != 1:
            raise ConfigError(
                f"the trainer runs in {trainer.accelerator.num_processes} processes, each of which would drive "
                "the rollout pool; start it in one process"
            )
        step = trainer.state.global_step
        if self._push_weights and step != self._pushed_step:
            WeightPusher(self._source, trainer.model).sync_weights()
            self._pushed_step = step
        requests = self._requests(prompts, step)
        responses = self._source.generate(requests)
        _check(requests, responses)
        return self._columns(requests, responses)

    def _requests(self, prompts: Sequence[Prompt], step: int) -> list[RolloutRequest]:
        # One step may generate more than once (steps_per_generation), so its number alone would repeat ids and seeds.
        self._call = self._call + 1 if step == self._call_step else 0
        self._call_step = step
        requests = []
        previous: tuple[Prompt, EncodedPrompt] | None = None
        for index, prompt in enumerate(prompts):
            if previous is None or previous[0] != prompt:
                previous = (prompt, self._encode(prompt))
            encoded = previous[1]
            name = f"step{step}-call{self._call}-{index}"
            requests.append(
                RolloutRequest(
                    request_id=name,
                    prompt_key=encoded.key,
                    prompt_token_ids=encoded.token_ids,
                    sampling=self._seeded(name),
                )
            )
        return requests

    def _seeded(self, name: str) -> SamplingSpec:
        if self._seed is None:
            return self._sampling
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        return replace(self._sampling, seed=int.from_bytes(digest[:4], "big") >> 1)

    def _columns(self, requests: Sequence[RolloutRequest], responses: Sequence[Response]) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {
            "prompt_ids": [list(request.prompt_token_ids) for request in requests],
            "completion_ids": [list(response.token_ids) for response in responses],
            "logprobs": [list(response.logprobs) for response in responses],
            "policy_version": [response.policy_version for response in responses],
            "finish_reason": [response.finish_reason.value for response in responses],
            "worker": [response.worker for response in responses],
            "generate_s": [response.generate_s for response in responses],
        }
        if self._mask_truncated:
            # TRL multiplies its loss mask by `env_mask` and does not hand it to reward functions.
            columns["env_mask"] = [
                [int(response.finish_reason is not FinishReason.LENGTH)] * len(response.token_ids)
                for response in responses
            ]
        return columns


def _check(requests: Sequence[RolloutRequest], responses: Sequence[Response]) -> None:
    asked = [request.request_id for request in requests]
    answered = [response.request_id for response in responses]
    if asked != answered:
        raise TltError(
            f"the rollout source answered {len(answered)} of {len(asked)} requests, or in another order; "
            "it must return one response per request, in request order"
        )
    for response in responses:
        if response.finish_reason is FinishReason.ABORT:
            raise TltError(
                f"response {response.request_id} was aborted after {len(response.token_ids)} tokens; "
                "only finished responses can be trained on"
            )
        # TRL reads the last token of each response. An engine samples at least one (EOS counts).
        if not response.token_ids or len(response.logprobs) != len(response.token_ids):
            raise TltError(
                f"response {response.request_id} has {len(response.token_ids)} tokens and "
                f"{len(response.logprobs)} log-probabilities; it must have one for each of at least one token"
            )


class _TokenizerEncoder:
    """Text and messages -> tokens, as TRL itself does it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(chat_template_kwargs)

    def __call__(self, prompt: Prompt) -> EncodedPrompt:
        if isinstance(prompt, str):
            ids = self._tokenizer(text=prompt)["input_ids"]
        else:
            ids = self._tokenizer.apply_chat_template(
                prompt, tokenize=True, return_dict=False, add_generation_prompt=True, **self._kwargs
            )
        # The declared types cover all options of both calls; a single prompt gives a flat list of ids.
        token_ids = tuple(cast("list[int]", ids))
        digest = hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()
        return _Encoded(key=digest[:16], token_ids=token_ids)


class WeightPusher:
    """Pushes a model's weights to a rollout source; has the one method that TRL calls on its generation object."""

    def __init__(self, source: RolloutSource, model: torch.nn.Module) -> None:
        self._source = source
        self._model = model

    def sync_weights(self) -> int:
        """Push the weights as they are now; returns the policy version of what is generated from here on."""
        return self._source.sync_weights(policy_state(self._model))


def policy_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights of ``model`` under the names of its Hugging Face checkpoint; tensors share memory with the model.

    A tied LM head is left out, since engines tie it themselves. Prefixes of wrappers are taken off.

    Raises:
        ConfigError: the model carries a LoRA adapter.
    """
    state: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if ".lora_" in name or ".base_layer." in name:
            raise ConfigError(
                f"the policy has the adapter weight '{name}', and LoRA is not supported: the engines take full "
                "weights only; train without peft_config"
            )
        if tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        state[name.replace("_orig_mod.", "").removeprefix("module.")] = tensor
    return state
