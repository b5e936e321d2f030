"""What the user asked: every option, its default, its flags and its one-line help.

The command line and the `VKMOE_*` environment variables are generated from these dataclasses.
Nothing here looks at a file or a device, and nobody writes back into a config.
"""

from __future__ import annotations

import sys
from dataclasses import Field, dataclass, field, fields
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

from vkmoe.errors import UsageError

__all__ = ["EngineConfig", "SamplingConfig", "check_fields", "environment_name", "option"]

FLOAT_MAX = sys.float_info.max


def option(
    default: Any, help: str, *flags: str, minimum: float | None = None, maximum: float | None = None
) -> Any:
    """A dataclass field that is also a command-line option.

    `flags` default to `--field-name`; `minimum` and `maximum` are inclusive.
    """
    metadata = {"help": help, "flags": flags, "minimum": minimum, "maximum": maximum}
    return field(default=default, metadata=metadata)


def environment_name(field_name: str) -> str:
    """The environment variable that sets an option: `ctx_size` -> `VKMOE_CTX_SIZE`."""
    return "VKMOE_" + field_name.upper()


@dataclass(frozen=True)
class EngineConfig:
    """How a model is loaded and run."""

    device: str | None = option(
        None,
        "Vulkan device: its index or part of its name (see `vkmoe devices`). "
        "Default: discrete before integrated before CPU.",
        "--device",
    )
    ctx_size: int | None = option(
        None,
        "Context length in tokens, prompt and reply together. "
        "Default: the model's own, at most 8192.",
        "-c",
        "--ctx-size",
        minimum=1,
    )
    kv_type: Literal["f16", "f32"] = option("f16", "Number format of the KV cache.", "--kv-type")
    validation: bool = option(
        False,
        "Run under the Vulkan validation layer with synchronisation validation "
        "(slow; for finding driver and vkmoe bugs).",
        "--validation",
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen. Order: penalties, top-k, top-p, min-p, temperature, draw."""

    temp: float = option(
        0.8, "Temperature; 0 always takes the most likely token.", "--temp", minimum=0
    )
    top_k: int = option(
        40, "Keep only the k most likely tokens; 0 keeps all.", "--top-k", minimum=0
    )
    top_p: float = option(
        0.95,
        "Keep the smallest set of tokens whose probability reaches p; 1 keeps all.",
        "--top-p",
        minimum=0,
        maximum=1,
    )
    min_p: float = option(
        0.05,
        "Drop tokens less likely than this times the most likely one; 0 drops none.",
        "--min-p",
        minimum=0,
        maximum=1,
    )
    repeat_penalty: float = option(
        1.0,
        "Divide the logits of recent tokens by this (multiply negative ones); 1 is off.",
        "--repeat-penalty",
        minimum=0.01,
    )
    repeat_last_n: int = option(
        64,
        "How many recent tokens the penalties look at; -1 means all.",
        "--repeat-last-n",
        minimum=-1,
    )
    presence_penalty: float = option(
        0.0, "Subtract this from the logit of every recent token once.", "--presence-penalty"
    )
    frequency_penalty: float = option(
        0.0,
        "Subtract this from the logit of a recent token for each time it occurred.",
        "--frequency-penalty",
    )
    seed: int | None = option(
        None,
        "Seed of the random draw. Default: a random one, printed at the end.",
        "--seed",
        minimum=0,
    )

    def __post_init__(self) -> None:
        check_fields(self)


def check_fields(config: Any) -> None:
    """Check a config made in Python: numbers, their ranges, choices.

    Numbers must be finite, and of type int where the field is. Raises UsageError naming the field.
    """
    hints = get_type_hints(type(config))
    for item in fields(config):
        value, kinds = getattr(config, item.name), get_args(hints[item.name]) or (hints[item.name],)
        if value is None and NoneType in kinds:
            continue
        if int in kinds or float in kinds:
            _check_number(item.name, value, whole=int in kinds)
            _check_range(item, value)
    if isinstance(config, EngineConfig) and config.kv_type not in ("f16", "f32"):
        raise UsageError(f"kv_type is {config.kv_type!r}", "use f16 or f32")


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
