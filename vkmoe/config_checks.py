"""What makes a config wrong: fields against their types, contradictions, sizes and ids as text.

Owns no option: which fields there are, their bounds and defaults are config.py's.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import Field, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from vkmoe.errors import UsageError

__all__ = [
    "check_expert_choices",
    "check_fields",
    "parse_ids",
    "parse_size",
    "predictor_contradicts",
]

FLOAT_MAX = sys.float_info.max
MAX_SIZE = 1 << 62
SIZE = re.compile(r"(?=\.?\d)(\d*)(\.\d*)?\s*([a-z]*)", re.IGNORECASE | re.ASCII)
MAX_DIGITS = 19  # of MAX_SIZE; Python refuses to read thousands of them
UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtpe", 1):
    UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def check_fields(config: Any) -> None:
    """Check a config made in Python: types, finite numbers, their ranges, choices, text forms.

    Raises UsageError naming the field (for a text form, its flag).
    """
    hints = get_type_hints(type(config))
    for item in fields(config):
        value, kinds = getattr(config, item.name), _kinds(hints[item.name])
        if value is None and NoneType in kinds:
            continue
        if bool in kinds:
            _check_switch(item.name, value)
        elif int in kinds or float in kinds:
            _check_number(item.name, value, whole=int in kinds)
            _check_range(item, value)
        elif str in kinds:
            _check_text(item, value)
        elif choices := [word for kind in kinds if _is_literal(kind) for word in get_args(kind)]:
            _check_choice(item.name, value, choices)


def check_expert_choices(config: Any) -> None:
    """Refuse options of the expert cache that contradict each other, naming both."""
    _check_predictor(config)
    _check_residents(config)
    if config.expert_cache is not None and config.expert_slots is not None:
        raise UsageError(
            "--expert-cache and --expert-slots both say how much is cached", "give one of them"
        )


def predictor_contradicts(predictor: str | None, prefetch: bool | None) -> bool:
    """Whether --expert-predictor and --moe-predict-prefetch say opposite things (None: nothing)."""
    return predictor is not None and prefetch is not None and prefetch == (predictor == "none")


def _check_predictor(config: Any) -> None:
    predictor, prefetch = config.expert_predictor, config.moe_predict_prefetch
    if predictor_contradicts(predictor, prefetch):
        raise UsageError(
            f"--expert-predictor {predictor} contradicts "
            f"--{'' if prefetch else 'no-'}moe-predict-prefetch",
            "leave one of them out",
        )


def _check_residents(config: Any) -> None:
    selection, n_resident = config.expert_resident_selection, config.expert_num_resident
    if config.expert_resident_ids is None:
        if selection == "manual":
            raise UsageError(
                "--expert-resident-selection manual needs --expert-resident-ids",
                "name the experts, such as --expert-resident-ids 1,2,3",
            )
        if n_resident is not None and selection is None:
            raise UsageError(
                f"--expert-num-resident {n_resident} needs --expert-resident-selection",
                "choose first_n or frequency",
            )
        return
    if selection not in (None, "manual"):
        raise UsageError(
            f"--expert-resident-ids contradicts --expert-resident-selection {selection}",
            "leave one of them out; ids go with manual",
        )
    n_ids = len(parse_ids(config.expert_resident_ids))
    if n_resident not in (None, n_ids):
        raise UsageError(
            f"--expert-num-resident {n_resident} contradicts the {n_ids} experts of "
            "--expert-resident-ids",
            "leave out --expert-num-resident",
        )


def parse_size(text: str, flag: str = "--expert-cache") -> int:
    """Bytes of a size such as "6GiB", "1.5 g", "500 MB" or "1048576".

    KiB, MiB, GiB and so on and single letters are powers of 1024; KB, MB, GB of 1000. Raises
    UsageError with `flag` for anything else, for less than one byte and more than 2^62.
    """
    match = SIZE.fullmatch(text.strip())
    unit = UNITS.get(match[3].lower()) if match else None
    if match is None or unit is None:
        raise UsageError(f"{flag}: {text!r} is not a size", "write it as 6GiB, 500MiB or in bytes")
    whole, fraction = match[1].lstrip("0"), match[2] or ""
    value = MAX_SIZE + 1 if len(whole) > MAX_DIGITS else int(whole or "0") * unit
    if len(fraction) > 1:
        value += math.floor(float(fraction) * unit)
    if not 1 <= value <= MAX_SIZE:
        verdict = "too large, more than 2^62 bytes" if value else "less than one byte"
        raise UsageError(
            f"{flag}: {text!r} is {verdict}", "leave it out for what the device has room for"
        )
    return value


def parse_ids(text: str, flag: str = "--expert-resident-ids") -> tuple[int, ...]:
    """Expert ids of a list such as "1, 2,,3": distinct, in their order.

    Empty pieces and blanks do not matter. Raises UsageError with `flag` and the piece that is no
    id, and when there is none at all.
    """
    pieces = [piece.strip() for piece in text.split(",")]
    for piece in pieces:
        number = piece.isascii() and piece.isdigit()
        if piece and not (number and len(piece.lstrip("0")) < 10):
            verdict = "too large for an expert's id" if number else "not an expert's id"
            raise UsageError(
                f"{flag}: in {text!r}, {piece!r} is {verdict}",
                "write whole numbers from 0 with commas between them, such as 1,2,3",
            )
    ids = tuple(dict.fromkeys(int(piece.lstrip("0") or "0") for piece in pieces if piece))
    if not ids:
        raise UsageError(f"{flag}: {text!r} names no expert", "write ids such as 1,2,3")
    return ids


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The members of `A | B`; any other type alone."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _is_literal(kind: Any) -> bool:
    return get_origin(kind) is Literal


def _check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}", "use True or False")


def _check_number(name: str, value: Any, whole: bool) -> None:
    sound = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not sound or not (whole or abs(value) <= FLOAT_MAX):  # false for nan and infinity too
        noun = "a whole number" if whole else "a finite number"
        raise UsageError(f"{name} is {value!r}, not {noun}", "see --help for its meaning")


def _check_range(item: Field[Any], value: float) -> None:
    low, high = item.metadata.get("minimum"), item.metadata.get("maximum")
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise UsageError(f"{item.name} is {value}, must be {bounds}", "see --help for its meaning")


def _check_text(item: Field[Any], value: Any) -> None:
    if not isinstance(value, str):
        raise UsageError(f"{item.name} is {value!r}, not text", "see --help for its meaning")
    if (check := item.metadata.get("check")) is not None:
        check(value)


def _check_choice(name: str, value: Any, choices: list[Any]) -> None:
    if value not in choices:
        words = [str(choice) for choice in choices]
        raise UsageError(f"{name} is {value!r}", f"use {', '.join(words[:-1])} or {words[-1]}")
