"""This module owns what a user can ask for: every option, its default, its help and its checks.

The command line and the `VKMOE_*` environment variables are generated from the two dataclasses. A
config is checked when it is made, is never written to, and hands out sizes and lists of ids as
numbers. The module looks at no file and no device: what was found there is in facts.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

from vkmoe.choices import (
    POLICIES_IN_WORDS,
    CopyTiming,
    DraftWay,
    Executor,
    KvType,
    MissWay,
    ModeName,
    PolicyName,
    SlotSharing,
    TuningSource,
)
from vkmoe.errors import UsageError
from vkmoe.option_fields import (
    check_fields,
    flags_of,
    long_flag,
    option,
    parse_breakers,
    parse_ids,
    parse_margin,
    parse_mib,
    parse_size,
    penalty,
    share,
)

MAX_THREADS = 512
MAX_DRAFT_TOKENS = 7  # with the token before them, as many rows as are decoded together
MAX_ROWS = 2048  # of a batch: one workgroup sorts the experts of all


# ----- what is pinned -----


@dataclass(frozen=True)
class Pins:
    """Says which experts of each layer are kept in their slots, whatever options asked for it.

    They are those of certain `ids`, or the `n` of most "use" of late, in at most half of the slots.
    By use, the counts of a profile choose at the start, if there is one; then those of the run
    after every `after` tokens.
    """

    by: Literal["ids", "use"]
    n: int = 0  # 0: as many as a token uses
    ids: tuple[int, ...] = ()
    after: int = 0


# ----- the options -----
# ruff: noqa: RUF009  (an option is a field of its own, not a default that instances share)


@dataclass(frozen=True)
class SamplingConfig:
    """Says how the next token is chosen.

    The order is: penalties, DRY, biases, top-k, typical-p, top-p, min-p, XTC, temperature, draw.
    Mirostat does not go with these: biases, temperature and the draw alone stay beside it. All
    are those of llama.cpp.
    """

    temp: float = option(
        0.8, "Temperature; 0 always takes the most likely token that is left.", minimum=0
    )
    top_k: int = option(40, "Keep only the k most likely tokens; 0 keeps all.", minimum=0)
    top_p: float = share(
        0.95, "Keep the smallest set of tokens whose probability reaches p; 1 keeps all."
    )
    min_p: float = share(
        0.05, "Drop tokens less likely than this times the most likely one; 0 drops none."
    )
    typical_p: float = share(
        1.0,
        "Keep the most typical tokens, whose surprise is nearest to the entropy, until their "
        "probability exceeds p; 1 keeps all.",
    )
    xtc_probability: float = share(
        0.0,
        "How often XTC drops the tokens that reach its threshold, all but the least likely of "
        "them; 0 is off.",
    )
    xtc_threshold: float = share(
        0.1, "Probability from which XTC may drop a token; above 0.5 it never does."
    )
    repeat_penalty: float = option(
        1.0,
        "Divide the logits of recent tokens by this (multiply negative ones); 1 is off.",
        minimum=0.01,
        maximum=100,
    )
    repeat_last_n: int = option(
        64, "How many recent tokens the penalties look at; -1 means all.", minimum=-1
    )
    presence_penalty: float = penalty(
        0.0, "Subtract this from the logit of every recent token once."
    )
    frequency_penalty: float = penalty(
        0.0, "Subtract this from the logit of a recent token for each time it occurred."
    )
    dry_multiplier: float = penalty(
        0.0,
        "DRY subtracts this times base^(n - allowed length) from the logit of a token that would "
        "go on with a repeat of n tokens; 0 is off.",
    )
    dry_base: float = option(1.75, "Base of DRY's penalty.", minimum=1, maximum=100)
    dry_allowed_length: int = option(2, "From how many repeated tokens on DRY counts.", minimum=1)
    dry_penalty_last_n: int = option(
        -1, "How many recent tokens DRY looks at; -1 means all.", minimum=-1
    )
    dry_sequence_breakers: str = option(
        r'["\n", ":", "\"", "*"]',
        "Texts at which a repeat ends for DRY, as a list in JSON.",
        metavar="JSON",
        check=parse_breakers,
    )
    mirostat: int = option(
        0,
        "Keep the surprise of tokens near a target, by Mirostat 1 or 2, in place of all other "
        "steps but biases and temperature; 0 is off.",
        minimum=0,
        maximum=2,
    )
    mirostat_tau: float = option(
        5.0, "Target of Mirostat, in bits of surprise.", minimum=0, maximum=100
    )
    mirostat_eta: float = share(0.1, "How fast Mirostat adapts: its learning rate.")
    seed: int | None = option(
        None, "Seed of the random draw. Default: a random one, printed at the end.", minimum=0
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class EngineConfig:
    """Says how a model is loaded and run."""

    device: str | None = option(
        None,
        "Device: its index or part of its name (see `vkmoe devices`), cpu, or vulkan for the best "
        "with a Vulkan driver. Default: discrete before integrated before CPU.",
    )
    ctx_size: int | None = option(
        None,
        "Most tokens of prompt and reply together. Default: the model's own, as far as memory "
        "reaches: the KV cache grows with the text. There is room for 8192 of them in any case, or "
        "for fewer where these do not fit.",
        "-c",
        minimum=1,
    )
    cache_type_k: KvType = option(
        "f16",
        "Number format of keys in the KV cache: f32, f16, q8_0, q5_1 or q4_0. The last three take "
        "8.5, 6 and 4.5 bits for a number. Where a model caches one compressed row of a position "
        "(latent attention), this is the format of the row.",
        "-ctk",
    )
    cache_type_v: KvType | None = option(
        None,
        "Number format of values in the KV cache. Default: f16; with latent attention as "
        "--cache-type-k, and nothing else.",
        "-ctv",
    )
    gpu_layers: int | None = option(
        None,
        "Layers, from the first, whose weights besides routed experts are in device memory; the "
        "GPU reads those of the others in host memory, over the bus. More than there are: all. "
        "Default: all that fit.",
        "-ngl",
        minimum=0,
        metavar="N",
    )
    parallel: int = option(
        1,
        "How many sequences are processed at once; each has a context of its own in the KV cache.",
        "-np",
        minimum=1,
    )
    ubatch_size: int | None = option(
        None,
        "Most tokens of a prompt that are processed at once. Default: as many as the device "
        "favours, or fewer where experts gain more by the room.",
        "-ub",
        minimum=1,
        maximum=MAX_ROWS,
    )
    threads: int | None = option(
        None,
        "Threads that compute where the device is the CPU, or the experts that the CPU computes "
        "beside a GPU; the text is the same with any number. "
        "Default: one for each physical core.",
        "-t",
        minimum=1,
        maximum=MAX_THREADS,
    )
    draft: Literal["auto", DraftWay] = option(
        "auto",
        "Guess the next tokens and verify several at once: the same text, sooner. They are guessed "
        "by a layer of the model, or by a small model made with it (mtp), or from where the last "
        "ones stood before in the text (lookup). By default (auto) it is mtp where that is "
        "predicted to pay.",
    )
    draft_tokens: int = option(
        1,
        "Most tokens that --draft mtp guesses at a time. Each brings experts of its own.",
        minimum=1,
        maximum=MAX_DRAFT_TOKENS,
    )
    draft_model: str | None = option(
        None,
        "The file with the layer or the small model that --draft mtp guesses by. Default: the "
        "model's own, or one beside it that was made with it: mtp-*.gguf or *assistant*.gguf.",
        metavar="FILE",
    )
    cache_ram: str | None = option(
        None,
        "Most host memory for prompts that leave the KV cache, such as 4GiB, or a number of MiB; "
        "they come back by a copy. 0: none are kept; -1: all that weights and experts leave. "
        "Default: as much of that as 8GiB. It is taken as prompts come, and given back where other "
        "programs need it.",
        "-cram",
        "--cache-ram",
        metavar="SIZE",
        check=parse_mib,
    )
    validation: bool = option(
        False,
        "Run under the Vulkan validation layer with synchronisation validation "
        "(slow; for finding driver and vkmoe bugs).",
    )

    tuning: TuningSource = option(
        "remembered",
        "How kernels are launched: as `vkmoe tune` found best on the device (remembered), or as on "
        "every device of its kind (table), to repeat the bits of a run from elsewhere.",
    )

    canary: bool | None = option(
        None,
        "Whether the kernels that the model uses are compared with NumPy before the first token, "
        "once for each driver and device: some drivers compile kernels wrongly. Default: yes.",
    )

    vram_margin: str | None = option(
        None,
        "Device memory to leave to others, such as the desktop: 1GiB, 0.5g or 0. Default: 512MiB; "
        "where the device shares the host's memory 2GiB of that, or 8 %.",
        metavar="SIZE",
        check=parse_margin,
    )

    # ----- where experts are computed -----
    expert_mode: Literal["auto", ModeName] = option(
        "auto",
        "Where experts are computed: on the device, which holds all of them (resident), or some "
        "and reads the others in host memory (cache); those that have a slot on the device and "
        "the others on the CPU, at the same time (hybrid); or all on the CPU (cpu). "
        "auto: what is predicted to be fastest; where predictions do not tell, it is measured once "
        "for each model and device.",
    )
    cpu_moe: bool | None = option(
        None,
        "Whether the CPU computes all experts: yes is --expert-mode cpu, no rules it out. "
        "Default: as --expert-mode.",
    )
    n_cpu_moe: int | None = option(
        None,
        "The CPU computes the experts of the first N layers that have any; those of the others "
        "must fit on the device.",
        "-ncmoe",
        minimum=0,
        metavar="N",
    )

    # ----- the expert cache -----
    expert_cache: str | None = option(
        None,
        "Device memory for experts, all layers together, such as 6GiB, 500MiB or plain bytes "
        "(GB = 10^9, GiB or G = 2^30); the other experts are read from host memory, or are the "
        "CPU's (--expert-mode hybrid). "
        "Default: what weights, KV cache and activations leave of the device; none where it shares "
        "the host's memory, and reads all in place.",
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
    expert_policy: PolicyName = option(
        "forecast",
        "Which expert leaves the device when another needs its slot: "
        + "; ".join(f"{words} ({name})" for name, words in POLICIES_IN_WORDS.items())
        + ". forecast learns which experts each token uses, and gives an expert a slot only if it "
        "is likelier to be used than the one that leaves; with the others each that was missed "
        "gets one.",
    )
    expert_allocation: SlotSharing = option(
        "layer",
        "Whether each layer keeps its own slots, or layers with experts of one size share them.",
    )
    moe_warmpin: int | None = option(
        None,
        "Experts of each layer to keep on the device once their uses are known: the most used, in "
        "at most half of the slots; 0: none. Default: as many as a token uses, where not all fit; "
        "none with --expert-policy forecast.",
        minimum=0,
    )
    moe_warmpin_after: int = option(
        64,
        "Tokens after which --moe-warmpin chooses, and after as many more chooses anew.",
        minimum=1,
    )
    expert_resident_ids: str | None = option(
        None,
        "Experts to keep on the device, the same of every layer, such as 1,2,3.",
        metavar="IDS",
        check=parse_ids,
    )

    # ----- moving experts before they are needed -----
    host_pool: str | None = option(
        None,
        "Host memory for experts, such as 8GiB; those that neither it nor the device has room for "
        "stay in the file and are read when they are needed. Default: all of them, as far as the "
        "memory allows that is free (less 2GiB or 8 %, for others) and that the device can reach.",
        metavar="SIZE",
        check=parse_size,
    )
    executor: Executor | None = option(
        None,
        "Give a token to the device as a whole (fused), or stop at each router until the chosen "
        "experts are there (stepped; slower). Default: fused, where device and host memory hold "
        "all experts together.",
    )
    miss: Literal["auto", MissWay] = option(
        "auto",
        "How an expert without a slot is served: kernels read it in host memory (read), or a copy "
        "kernel brings it over first, in the same submit (gather; of one sequence, and not of "
        "prompts). auto: as the measured speeds favour.",
    )
    promote_on_read: bool | None = option(
        None,
        "Whether what is read of an expert without a slot is kept on the device at once, so that "
        "it need not cross the bus again. Default: yes, where there is a bus to cross and the room "
        "for it gains more than slots would.",
    )
    moe_predict_prefetch: bool | None = option(
        None,
        "Whether experts that are all but sure to be used are fetched before they are missed. "
        "Default: yes with --expert-policy forecast, which tells them; no with the others.",
    )
    expert_copies: CopyTiming | None = option(
        None,
        "Copy experts into slots while the token runs (overlap), or between two tokens (wait). "
        "Default: overlap, where the device has a queue for copies.",
    )

    # ----- what is kept of a run -----
    expert_profile: str | None = option(
        None,
        "File of expert uses: read at the start if it is there, so that the cache starts warm and "
        "layers have slots by what these gain, and written at the end. It tells which tokens there "
        "were, and which experts each used. A trace of `vkmoe trace`, or an importance file of "
        "llama.cpp (imatrix, GGUF), is read only.",
        metavar="FILE",
    )
    expert_stats: str | None = option(
        None,
        "Write hit rates by layer to this file at the end, as text, and as JSON beside it.",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        _check_mode(self)
        _check_expert_choices(self)

    # cached_property writes to the instance's dictionary, past the refusal of a frozen dataclass.

    @cached_property
    def expert_cache_bytes(self) -> int | None:
        """Return the bytes of `expert_cache`, or None where it was not given."""
        return None if self.expert_cache is None else parse_size(self.expert_cache)

    @cached_property
    def cache_ram_bytes(self) -> int | None:
        """Return the bytes of `cache_ram`, or None where it was not given."""
        return None if self.cache_ram is None else parse_mib(self.cache_ram)

    @cached_property
    def vram_margin_bytes(self) -> int | None:
        """Return the bytes of `vram_margin`, or None where it was not given."""
        return None if self.vram_margin is None else parse_margin(self.vram_margin)

    @cached_property
    def host_pool_bytes(self) -> int | None:
        """Return the bytes of `host_pool`, or None where it was not given."""
        return None if self.host_pool is None else parse_size(self.host_pool)

    @cached_property
    def resident_ids(self) -> tuple[int, ...]:
        """List the ids of `expert_resident_ids`, distinct, in order; () where none were given."""
        return () if self.expert_resident_ids is None else parse_ids(self.expert_resident_ids)

    @property
    def residents(self) -> Pins | None:
        """Return the pins of the experts that are to be kept for good, or None."""
        ids = self.resident_ids
        return None if self.expert_resident_ids is None else Pins("ids", len(ids), ids)

    @property
    def warm_pins(self) -> Pins | None:
        """Return the pins of those used most of late, or None where `moe_warmpin` is 0."""
        if self.moe_warmpin == 0:
            return None
        if self.moe_warmpin is None and self.expert_policy == "forecast":
            return None
        return Pins("use", self.moe_warmpin or 0, after=self.moe_warmpin_after)

    @property
    def mode(self) -> Literal["auto", ModeName]:
        """Name where experts are to be computed, whichever option says so."""
        if self.n_cpu_moe == 0:
            return "resident"
        return "cpu" if self.cpu_moe or self.n_cpu_moe is not None else self.expert_mode

    def written(self, name: str) -> str:
        """Write an option as on the command line; empty where it has its default."""
        value, (item,) = getattr(self, name), (x for x in fields(self) if x.name == name)
        if value == item.default:
            return ""
        flag = long_flag(flags_of(item), value)
        return flag if isinstance(value, bool) else f"{flag} {str(value).strip()}"

    @property
    def mode_option(self) -> str:
        """Write the option that says so, as on the command line; empty where none does."""
        if self.n_cpu_moe is not None:
            return self.written("n_cpu_moe")
        if self.cpu_moe is not None and (self.cpu_moe or self.expert_mode == "auto"):
            return self.written("cpu_moe")
        return self.written("expert_mode")

    @property
    def verifies(self) -> bool:
        """Say whether guesses are verified; with `auto` that is not decided yet."""
        return self.draft not in ("auto", "none")

    @property
    def n_guesses(self) -> int:
        """Return how many tokens a layer of the model guesses at a time."""
        return self.draft_tokens if self.draft == "mtp" else 0

    @property
    def slots_option(self) -> str:
        """Write the option that says how many experts have a slot; empty where none does."""
        return self.written("expert_slots") or self.written("expert_cache")

    @property
    def pool_option(self) -> str:
        """Write the option that says how large the host pool is; empty where it was not given."""
        return self.written("host_pool")


# ----- what makes a config wrong -----


def prefetch_contradicts(policy: str | None, prefetch: bool | None) -> bool:
    """Say whether --expert-policy contradicts --moe-predict-prefetch; None never does."""
    return policy not in (None, "forecast") and prefetch is True


OF_OTHER_MODES: dict[str, tuple[str, ...]] = {  # what a mode has no use for
    "resident": ("expert_cache", "expert_slots"),
    "hybrid": ("host_pool", "executor", "miss", "promote_on_read"),
    "cpu": ("expert_cache", "expert_slots", "host_pool", "executor", "miss", "promote_on_read"),
}


def _check_mode(config: EngineConfig) -> None:
    """Refuse options that contradict each other about where experts are computed, naming both."""
    asked, cpu_moe = config.mode_option, config.cpu_moe
    if config.n_cpu_moe is not None:
        if cpu_moe is not None:
            raise _contradiction(asked, config.written("cpu_moe"))
        cpu_moe = True
    if mode_contradicts(config.expert_mode, cpu_moe):
        first = asked if cpu_moe else config.written("cpu_moe")
        raise _contradiction(first, config.written("expert_mode"))
    for name in OF_OTHER_MODES.get(config.mode, ()):
        if getattr(config, name) is not False and (text := config.written(name)):
            raise _contradiction(text, asked)


def mode_contradicts(mode: str | None, cpu_moe: bool | None) -> bool:
    """Say whether --expert-mode contradicts --cpu-moe or --no-cpu-moe; None never does."""
    agreeing = ("auto", "cpu") if cpu_moe else ("auto", "resident", "cache")
    return mode is not None and cpu_moe is not None and mode not in agreeing


def _contradiction(one: str, other: str) -> UsageError:
    return UsageError(f"{one} contradicts {other}", "leave one of them out")


def _check_expert_choices(config: EngineConfig) -> None:
    """Refuse options of the expert cache that contradict each other, naming both."""
    if prefetch_contradicts(config.expert_policy, config.moe_predict_prefetch):
        raise _contradiction("--moe-predict-prefetch", f"--expert-policy {config.expert_policy}")
    if config.expert_cache is not None and config.expert_slots is not None:
        raise UsageError(
            "--expert-cache and --expert-slots both say how much is cached", "give one of them"
        )
