"""Declares fields of dataclasses that are also options, and reads and checks what they are given.

A field's metadata says all that its option needs. Which options there are is in config.py.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import Field, field, fields
from decimal import Decimal
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from vkmoe.errors import UsageError

# ----- what an option says about itself -----


def option(
    default: Any,
    help: str,
    *flags: str,
    minimum: float | None = None,
    maximum: float | None = None,
    metavar: str | None = None,
    check: Callable[[str], object] | None = None,
) -> Any:
    """Declare a dataclass field that is also a command-line option.

    Without a long one among `flags`, `--field-name` is one besides. `minimum` and `maximum` are
    inclusive. `metavar` stands for the value in help texts. `check` reads a text and raises
    UsageError where it is malformed.
    """
    metadata = {
        "help": help, "flags": flags, "minimum": minimum, "maximum": maximum,
        "metavar": metavar, "check": check,
    }  # fmt: skip
    return field(default=default, metadata=metadata)


def share(default: float, help: str) -> Any:
    """Declare an option from 0 to 1."""
    return option(default, help, minimum=0, maximum=1)


def penalty(default: float, help: str) -> Any:
    """Declare an option from -100 to 100, a penalty of logits."""
    return option(default, help, minimum=-100, maximum=100)


def flags_of(item: Field[Any]) -> tuple[str, ...]:
    """List the flags of the option that a field declares, a short one first.

    A switch that is neither on nor off by default is "--on/--no-on".
    """
    words, given = item.name.replace("_", "-"), item.metadata["flags"]
    own = f"--{words}/--no-{words}" if item.type == "bool | None" else f"--{words}"
    has_long = any(flag.startswith("--") for flag in given)
    return (*given,) if has_long else (*given, own)


def environment_name(field_name: str) -> str:
    """Name the environment variable that sets an option: `ctx_size` -> `VKMOE_CTX_SIZE`."""
    return "VKMOE_" + field_name.upper()


def long_flag(flags: tuple[str, ...], value: Any = True) -> str:
    """Choose the first long flag of an option; of a switch, the form that gives it `value`.

    ("-c", "--ctx-size") -> --ctx-size; ("--keep/--no-keep",) -> --keep, and --no-keep for False.
    """
    on, _, off = next(flag for flag in flags if flag.startswith("--")).partition("/")
    return off if off and value is False else on


# ----- sizes and ids, written as text -----

_MAX_SIZE = 1 << 62
_SIZE = re.compile(r"(?=\.?\d)(\d*\.?\d*)\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtpe", 1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def parse_size(text: str) -> int:
    """Read a size such as "6GiB", "1.5 g", "500 MB" or "1048576" as bytes.

    KiB, MiB, GiB and so on and single letters are powers of 1024; KB, MB, GB of 1000. Raises
    UsageError for anything else, for less than one byte and more than 2^62.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise UsageError(f"{text!r} is not a size", "write it as 6GiB, 500MiB or in bytes")
    value = Decimal(match[1]) * unit
    if not 1 <= value <= _MAX_SIZE:
        verdict = "too large, more than 2^62 bytes" if value > 1 else "less than one byte"
        raise UsageError(f"{text!r} is {verdict}", "leave it out for what the device has room for")
    return int(value)


def in_mib(n_bytes: int) -> str:
    """Write bytes for people: whole MiB, tenths where they are few, or KiB."""
    mib = 1 << 20
    if 0 < n_bytes < mib:
        return f"{-(-n_bytes // 1024):,} KiB"
    digits = 1 if 0 < n_bytes < 10 * mib else 0
    return f"{max(0, n_bytes) / mib:,.{digits}f} MiB"


def parse_margin(text: str) -> int:
    """Read a size as `parse_size` does, or 0."""
    return 0 if text.strip() == "0" else parse_size(text)


