"""What is wrong with a configuration, in people's language: key path, value given, rule, remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel

from tlt.config.yaml_text import KeyPath, render_short

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

_WORDED_TYPES = {
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text; quote it",
    "model_type": "must be a section of 'key: value' lines",
    "dict_type": "must be a section of 'key: value' lines; {} for an empty one",
    "tuple_type": "must be a list, e.g. [a, b]",
    "list_type": "must be a list, e.g. [a, b]",
}
_BOUNDS = {
    "greater_than": ("gt", "must be greater than"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than": ("lt", "must be less than"),
    "less_than_equal": ("le", "must be at most"),
    "string_pattern_mismatch": ("pattern", "must match the pattern"),
}


def dotted(path: KeyPath) -> str:
    """``("a", 0, "b")`` -> ``a.0.b``, which is also the spelling of a flag."""
    return ".".join(str(part) for part in path)


def place_at(schema: type[BaseModel], data: Any, path: KeyPath) -> tuple[type[BaseModel] | None, FieldInfo | None]:
    """What the schema has at a key path.

    Args:
        data: the values so far; they decide which member of a discriminated union applies.

    Returns:
        The section class whose keys stand directly below (``None`` at a plain value or a free mapping), and
        the field that the path ends at (``None`` at the top, at a list item and outside the schema).
    """
    section: type[BaseModel] | None = schema
    info: FieldInfo | None = None
    for part in path:
        data = child(data, part)
        if isinstance(part, int):
            info = None
        elif section is None or part not in section.model_fields:
            return None, None
        else:
            info = section.model_fields[part]
            section = _section_of(info.annotation, info.discriminator, data)
    return section, info


def child(data: Any, part: str | int) -> Any:
    """The value below a key or list index, or ``None`` where there is none."""
    if isinstance(data, dict):
        return data.get(part)
    if isinstance(data, list) and isinstance(part, int) and part < len(data):
        return data[part]
    return None


def key_path(schema: type[BaseModel], data: Any, loc: tuple[str | int, ...]) -> KeyPath:
    """The path as the person wrote it: pydantic's, without the tags that it adds at discriminated unions."""
    path: KeyPath = ()
    after_union = False
    for part in loc:
        if after_union:
            after_union = False
            continue
        path = (*path, part)
        _, info = place_at(schema, data, path)
        after_union = info is not None and info.discriminator is not None
    return path


def describe(schema: type[BaseModel], data: Any, path: KeyPath, error: ErrorDetails) -> str:
    """One problem as ``key = value: rule; remedy``."""
    kind, context = error["type"], error.get("ctx", {})
    name, given = dotted(path), f"{dotted(path)} = {render_short(error['input'])}"
    if kind == "value_error":
        rule = error["msg"].removeprefix("Value error, ")
        return f"{name}: {rule}" if name else rule
    section, info = place_at(schema, data, path)
    if kind == "missing":
        hint = f" (keys: {', '.join(section.model_fields)})" if section else ""
        return f"{name}: required, and not given; add it{hint}"
    if kind == "extra_forbidden":
        parent, _ = place_at(schema, data, path[:-1])
        known = parent.model_fields if parent else ()
        return f"{given}: unknown key; {_did_you_mean(path[-1], known, 'keys here')}"
    if kind == "union_tag_not_found" and info is not None:
        tags = [tag for member in get_args(info.annotation) for tag in _tags(member, info.discriminator)]
        return f"{given}: '{info.discriminator}' is required here; add it, one of: {', '.join(tags)}"
    if kind == "union_tag_invalid":
        key = context["discriminator"].strip("'")
        hint = _did_you_mean(context["tag"], _quoted(context["expected_tags"]), "choose one of")
        return f"{name}.{key} = {context['tag']}: unknown value; {hint}"
    if kind == "literal_error":
        hint = _did_you_mean(error["input"], _quoted(context["expected"]), "choose one of")
        return f"{given}: unknown value; {hint}"
    return f"{given}: {_rule(kind, context, error['msg'])}"


def _rule(kind: str, context: dict[str, Any], message: str) -> str:
    if kind in _WORDED_TYPES:
        return _WORDED_TYPES[kind]
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        limit = context[bound]
        return f"{words} {limit:g}" if isinstance(limit, (int, float)) else f"{words} {limit}"
    if kind == "too_short":
        return f"must have at least {context['min_length']} entry; add one"
    return message[0].lower() + message[1:]


def _did_you_mean(word: object, known: Iterable[str], otherwise: str) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(str(word), known, n=1)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"{otherwise}: {', '.join(known)}" if known else "remove it"


def _quoted(text: str) -> list[str]:
    """pydantic's "'a', 'b' or 'c'" as a list."""
    return re.findall(r"'([^']*)'", text)


def _tags(member: type[BaseModel], discriminator: object) -> tuple[str, ...]:
    return get_args(member.model_fields[str(discriminator)].annotation)


def _section_of(annotation: Any, discriminator: object, data: Any) -> type[BaseModel] | None:
    """The section class that an annotation leads to, through ``X | None``, lists and discriminated unions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    members = [a for a in get_args(annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
    if discriminator is not None:
        tag = child(data, str(discriminator))
        members = [member for member in members if tag in _tags(member, discriminator)]
    return members[0] if members else None
