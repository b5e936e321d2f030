"""Reading the text of an option's value, with errors that name it.

typer could read these types too, but what its errors say depends on its version, and not all of
them name the value; nor does it refuse `nan`. typer adds the flag and the variable to each error.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Callable
from typing import Any, Literal

import typer

from vkmoe.errors import UsageError

__all__ = ["placeholder", "reader"]

TRUE = ("1", "true", "t", "yes", "y", "on", "enabled")
FALSE = ("0", "false", "f", "no", "n", "off", "disabled")
FLAG = re.compile(r"^--[a-z-]+: ")  # of a check's message, which typer names already


def placeholder(kind: Any) -> str | None:
    """What stands for the value in help texts; None for a switch, which takes none."""
    if typing.get_origin(kind) is Literal:
        return "/".join(typing.get_args(kind))
    return {int: "INTEGER", float: "NUMBER", str: "TEXT", bool: None}[kind]


def reader(
    kind: Any,
    minimum: float | None = None,
    maximum: float | None = None,
    check: Callable[[str], object] | None = None,
) -> Callable[[Any], Any] | None:
    """A function from text (or the default) to int, float, bool or one of a Literal's words.

    It raises typer.BadParameter. Bounds are inclusive; words may be in capitals. None for a str
    without `check`, which needs no reading.
    """
    if typing.get_origin(kind) is Literal:
        return _one_of({word: word for word in typing.get_args(kind)})
    if kind is bool:
        return _one_of(dict.fromkeys(TRUE, True) | dict.fromkeys(FALSE, False))
    if kind in (int, float):
        return _number(kind, minimum, maximum)
    assert kind is str, f"no command-line form for {kind}"
    return None if check is None else _checked(check)


def _one_of(meanings: dict[str, Any]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        text = str(value).strip().lower()
        if text not in meanings:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(meanings)}.")
        return meanings[text]

    return read


def _number(
    kind: type[int] | type[float], minimum: float | None, maximum: float | None
) -> Callable[[Any], float]:
    noun = "a whole number" if kind is int else "a number"

    def read(value: Any) -> float:
        try:
            result = kind(value)
        except ValueError:
            result = math.nan
        if result != result or result in (math.inf, -math.inf):
            raise typer.BadParameter(f"{value!r} is not {noun}.")
        if minimum is not None and result < minimum:
            raise typer.BadParameter(f"{value!r} is less than {minimum:g}.")
        if maximum is not None and result > maximum:
            raise typer.BadParameter(f"{value!r} is more than {maximum:g}.")
        return result

    return read


def _checked(check: Callable[[str], object]) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        try:
            check(str(value))
        except UsageError as error:
            words = FLAG.sub("", str(error))
            raise typer.BadParameter(f"{words} ({error.hint}).") from error
        return str(value)

    return read
