"""Files and flags -> one checked configuration: default < file < ``key.sub=value``.

Everything that is wrong is reported at once, before anything starts, as one :class:`~tlt.errors.ConfigError`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined, to_jsonable_python

from tlt.config.bench_schema import BenchConfig
from tlt.config.draft_schema import WarmupConfig
from tlt.config.problems import child, describe, dotted, key_path, place_at
from tlt.config.schema import Section, TrainConfig
from tlt.config.sft_schema import SftConfig
from tlt.config.yaml_text import KeyPath, YamlDocument, parse_document, parse_value, render, render_short
from tlt.errors import ConfigError

T = TypeVar("T", bound=Section)

Flag = tuple[KeyPath, Any]
"""Key path and value of one ``key.sub=value`` argument."""


@overload
def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig: ...
@overload
def load_config(path: Path, overrides: Sequence[str], schema: type[T]) -> T: ...
def load_config(path: Path, overrides: Sequence[str] = (), schema: type[Section] = TrainConfig) -> Section:
    """Read a YAML file, apply flags, check against the schema.

    Args:
        overrides: ``key.sub=value`` each; the value is read as YAML (``null``, ``3``, ``[a]``, ``{k: v}``).
            Numbers in a key index lists. A flag that changes a source's ``kind`` starts that section afresh.

    Raises:
        ConfigError: with every problem that was found, each with place, key, value, rule and remedy.
    """
    document = _read(path)
    data = document.data
    flags = [_parse_flag(text) for text in overrides]
    # A flag that selects another kind empties its section, so it must act before the flags that fill it.
    flags.sort(key=lambda flag: not _selects_kind(schema, data, flag[0]))
    for flag_path, value in flags:
        _apply(schema, data, flag_path, value)
    try:
        # Strict JSON rules: lists may become tuples, but "yes" is no boolean and true is no number.
        return schema.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        problems = _problems(schema, data, error, path, document, [flag_path for flag_path, _ in flags])
    count = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
    raise ConfigError("\n".join([f"{path}: {count}", *(f"  {problem}" for problem in problems)]))


def schema_of(path: Path) -> type[TrainConfig] | type[SftConfig] | type[WarmupConfig] | type[BenchConfig]:
    """Which schema a file is written for: with an ``sft`` section for ``tlt sft``, with a ``responses`` section for
    ``tlt draft warmup``, with a ``bench`` section for ``tlt bench``, else for ``tlt train``.

    Raises:
        ConfigError: the file cannot be read.
    """
    sections = _read(path).data
    if "sft" in sections:
        return SftConfig
    if "bench" in sections:
        return BenchConfig
    return WarmupConfig if "responses" in sections else TrainConfig


def dump_config(config: Section) -> str:
    """YAML with every value written out; loading it gives an equal configuration."""
    return render(config.model_dump(mode="json"))


def _read(path: Path) -> YamlDocument:
    if not path.is_file():
        names = [other.name for other in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, names, n=1)
        remedy = f"did you mean '{path.parent / close[0]}'?" if close else "check the path"
        raise ConfigError(f"{path}: no such configuration file; {remedy}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 ({error.reason}); save it as UTF-8") from error
    document = parse_document(text, str(path))
    if not isinstance(document.data, dict):
        raise ConfigError(
            f"{path}: the top level is {render_short(document.data)}, but must be 'section: ...' lines; "
            "see configs/ for examples"
        )
    if document.duplicates:
        lines = [
            f"  {path}:{line}: {dotted(key)}: written twice (first in line {document.lines[key]}); remove one"
            for key, line in document.duplicates
        ]
        raise ConfigError("\n".join([f"{path}: duplicate keys", *lines]))
    return document


def _parse_flag(text: str) -> Flag:
    key, equals, value = text.partition("=")
    parts = key.removeprefix("--").split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override '{text}': must have the form key.sub=value, e.g. learner.max_steps=20")
    if not value.strip():
        raise ConfigError(f"override '{text}': no value; write {key}=null for none, or {key}='\"\"' for empty text")
    path = tuple(int(part) if part.isdecimal() else part for part in parts)
    return path, parse_value(value, f"override '{text}'")


def _selects_kind(schema: type[Section], data: Any, path: KeyPath) -> bool:
    """Whether the path ends at the key that chooses the member of a discriminated union."""
    _, info = place_at(schema, data, path[:-1])
    return info is not None and info.discriminator == path[-1]


def _apply(schema: type[Section], data: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Set one value in place; what lies on the way and is not in the file is filled in from the defaults."""
    node: Any = data
    for depth, part in enumerate(path):
        here = path[:depth]
        if isinstance(node, list):
            if not isinstance(part, int) or part >= len(node):
                raise ConfigError(
                    f"override {dotted(path)}={render_short(value)}: {dotted(here)} has entries "
                    f"0 to {len(node) - 1}, but no '{part}'; write {dotted(here)}=[...] to replace all of it"
                )
        elif not isinstance(node, dict):
            raise ConfigError(
                f"override {dotted(path)}={render_short(value)}: {dotted(here)} is the value "
                f"{render_short(node)}, which has no keys below it; check the key"
            )
        elif isinstance(part, int):
            part = str(part)
        if depth == len(path) - 1:
            if _selects_kind(schema, data, path) and node.get(part) != value:
                node.clear()
            node[part] = value
        else:
            if child(node, part) is None:
                node[part] = _default(schema, data, path[: depth + 1])
            node = node[part]


def _default(schema: type[Section], data: Any, path: KeyPath) -> Any:
    """Plain form of a field's default; an empty section where there is none."""
    _, info = place_at(schema, data, path)
    default = PydanticUndefined if info is None else info.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined or default is None:
        return {}
    return to_jsonable_python(default)


def _problems(
    schema: type[Section],
    data: dict[str, Any],
    error: ValidationError,
    path: Path,
    document: YamlDocument,
    flags: Sequence[KeyPath],
) -> list[str]:
    return [
        f"{_where(where, path, document, flags)}: {describe(schema, data, where, details)}"
        for details in error.errors(include_url=False)
        if not _is_echo(details)
        for where in [key_path(schema, data, details["loc"])]
    ]


def _is_echo(details: ErrorDetails) -> bool:
    """pydantic counts a list whose entries are all wrong as empty, too; the entries are reported already."""
    return details["type"] == "too_short" and bool(details["input"])


def _where(key: KeyPath, path: Path, document: YamlDocument, flags: Sequence[KeyPath]) -> str:
    """The flag that set a key, else the line of the key or of the nearest section around it."""
    if any(key[: len(flag)] == flag for flag in flags):
        return "override"
    lines = [document.lines[key[:length]] for length in range(len(key), 0, -1) if key[:length] in document.lines]
    place = f"{path}:{lines[0]}" if lines else str(path)
    # A rule over a whole section, and flags changed something in it.
    return f"{place} with overrides" if any(flag[: len(key)] == key for flag in flags) else place
