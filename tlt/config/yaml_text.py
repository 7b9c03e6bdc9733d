"""YAML text as people mean it: the scalars of YAML 1.2, no duplicate keys, and the line of every key.

PyYAML follows YAML 1.1, where ``off`` is a boolean, ``1e-6`` a text, ``010`` eight and ``12:30`` a number.
Our configurations contain such words (``importance_sampling: off``), so both directions use YAML 1.2's rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from tlt.errors import ConfigError

KeyPath = tuple[str | int, ...]

_SCALARS = {
    "null": (r"~|null|Null|NULL|", "~nN\0"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "merge": (r"<<", "<"),
}


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """First character of a plain scalar -> [(tag, pattern), ...]; the first match wins."""
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for kind, (pattern, first_characters) in _SCALARS.items():
        for character in first_characters:
            key = "" if character == "\0" else character
            table.setdefault(key, []).append((f"tag:yaml.org,2002:{kind}", re.compile(rf"^(?:{pattern})$")))
    return table


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolvers()
    # Dates, sets and binary data have no place in a configuration; without a constructor they are an error.
    yaml_constructors = {
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in {"null", "bool", "int", "float", "str", "seq", "map"}
    }


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _resolvers()

    def ignore_aliases(self, data: Any) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlDocument:
    """A parsed file: the values, and where each key stands."""

    data: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)
    """Key path -> line number, from 1."""
    duplicates: tuple[tuple[KeyPath, int], ...] = ()
    """Keys that are written a second time in the same section, and on which line."""


def parse_document(text: str, origin: str) -> YamlDocument:
    """Parse one YAML document.

    Raises:
        ConfigError: the text is not YAML; ``origin`` (file name) and line are named.
    """
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return YamlDocument(data=None)
        entries = list(_entries(root, ()))
        data = loader.construct_document(root)
    except yaml.YAMLError as error:
        raise ConfigError(_syntax_message(error, origin)) from error
    finally:
        loader.dispose()
    lines: dict[KeyPath, int] = {}
    duplicates = []
    for path, line in entries:
        if path in lines:
            duplicates.append((path, line))
        else:
            lines[path] = line
    return YamlDocument(data=data, lines=lines, duplicates=tuple(duplicates))


def parse_value(text: str, origin: str) -> Any:
    """The value of a flag, read as YAML."""
    return parse_document(text, origin).data


def render(data: Any) -> str:
    """Block-style YAML that :func:`parse_document` reads back to equal data."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def render_short(value: Any, limit: int = 80) -> str:
    """One line for an error message."""
    dumped = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=10_000)
    text = dumped.removesuffix("...\n").strip()
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _entries(node: yaml.Node, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    """Every key and list item below ``node``, in the order of the text."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            child = (*path, str(key.value))
            yield child, key.start_mark.line + 1
            yield from _entries(value, child)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*path, index), item.start_mark.line + 1
            yield from _entries(item, (*path, index))


def _syntax_message(error: yaml.YAMLError, origin: str) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        where = f"{origin}:{mark.line + 1}" if mark else origin
        problem = " ".join(part for part in (error.context, error.problem) if part)
    else:
        where, problem = origin, str(error)
    return f"{where}: not valid YAML: {problem}; check indentation, colons and quotes near that place"
