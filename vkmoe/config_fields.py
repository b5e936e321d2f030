"""The fields of a config that are also command-line options: what each says about itself.

Owns no option: which fields there are, their bounds and defaults are config.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

__all__ = ["environment_name", "long_flag", "option"]


def option(
    default: Any,
    help: str,
    *flags: str,
    minimum: float | None = None,
    maximum: float | None = None,
    metavar: str | None = None,
    check: Callable[[str], object] | None = None,
) -> Any:
    """A dataclass field that is also a command-line option.

    `flags` default to `--field-name`; a switch that can be turned off is "--on/--off". `minimum`
    and `maximum` are inclusive. `metavar` stands for the value in help texts. `check` reads a text
    and raises UsageError where it is malformed.
    """
    metadata = {
        "help": help, "flags": flags, "minimum": minimum, "maximum": maximum,
        "metavar": metavar, "check": check,
    }  # fmt: skip
    return field(default=default, metadata=metadata)


def environment_name(field_name: str) -> str:
    """The environment variable that sets an option: `ctx_size` -> `VKMOE_CTX_SIZE`."""
    return "VKMOE_" + field_name.upper()


def long_flag(flags: tuple[str, ...], value: Any = True) -> str:
    """The first long one, of a switch as it is given for `value`.

    ("-c", "--ctx-size") -> --ctx-size; ("--keep/--no-keep",) -> --keep, and --no-keep for False.
    """
    on, _, off = next(flag for flag in flags if flag.startswith("--")).partition("/")
    return off if off and value is False else on
