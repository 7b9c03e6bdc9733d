"""Heads on disk, in the published EAGLE-3 layout that stock vLLM and SGLang load.

A folder has ``config.json``, ``model.safetensors`` in bfloat16 and ``tlt_draft.json``, which says how the head was
made. The embedding is never written: the target's is shared, and an engine that finds one in a drafter's weights
overwrites the target's with it.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from tlt.draft.config import ARCHITECTURE
from tlt.draft.model import Eagle3Head
from tlt.errors import ConfigError
from tlt.observability.json_files import write_json_atomic

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INFO_FILE = "tlt_draft.json"

_ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM")
_VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias")
"""Options of engines' EAGLE-3 classes that change what is computed, and that :class:`Eagle3Head` does not have."""
_EMBEDDING = "embed_tokens.weight"
_MAPPING = ("d2t", "t2d")


def head_tensors(head: Eagle3Head, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Copies of the head's tensors on the CPU under their checkpoint names, floats in ``dtype``.

    A head that drafts the whole vocabulary has no ``d2t`` and ``t2d``: vLLM has no place for them then, and refuses.
    """
    whole = head.config.draft_vocab_size == head.config.vocab_size
    return {
        name: value.detach().to("cpu", dtype if value.is_floating_point() else value.dtype, copy=True).contiguous()
        for name, value in head.state_dict().items()
        if not (whole and name in _MAPPING)
    }


def trained_tensors(head: Eagle3Head, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """What changes in training, for a swap into a running engine: :func:`head_tensors` without the fixed mapping."""
    return {name: value for name, value in head_tensors(head, dtype).items() if name not in _MAPPING}


def save_head(folder: Path, head: Eagle3Head, *, info: dict[str, Any]) -> None:
    """Write ``folder`` so that at any moment, also after a power cut, it is either absent or complete.

    Args:
        info: how the head was made; JSON content of ``tlt_draft.json``.

    Raises:
        ConfigError: ``folder`` exists.
        TltError: it cannot be written.
    """
    if folder.exists():
        raise ConfigError(f"cannot save a drafter to {folder}: it exists; choose another folder, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        write_json_atomic(temporary / CONFIG_FILE, json.loads(head.config.to_json_string(use_diff=False)))
        write_json_atomic(temporary / INFO_FILE, info)
        save_file(head_tensors(head), temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        _sync(temporary / WEIGHTS_FILE)
        _sync(temporary)
        temporary.rename(folder)
        # The rename itself lives in the parent folder.
        _sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_head(folder: Path) -> Eagle3Head:
    """The head of a folder in the published layout, its weights in float32 on the CPU.

    The one layer may be called ``midlayer`` or ``layers.0``. An embedding is left out.

    Raises:
        ConfigError: a file is missing or cannot be read, the head computes something that :class:`Eagle3Head` does
            not, or tensors are missing, unknown, of wrong shape or not finite.
    """
    config = _load_config(folder)
    path = folder / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {path} ({error}); give the folder of an EAGLE-3 head") from error
    tensors = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items() if name != _EMBEDDING}
    ids = _draft_token_ids(tensors, config, path)
    head = Eagle3Head(config, ids)
    expected = head.state_dict()
    # The mapping may be left out where nothing hangs on it, and was checked above where it is there.
    tensors = {name: expected[name] for name in _MAPPING} | tensors
    _check_tensors(tensors, expected, path)
    head.load_state_dict(tensors)
    return head


def _load_config(folder: Path) -> LlamaConfig:
    path = folder / CONFIG_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path} ({error}); give the folder of an EAGLE-3 head") from error
    if not isinstance(content, dict) or not isinstance(content.get("vocab_size"), int):
        raise ConfigError(f"{path}: vocab_size is missing or no integer; give the folder of an EAGLE-3 head")
    architectures = content.get("architectures") or []
    if len(architectures) != 1 or architectures[0] not in _ARCHITECTURES:
        raise ConfigError(f"{path}: architectures={architectures} must name one of {', '.join(_ARCHITECTURES)}")
    # vLLM looks for two of the options here first.
    nested = content.get("eagle_config") or {}
    wrong = [name for name in _VARIANTS if nested.get(name, content.get(name))]
    if content.get("logit_scale", 1.0) != 1.0:
        wrong.append("logit_scale")
    if wrong:
        raise ConfigError(f"{path}: heads with {', '.join(wrong)} are not supported; give a head without")
    if content.get("num_hidden_layers") != 1:
        raise ConfigError(f"{path}: num_hidden_layers={content.get('num_hidden_layers')} must be 1")
    content["draft_vocab_size"] = content.get("draft_vocab_size") or content["vocab_size"]
    try:
        config: LlamaConfig = LlamaConfig.from_dict(content)
    except StrictDataclassError as error:
        raise ConfigError(f"{path}: {error}; give the folder of an EAGLE-3 head") from error
    return config


def _draft_token_ids(tensors: dict[str, Tensor], config: LlamaConfig, path: Path) -> Tensor:
    """The token id of each draft id, int64 [draft_vocab]."""
    own = torch.arange(config.draft_vocab_size)
    offsets = tensors.get("d2t")
    if offsets is None:
        if config.draft_vocab_size != config.vocab_size:
            raise ConfigError(f"{path}: d2t is missing, so what the head drafts has no meaning")
        return own
    if offsets.shape != own.shape or offsets.is_floating_point():
        raise ConfigError(
            f"{path}: d2t has shape {tuple(offsets.shape)} and type {offsets.dtype}, and must have one integer for "
            f"each of the {config.draft_vocab_size} draft tokens"
        )
    ids = own + offsets
    if ids[0] < 0 or ids[-1] >= config.vocab_size or bool((ids.diff() <= 0).any()):
        raise ConfigError(
            f"{path}: d2t must give ascending token ids, each once, below the vocabulary of {config.vocab_size} tokens"
        )
    return ids


def _check_tensors(tensors: dict[str, Tensor], expected: dict[str, Tensor], path: Path) -> None:
    if tensors.keys() != expected.keys():
        missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
        raise ConfigError(f"{path}: not the tensors of an EAGLE-3 head: missing {missing}, unknown {unknown}")
    for name, value in tensors.items():
        if value.shape != expected[name].shape:
            raise ConfigError(
                f"{path}: {name} has shape {tuple(value.shape)}; config.json asks for {tuple(expected[name].shape)}"
            )
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise ConfigError(f"{path}: {name} has values that are not finite; the head is broken")
    if not torch.equal(tensors["t2d"].bool(), expected["t2d"]):
        raise ConfigError(f"{path}: t2d and d2t name different tokens")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
