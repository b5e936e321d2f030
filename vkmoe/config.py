"""What the user asked: every option, its default, its flags and its one-line help.

The command line and the `VKMOE_*` environment variables are generated from these dataclasses.
Nothing here looks at a file or a device, and nobody writes back into a config.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from vkmoe.config_checks import check_expert_choices, check_fields, parse_ids, parse_size

__all__ = [
    "EngineConfig",
    "SamplingConfig",
    "check_fields",
    "environment_name",
    "option",
    "parse_ids",
    "parse_size",
]


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

    `flags` default to `--field-name`; `minimum` and `maximum` are inclusive. `metavar` stands for
    the value in help texts. `check` reads a text and raises UsageError where it is malformed.
    """
    metadata = {
        "help": help, "flags": flags, "minimum": minimum, "maximum": maximum,
        "metavar": metavar, "check": check,
    }  # fmt: skip
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

    # ----- the expert cache -----
    expert_cache: str | None = option(
        None,
        "Device memory for experts, all layers together, such as 6GiB, 500MiB or plain bytes "
        "(GB = 10^9, GiB or G = 2^30); the other experts are read from host memory. "
        "Default: what weights, KV cache and activations leave of the device; none where it shares "
        "the host's memory, and reads all in place.",
        "--expert-cache",
        metavar="SIZE",
        check=parse_size,
    )
    expert_slots: int | None = option(
        None,
        "How many experts of each layer the device holds; instead of --expert-cache. "
        "Default: as many as fit.",
        "--expert-slots",
        "--moe-expert-cache-size",
        minimum=1,
    )
    expert_policy: Literal["lru", "slru", "lfru"] = option(
        "slru",
        "Which expert leaves the device when another needs its slot: the one unused for longest "
        "(lru), the least used that was not used again soon (slru), or the one with the least "
        "frequent and recent uses (lfru).",
        "--expert-policy",
    )
    expert_allocation: Literal["layer", "global"] = option(
        "layer",
        "Whether each layer keeps its own slots, or layers with experts of one size share them.",
        "--expert-allocation",
    )
    expert_half_life: float = option(
        64.0,
        "Tokens after which a use of an expert counts half; fewer follow a new subject sooner.",
        "--expert-half-life",
        minimum=1,
    )
    moe_warmpin: int | None = option(
        None,
        "Experts of each layer to keep on the device once their uses are known: the most used, in "
        "at most half of the slots; 0: none. Default: as many as a token uses, where not all fit.",
        "--moe-warmpin",
        minimum=0,
    )
    moe_warmpin_after: int = option(
        64,
        "Tokens after which --moe-warmpin chooses, and after as many more chooses anew.",
        "--moe-warmpin-after",
        minimum=1,
    )
    expert_resident_selection: Literal["first_n", "frequency", "manual"] | None = option(
        None,
        "Experts to keep on the device: the first of each layer (first_n) or those named (manual) "
        "from the start, or those used most (frequency) once --expert-warmup-tokens have passed, "
        "from the start those of --expert-profile. Default: none, manual with "
        "--expert-resident-ids.",
        "--expert-resident-selection",
    )
    expert_num_resident: int | None = option(
        None,
        "How many experts of each layer --expert-resident-selection keeps. Default: all slots.",
        "--expert-num-resident",
        minimum=1,
    )
    expert_warmup_tokens: int = option(
        4096,
        "Tokens after which --expert-resident-selection frequency chooses, once; until then the "
        "cache has no residents but those of a profile.",
        "--expert-warmup-tokens",
        minimum=1,
    )
    expert_resident_ids: str | None = option(
        None,
        "Experts to keep on the device, the same of every layer, such as 1,2,3.",
        "--expert-resident-ids",
        metavar="IDS",
        check=parse_ids,
    )
    expert_profile: str | None = option(
        None,
        "File of expert uses: read at the start if it is there, so that the cache starts warm, and "
        "written at the end.",
        "--expert-profile",
        metavar="FILE",
    )
    expert_stats: str | None = option(
        None,
        "Write hit rates by layer to this file at the end, as text, and as JSON beside it.",
        "--expert-stats",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        check_expert_choices(self)


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