def parse_mib(text: str) -> int:
    """Read a size as `parse_size` does, but a number alone counts MiB; -1 is the most there can be.

    It may be 0.
    """
    text = text.strip()
    if text == "-1":
        return _MAX_SIZE
    is_whole = text.isascii() and text.isdigit()
    return parse_margin(f"{text}MiB" if is_whole and text.strip("0") else text)


def parse_ids(text: str) -> tuple[int, ...]:
    """Read a list of expert ids such as "1, 2,,3"; they come out distinct and in their order.

    Empty pieces and blanks do not matter. Raises UsageError with the piece that is no id, and when
    there is none at all.
    """
    pieces = [piece.strip() for piece in text.split(",")]
    for piece in pieces:
        number = piece.isascii() and piece.isdigit()
        if piece and not (number and len(piece.lstrip("0")) < 10):
            verdict = "too large for an expert's id" if number else "not an expert's id"
            raise UsageError(
                f"in {text!r}, {piece!r} is {verdict}",
                "write whole numbers from 0 with commas between them, such as 1,2,3",
            )
    ids = tuple(dict.fromkeys(int(piece.lstrip("0") or "0") for piece in pieces if piece))
    if not ids:
        raise UsageError(f"{text!r} names no expert", "write ids such as 1,2,3")
    return ids


# ----- texts, written as JSON -----

_MOST_BREAKERS, _LONGEST_BREAKER = 16, 40


def parse_breakers(text: str) -> tuple[str, ...]:
    """Read a list of texts such as '["\\n", ":"]'. Raises UsageError for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise UsageError(f"{text[:100]!r} is not a JSON list of texts", 'write it as ["\\n", ":"]')
    if len(found) > _MOST_BREAKERS or not all(0 < len(each) <= _LONGEST_BREAKER for each in found):
        raise UsageError(
            "there are too many texts, or one is too long or empty",
            f"give {_MOST_BREAKERS} at most, of 1 to {_LONGEST_BREAKER} characters",
        )
    return tuple(found)


# ----- what a value may be -----

_SEE_HELP = "see --help for its meaning"


# It takes milliseconds, where plans make many configs.
_hints: Callable[[type], dict[str, Any]] = cache(get_type_hints)


def check_fields(config: Any) -> None:
    """Check the type of every field of a dataclass, and its range, choices or form as text.

    Raises UsageError naming the field (for a text form, its flag).
    """
    hints = _hints(type(config))
    for item in fields(config):
        hint, value = hints[item.name], getattr(config, item.name)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if value is None and NoneType in kinds:
            continue
        if bool in kinds:
            if not isinstance(value, bool):
                raise UsageError(f"{item.name} is {value!r}", "use True or False")
        elif int in kinds or float in kinds:
            _check_number(item, value, whole=int in kinds)
        elif str in kinds:
            _check_text(item, value)
        elif value not in (choices := [word for kind in kinds for word in get_args(kind)]):
            words = f"{', '.join(choices[:-1])} or {choices[-1]}"
            raise UsageError(f"{item.name} is {value!r}", f"use {words}")


def _check_number(item: Field[Any], value: Any, whole: bool) -> None:
    sound = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    # The comparison is false for nan and infinity too.
    if not sound or not (whole or abs(value) <= sys.float_info.max):
        noun = "a whole number" if whole else "a finite number"
        raise UsageError(f"{item.name} is {value!r}, not {noun}", _SEE_HELP)
    low, high = item.metadata["minimum"], item.metadata["maximum"]
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise UsageError(f"{item.name} is {value}, must be {bounds}", _SEE_HELP)


def _check_text(item: Field[Any], value: Any) -> None:
    if not isinstance(value, str):
        raise UsageError(f"{item.name} is {value!r}, not text", _SEE_HELP)
    try:
        if (check := item.metadata["check"]) is not None:
            check(value)
    except UsageError as error:
        raise UsageError(f"{long_flag(flags_of(item))}: {error}", error.hint) from None
