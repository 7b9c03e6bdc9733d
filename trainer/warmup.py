"""The warm-up of a drafter: an EAGLE-3 head trained off line on its target's responses, kept and found by content.

    run_warmup
      plan_responses, ensure_responses   a file of the user's, or the rollout pool (trainer.warmup_rollout)
      ResponseReader, split              token ids, training and held out      (trainer.warmup_responses)
      collect_hidden_states              what the head reads and is taught     (trainer.hidden_states)
      train_head                         the best head on held-out responses   (trainer.warmup_training)
      save_head                          the folder, in one piece

``tlt draft warmup CONFIG`` runs it; a training configuration names the result as ``draft.path: draft:CONFIG``.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tlt.config.draft_schema import WarmupConfig
from tlt.config.loader import load_config
from tlt.draft.checkpoint import save_head
from tlt.draft.config import make_head_config
from tlt.draft.loss import FrozenTarget
from tlt.draft.model import Eagle3Head
from tlt.draft.vocab import choose_draft_vocab
from tlt.errors import ConfigError
from trainer.hidden_states import check_memory, collect_hidden_states
from trainer.locks import file_lock
from trainer.models import add_files, cache_dir
from trainer.policy import load_tokenizer, resolve_policy
from trainer.sft import SUMMARY_FILE
from trainer.warmup_responses import ResponseReader, TargetResponse, split
from trainer.warmup_rollout import ResponsePlan, ensure_responses, plan_responses
from trainer.warmup_training import REPORTED_LENGTHS, Trained, train_head

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PREFIX = "draft:"
"""A drafter that starts like this means the one that ``tlt draft warmup`` makes from the file named after it."""
_RECIPE_VERSION = 1
"""Part of the content hash. Raise it when the code here changes what a configuration produces."""


def resolve_draft(name: str) -> Path:
    """The drafter folder that ``draft:configs/drafter_cpu.yaml`` stands for, made first if missing; or a folder's own.

    Raises:
        ConfigError: there is no such folder, or the configuration file is wrong.
    """
    if name.startswith(PREFIX):
        return run_warmup(load_config(Path(name.removeprefix(PREFIX)), (), WarmupConfig))
    folder = Path(name).expanduser().resolve()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"drafter '{name}': {folder} has no config.json; give a folder in the EAGLE-3 checkpoint layout, or "
            f"{PREFIX} and a file, e.g. {PREFIX}configs/drafter_cpu.yaml"
        )
    return folder


def run_warmup(config: WarmupConfig) -> Path:
    """Train, or find the result of the same training, and return the drafter folder.

    The folder holds the head in the published EAGLE-3 layout and ``tlt_draft.json`` with the configuration, served
    acceptance, losses and times. It appears in one piece when everything is written. Safe to call from several
    processes at once: one trains, the others wait for it.

    Raises:
        ConfigError: unknown or unsupported target, wrong responses file, too few prompts, or too little memory.
        TltError: the rollout pool failed.
        DraftTrainingError: the training diverged.
    """
    model_path = resolve_policy(config.model)
    tokenizer = load_tokenizer(model_path, config.model)
    target = AutoConfig.from_pretrained(model_path, trust_remote_code=config.model.trust_remote_code)
    # Before responses are generated, which takes minutes: this target may be none that heads can be made for.
    make_head_config(target, draft_vocab_size=config.head.draft_vocab_size, aux_layers=config.head.aux_layers)
    target_sha256 = _hash_model(Path(model_path))
    parent = Path(config.run.dir).expanduser().resolve() if config.run.dir is not None else cache_dir() / "drafters"
    parent.mkdir(parents=True, exist_ok=True)
    plan = plan_responses(config, tokenizer, target_sha256=target_sha256, folder=parent)
    folder = parent / f"{config.run.name}-{_content_hash(config, target_sha256, plan)}"
    with file_lock(parent / f"{folder.name}.lock", f"training {folder.name}"):
        if folder.is_dir():
            logger.info("drafter: using %s (same target, responses and settings)", folder)
            return folder
        _Warmup(config, model_path, tokenizer, target, target_sha256, plan).run(folder)
    logger.info("drafter: saved %s", folder)
    return folder


class _Warmup:
    """One training, from responses to folder."""

    def __init__(
        self,
        config: WarmupConfig,
        model_path: str,
        tokenizer: PreTrainedTokenizerBase,
        target: PretrainedConfig,
        target_sha256: str,
        plan: ResponsePlan,
    ) -> None:
        self._config = config
        self._model_path = model_path
        self._tokenizer = tokenizer
        self._target = target
        self._target_sha256 = target_sha256
        self._plan = plan
        self._wall_s: dict[str, float] = {}

    def run(self, folder: Path) -> None:
        """Do all of it; ``folder`` appears last."""
        config = self._config
        with self._timed("responses"):
            ensure_responses(self._plan, config, self._model_path)
            train, held_out = self._read()
        torch.set_num_threads(config.train.num_threads or len(os.sched_getaffinity(0)))
        torch.manual_seed(config.run.seed)
        check_memory(
            sum(len(response.token_ids) for response in (*train, *held_out)), hidden_size=self._target.hidden_size
        )
        model = self._load_target()
        draft_token_ids = choose_draft_vocab(
            _token_counts(train, self._target.vocab_size),
            config.head.draft_vocab_size,
            always=eos_token_ids(model, self._tokenizer),
        )
        coverage = {name: _coverage(part, draft_token_ids) for name, part in (("train", train), ("held_out", held_out))}
        logger.info(
            "drafter: a draft vocabulary of %d tokens has %.2f %% of the training and %.2f %% of the held-out tokens",
            len(draft_token_ids),
            100 * coverage["train"],
            100 * coverage["held_out"],
        )
        head_config = make_head_config(
            self._target, draft_vocab_size=len(draft_token_ids), aux_layers=config.head.aux_layers
        )
        with self._timed("hidden_states"):
            states = collect_hidden_states(model, [*train, *held_out], head_config.eagle_aux_hidden_state_layer_ids)
        head = Eagle3Head(head_config, draft_token_ids).to(model.device)
        frozen = FrozenTarget(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        del model  # its layers are not needed any more, and their memory is
        with self._timed("training"):
            trained = train_head(
                head, frozen, states[: len(train)], states[len(train) :], config.train, seed=config.run.seed
            )
        self._report(trained)
        save_head(folder, head, info=self._info(trained, train, held_out, coverage))

    def _read(self) -> tuple[list[TargetResponse], list[TargetResponse]]:
        reader = ResponseReader(
            tokenizer=self._tokenizer,
            data=self._config.data,
            vocab_size=self._target.vocab_size,
            max_length=self._target.max_position_embeddings,
        )
        train, held_out = split(
            reader.read(self._plan.path),
            num_held_out=self._config.responses.num_held_out,
            seed=self._config.run.seed,
        )
        for purpose, part in (("to train on", train), ("held out", held_out)):
            lengths = sorted(len(response.response_token_ids) for response in part)
            logger.info(
                "drafter: %d responses %s, %d tokens, median length %d, longest %d",
                len(part),
                purpose,
                sum(lengths),
                lengths[len(lengths) // 2],
                lengths[-1],
            )
        return train, held_out

    def _load_target(self) -> PreTrainedModel:
        section = self._config.model
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            self._model_path, dtype=getattr(torch, section.dtype), trust_remote_code=section.trust_remote_code
        )
        return model.eval().requires_grad_(False).to("cuda" if self._config.rollout.device == "gpu" else "cpu")

    def _report(self, trained: Trained) -> None:
        rates = ", ".join(f"{rate:.3f}" for rate in trained.acceptance.per_position)
        logger.info("drafter: served acceptance by position of the head of step %d: %s", trained.best_step, rates)
        logger.info(
            "drafter: trained on %d tokens, %.0f tokens/s, %.0f on each of %d cores",
            trained.num_tokens,
            trained.tokens_per_s,
            trained.tokens_per_s / torch.get_num_threads(),
            torch.get_num_threads(),
        )

    def _info(
        self,
        trained: Trained,
        train: Sequence[TargetResponse],
        held_out: Sequence[TargetResponse],
        coverage: dict[str, float],
    ) -> dict[str, Any]:
        acceptance, num_threads = trained.acceptance, torch.get_num_threads()
        return {
            "target": {"name": self._config.model.name, "sha256": self._target_sha256},
            "config": self._config.model_dump(mode="json"),
            "recipe_version": _RECIPE_VERSION,
            "tlt_version": importlib.metadata.version("tlt-rl"),
            "temperature": self._config.rollout.temperature,
            "responses": {
                "key": self._plan.key,
                **{
                    name: {
                        "num_responses": len(part),
                        "num_tokens": sum(len(response.response_token_ids) for response in part),
                        "vocab_coverage": coverage[name],
                    }
                    for name, part in (("train", train), ("held_out", held_out))
                },
            },
            "acceptance": {
                "num_chains": list(acceptance.num_chains),
                "num_accepted": list(acceptance.num_accepted),
                "per_position": list(acceptance.per_position),
                "length": {str(k): acceptance.acceptance_length(k) for k in REPORTED_LENGTHS},
            },
            "training": {
                "num_steps": trained.num_steps,
                "best_step": trained.best_step,
                "num_tokens": trained.num_tokens,
                "loss": {str(step): loss for step, loss in trained.losses.items()},
                "num_threads": num_threads,
                "tokens_per_s": trained.tokens_per_s,
                "tokens_per_s_per_core": trained.tokens_per_s / num_threads,
                "train_s": trained.train_s,
                "eval_s": trained.eval_s,
            },
            "wall_s": self._wall_s,
        }

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self._wall_s[part] = round(time.monotonic() - begin, 1)


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Everything that ends a response of this model: a head that cannot draft it would never finish one."""
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in (*ids, tokenizer.eos_token_id) if token is not None})


