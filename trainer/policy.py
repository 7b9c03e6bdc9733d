"""The policy's folder: found at the start of a run, written at its end."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tlt.config.schema import ModelSection
from tlt.errors import TltError
from trainer.models import resolve_model
from trainer.sft import PREFIX, resolve_sft

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def resolve_policy(section: ModelSection) -> str:
    """Local folder of ``model.name``; ``sft:FILE`` is the model that ``tlt sft FILE`` makes, made now if missing."""
    if section.name.startswith(PREFIX):
        return str(resolve_sft(section.name))
    return resolve_model(section.name, section.revision)


def load_tokenizer(model_path: str, section: ModelSection) -> PreTrainedTokenizerBase:
    """The tokenizer in the policy's folder."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        model_path, trust_remote_code=section.trust_remote_code
    )
    return tokenizer


def save_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: str) -> None:
    """Write a folder that transformers and stock vLLM load; it appears in one piece.

    The learner's weights are float32; they are stored in ``dtype``, the precision that the rollouts ran in.

    Raises:
        TltError: the folder cannot be written.
    """
    import torch

    target: torch.dtype = getattr(torch, dtype)
    part = folder.with_name(folder.name + ".part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        state = {name: tensor.detach().to(target) for name, tensor in model.state_dict().items()}
        # The folder's config must name the stored type; the learner goes on in its own.
        learner_dtype, model.config.dtype = model.config.dtype, target
        try:
            model.save_pretrained(part, state_dict=state)
        finally:
            model.config.dtype = learner_dtype
        tokenizer.save_pretrained(part)
        if folder.exists():
            shutil.rmtree(folder)
        part.rename(folder)
    except OSError as error:
        raise TltError(f"cannot write the policy to {folder}: {error}; free some space on that disk") from error
