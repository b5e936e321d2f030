"""What the user asked: every option, its default, its flags and its one-line help.

The command line and the `VKMOE_*` environment variables are generated from these dataclasses.
Nothing here looks at a file or a device, and nobody writes back into a config.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from vkmoe.config_checks import check_expert_choices, check_fields, parse_ids, parse_size
from vkmoe.config_fields import environment_name, long_flag, option
from vkmoe.config_sampling import SamplingConfig

__all__ = [
    "DEFAULT_PREDICTOR",
    "EngineConfig",
    "Predictor",
    "SamplingConfig",
    "check_fields",
    "environment_name",
    "long_flag",
    "option",
    "parse_ids",
    "parse_size",
]

Predictor = Literal["previous", "correlation", "frequency", "none"]
DEFAULT_PREDICTOR: Predictor = "correlation"  # where guessing pays, or was asked for


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

    # ----- moving experts before they are needed -----
    host_pool: str | None = option(
        None,
        "Host memory for experts, such as 8GiB; those it has no room for stay in the file and are "
        "read when they are needed. Default: the least of all experts, 70 % of the memory that is "
        "free, and the memory that the device can reach.",
        "--host-pool",
        metavar="SIZE",
        check=partial(parse_size, flag="--host-pool"),
    )
    executor: Literal["fused", "stepped"] | None = option(
        None,
        "Give a token to the device as a whole (fused), or stop at each router until the chosen "
        "experts are there (stepped; slower). Default: fused, where the host pool holds all "
        "experts.",
        "--executor",
    )
    miss: Literal["auto", "read", "gather"] = option(
        "auto",
        "How an expert without a slot is served: kernels read it in host memory (read), or a copy "
        "kernel brings it over first, in the same submit (gather). auto: as the measured speeds "
        "favour.",
        "--miss",
    )
    promote_on_read: bool | None = option(
        None,
        "Whether what is read of an expert without a slot is kept on the device at once, so that "
        "it need not cross the bus again. Default: yes, where there is a bus to cross.",
        "--promote-on-read/--no-promote-on-read",
    )
    expert_predictor: Literal["previous", "correlation", "frequency", "none"] | None = option(
        None,
        "How experts are guessed before they are needed: those of the last tokens (previous), "
        "those that used to follow them (correlation), those used most (frequency), or not at all "
        "(none). Default: correlation; none where copies overlap tokens that run in one piece.",
        "--expert-predictor",
    )
    moe_predict_prefetch: bool | None = option(
        None,
        "Whether experts are guessed before they are needed: yes is --expert-predictor correlation "
        "unless that names another, no is --expert-predictor none. Default: as there.",
        "--moe-predict-prefetch/--no-moe-predict-prefetch",
    )
    expert_admission: bool = option(
        True,
        "Whether an expert gets a slot only if it is likelier to be used next than the one that "
        "would leave; otherwise each that was missed gets one.",
        "--expert-admission/--no-expert-admission",
    )
    expert_copies: Literal["overlap", "wait"] | None = option(
        None,
        "Copy experts into slots while the token runs (overlap), or between two tokens (wait). "
        "Default: overlap, where the device has a queue for copies.",
        "--expert-copies",
    )

    # ----- what is kept of a run -----
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

    def predictor(self, overlaps: bool, stepped: bool) -> Predictor:
        """What guesses: what was asked, or what pays where copies overlap tokens, or tokens stop.

        Copies beside a token that runs in one piece are too few and too late for guesses: there
        the default is "none" (`python -m bench.prefetch`).
        """
        if self.moe_predict_prefetch is False:
            return "none"
        guesses = self.moe_predict_prefetch or stepped or not overlaps
        return self.expert_predictor or (DEFAULT_PREDICTOR if guesses else "none")
