"""Turns values of declared types into plain JSON, and JSON into such values again.

The types are dataclasses and named tuples, and what their fields have: numbers that are not
negative, texts, literals, tuples, sets and mappings. Reading checks every part by its type. Knows
no file, and no field by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from inspect import signature
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
MOST = 1 << 62  # of a number
_NOUNS = {int: "number of bytes or items", float: "speed or time", str: "text", bool: "yes or no"}


def plain(value: Any) -> Any:
    """Write a value as JSON has it."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    kind: Any = type(value)
    if names := _hints(kind):
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, frozenset):
        return sorted(value)
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


def typed(kind: type[T], value: Any) -> T:
    """Build a value of a type from plain JSON. Raises ValueError that says what is wrong in it."""
    built: T = _built(kind, value)
    return built


def _built(kind: Any, value: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None and NoneType in inner else _built(inner[0], value)
    if isinstance(value, dict) and _hints(kind):
        return _with_fields(kind, value)
    if isinstance(value, dict) and origin is Mapping:
        return {_built(inner[0], key): _built(inner[1], item) for key, item in value.items()}
    if isinstance(value, list) and origin is frozenset:
        return frozenset(_built(inner[0], item) for item in value)
    if isinstance(value, list) and origin is tuple:
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) == len(value):
            return tuple(map(_built, kinds, value))
    numbers = int | float if kind is float else int
    if kind in (int, float) and isinstance(value, numbers) and not isinstance(value, bool):
        if 0 <= value < MOST:
            return kind(value)
    elif (origin is Literal and value in inner) or (kind in (str, bool) and type(value) is kind):
        return value
    name = _NOUNS.get(kind) or getattr(kind, "__name__", kind)
    noun = f"one of {', '.join(inner)}" if origin is Literal else f"a {name}"
    raise ValueError(f"{repr(value)[:60]} is not {noun}")


def _with_fields(kind: Any, value: Mapping[str, Any]) -> Any:
    hints = _hints(kind)
    for name in value:
        if name not in hints:
            raise ValueError(f"{name!r} is not known")
    for name, field in signature(kind).parameters.items():
        if field.default is field.empty and name not in value:
            raise ValueError(f"it lacks {name!r}")
    return kind(**{name: _built(hints[name], item) for name, item in value.items()})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the types of a class's fields; {} for what is no dataclass or named tuple."""
    has_fields = is_dataclass(kind) or hasattr(kind, "_fields")
    return get_type_hints(kind) if has_fields else {}
