"""Where the responses of a warm-up come from: a file of the user's, or the rollout pool, whose responses are kept."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.engine import EngineSpec, spec_per_worker
from rollout.placement import ray_session
from rollout.pool import RolloutPool
from rollout.record import RolloutProgress
from tlt.config.draft_schema import WarmupConfig
from tlt.errors import ConfigError
from tlt.types import Response, RolloutRequest
from trainer.data import PromptItem, load_prompts
from trainer.locks import file_lock
from trainer.warmup_responses import TargetResponse, write_responses

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_REPORT_EVERY_S = 15.0
_VERSION = 1
"""Part of the key of generated responses. Raise it when the code here changes what a configuration generates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsePlan:
    """Which file the responses are in, and what is generated into it if it is missing."""

    key: str
    """Hash of everything that shapes the responses."""
    path: Path
    train: tuple[RolloutRequest, ...] = ()
    """Empty, like ``held_out``, for a file of the user's."""
    held_out: tuple[RolloutRequest, ...] = ()


def plan_responses(
    config: WarmupConfig, tokenizer: PreTrainedTokenizerBase, *, target_sha256: str, folder: Path
) -> ResponsePlan:
    """Decide what the responses of ``config`` are; generates nothing yet.

    Args:
        target_sha256: over the target's files.
        folder: keeps generated responses.

    Raises:
        ConfigError: the file cannot be read, or there are too few prompts.
    """
    wanted = config.responses
    if wanted.path is not None:
        path = Path(wanted.path).expanduser()
        return ResponsePlan(key=_file_key(path, config), path=path)
    assert config.data is not None, "the schema asks for prompts where responses are generated"
    prompts = load_prompts(config.data, num_eval=wanted.num_held_out, seed=config.run.seed, tokenizer=tokenizer)
    train = _requests(config, "train", prompts.train, wanted.num_prompts, wanted.num_generations)
    held_out = _requests(config, "held_out", prompts.eval, wanted.num_held_out, wanted.num_held_out_generations)
    key = _hash(
        [
            _VERSION,
            target_sha256,
            config.model.dtype,
            config.run.seed,
            asdict(train[0].sampling),
            [request.prompt_token_ids for request in train],
            [request.prompt_token_ids for request in held_out],
        ]
    )
    return ResponsePlan(key=key, path=folder / f"responses-{key}.jsonl", train=train, held_out=held_out)


def ensure_responses(plan: ResponsePlan, config: WarmupConfig, model_path: str) -> None:
    """Generate what is planned unless its file is there. Several processes may call this: one generates.

    Raises:
        TltError: the pool could not be started, or failed.
    """
    requests = plan.train + plan.held_out
    if not requests:
        logger.info("drafter: responses of %s", plan.path)
        return
    with file_lock(plan.path.with_suffix(".lock"), f"generating {plan.path.name}"):
        if plan.path.is_file():
            logger.info("drafter: using %s (same target, prompts and sampling)", plan.path)
            return
        responses = generate_with_pool(requests, config, model_path)
        write_responses(
            plan.path,
            [
                TargetResponse(
                    prompt_token_ids=request.prompt_token_ids,
                    response_token_ids=response.token_ids,
                    held_out=index >= len(plan.train),
                )
                for index, (request, response) in enumerate(zip(requests, responses, strict=True))
            ],
        )
    logger.info("drafter: saved %s", plan.path)


def generate_with_pool(requests: Sequence[RolloutRequest], config: WarmupConfig, model_path: str) -> list[Response]:
    """All responses, from a pool that lives as long as this call: training needs its cores and memory afterwards."""
    section = config.rollout
    spec = EngineSpec(
        model_path=model_path,
        dtype=config.model.dtype,
        trust_remote_code=config.model.trust_remote_code,
        seed=config.run.seed,
        section=section,
    )
    specs = spec_per_worker(spec, section.num_workers)
    logger.info("drafter: generating %d responses, starting %d rollout workers", len(requests), section.num_workers)
    with ray_session(), RolloutPool.start(section, specs, dtype=config.model.dtype) as pool:
        return pool.generate(requests, on_progress=_ProgressLines())


class _ProgressLines:
    """One line per interval, with the time that is left if responses go on finishing as they did."""

    def __init__(self) -> None:
        self._next_s = _REPORT_EVERY_S

    def __call__(self, progress: RolloutProgress) -> None:
        if progress.elapsed_s < self._next_s:
            return
        self._next_s = progress.elapsed_s + _REPORT_EVERY_S
        logger.info(
            "drafter: %d of %d responses, %.0f tokens/s, %.0f s",
            progress.num_done,
            progress.num_total,
            progress.num_tokens / progress.elapsed_s,
            progress.elapsed_s,
        )


def _requests(
    config: WarmupConfig, part: str, items: Sequence[PromptItem], num_prompts: int, num_generations: int
) -> tuple[RolloutRequest, ...]:
    if len(items) < num_prompts:
        key = {"train": "num_prompts", "held_out": "num_held_out"}[part]
        raise ConfigError(
            f"responses.{key}={num_prompts}, and the data section gives {len(items)} prompts for it; "
            f"lower it, or give more prompts (over-long and repeated ones are left out)"
        )
    return tuple(
        RolloutRequest(
            request_id=f"{part}-{row}-{sample}",
            prompt_key=item.key,
            prompt_token_ids=item.token_ids,
            sampling=config.rollout.sampling,
        )
        for row, item in enumerate(items[:num_prompts])
        for sample in range(num_generations)
    )


def _file_key(path: Path, config: WarmupConfig) -> str:
    """Over a user's file and what decides how its texts become tokens and which of its prompts are held out."""
    try:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(
            f"responses.path: cannot read '{path}' ({error.strerror}); give a JSON-lines file, or leave "
            "responses.path out to have responses generated"
        ) from error
    data = config.data
    template = [data.system_prompt, data.chat_template_kwargs] if data else [None, {}]
    return _hash([_VERSION, content, template, config.responses.num_held_out, config.run.seed])


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