def _token_counts(responses: Sequence[TargetResponse], vocab_size: int) -> torch.Tensor:
    """How often each token was generated, [vocab]."""
    tokens = torch.tensor([token for response in responses for token in response.response_token_ids])
    return torch.bincount(tokens, minlength=vocab_size)


def _coverage(
    responses: Sequence[TargetResponse],
    draft_token_ids: torch.Tensor,  # [draft_vocab]
) -> float:
    """Share of the generated tokens that can be drafted at all: an upper bound of acceptance."""
    tokens = torch.tensor([token for response in responses for token in response.response_token_ids])
    return torch.isin(tokens, draft_token_ids).float().mean().item()


def _hash_model(folder: Path) -> str:
    """SHA-256 over the target's files, the record of its own training aside: it holds times and names."""
    digest = hashlib.sha256()
    add_files(digest, folder, skip=(SUMMARY_FILE,))
    return digest.hexdigest()


def _content_hash(config: WarmupConfig, target_sha256: str, plan: ResponsePlan) -> str:
    """Twelve hexadecimal digits over all that shapes the head: target, responses, settings, this code.

    Where things are kept, how many workers generate and on how many threads the head is trained are left out.
    """
    settings = config.model_dump(mode="json", include={"head", "train"})
    del settings["train"]["num_threads"]
    content = [_RECIPE_VERSION, target_sha256, config.model.dtype, config.run.seed, plan.key, settings]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
