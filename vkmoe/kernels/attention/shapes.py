"""This module says what a model fixes of its attention, and how that is spread over a device.

Owns no kernel: attention.py runs these. A split must be kept in sync with attention_state.glsl.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from vkmoe.choices import KvType
from vkmoe.facts import Attention, LatentSpec, QkNorm
from vkmoe.kernels.tuning import Tuning
from vkmoe.kv_types import (
    BLOCK_BYTES,
    KV_NUMBERS,
    QUANT_BITS,
    KvTypes,
    both,
    hadamard_block,
    region_bytes,
)

UNIT_DIMS = 8  # dims a lane loads at once; rows of the cache are whole units
# What the shaders have room for.
MAX_HEAD_DIM, MAX_RANK, MAX_ROPE_DIM = 512, 1024, 256
MAX_CACHE_BYTES = 1 << 32  # a cache of a layer is smaller
# As the shaders number them.
ROPE_STYLES = {"neox": 0, "normal": 1}
NORM_MODES: dict[QkNorm, int] = {"none": 0, "per_head": 1, "full_width": 2, "per_head_turned": 3}


@dataclass(frozen=True)
class AttentionShape:
    """Describes grouped-query attention.

    Rows of qkv are q [n_heads * head_dim], then k and v [n_kv_heads * head_dim]; where they bring
    no k and v, words stand for these that kernels make nothing of. A layer has a cache of keys and
    one of values, [n_kv_heads][n_places][head_dim] each.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    rotary_dim: int
    context: int  # positions of a sequence
    rope_style: Literal["neox", "normal"]
    norm: QkNorm  # RMSNorm of q and k
    eps: float
    scale: float
    kv_types: KvTypes
    window: int = 0  # positions seen, the token's own included; 0 = all
    ring: int = 0  # places, a power of two: a position has that of its number modulo these; 0 = own
    sinks: bool = False  # a learnt logit per head takes part in the softmax's denominator only
    value_norm: bool = False  # RMSNorm of v of each KV head, without a gain
    appends: bool = True  # rows bring k and v; else the caches are another layer's

    def __post_init__(self) -> None:
        assert self.head_dim % UNIT_DIMS == 0 and UNIT_DIMS <= self.head_dim <= MAX_HEAD_DIM, self
        assert self.n_heads % self.n_kv_heads == 0, self
        assert self.rotary_dim % 2 == 0 and 2 <= self.rotary_dim <= self.head_dim, self
        assert self.context >= 1 and max(self.cache_bytes) < MAX_CACHE_BYTES, self
        assert self.window >= 0 and (self.ring == 0 or 0 < self.window <= self.ring), self
        assert self.ring & (self.ring - 1) == 0, self
        # No model has both: kernels take all heads of v, or of q, together there.
        assert self.norm != "full_width" or (self.appends and not self.value_norm), self

    @property
    def n_places(self) -> int:
        """Count the positions of a KV head that have rows at once."""
        return min(self.ring or self.context, self.context)

    @property
    def group(self) -> int:
        """Count the query heads that share a row of the cache."""
        return self.n_heads // self.n_kv_heads

    @property
    def row_dim(self) -> int:
        """Count the elements that a query head is multiplied with."""
        return self.head_dim

    value_dim = row_dim  # the elements of a head's output

    @property
    def qkv_width(self) -> int:
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim

    @property
    def cache_bytes(self) -> tuple[int, ...]:
        """Count the bytes of a region of one layer's caches: of keys, and of values."""
        n_rows = self.n_kv_heads * self.n_places
        return tuple(region_bytes(kv_type, n_rows, self.head_dim) for kv_type in self.kv_types)

    @property
    def hadamard_blocks(self) -> tuple[int, int]:
        """Count the numbers of a key, and of a value, that are transformed together."""
        keys, values = (hadamard_block(kv_type, self.head_dim) for kv_type in self.kv_types)
        return keys, values

    @property
    def gain_widths(self) -> tuple[int, ...]:
        """Count the numbers of each norm gain: of q, and of k."""
        if self.norm == "none":
            return ()
        heads = (self.n_heads, self.n_kv_heads) if self.norm == "full_width" else (1, 1)
        return tuple(n * self.head_dim for n in heads)

    @property
    def rope_bytes(self) -> int:
        """Count the bytes of the (cos, sin) table [context][rotary_dim / 2], f32 pairs."""
        return self.context * self.rotary_dim * 4


@dataclass(frozen=True)
class LatentShape:
    """Describes heads that share one compressed row per position (DeepSeek-V2, arXiv:2405.04434).

    A row [kv_rank | rope_dim] is key of all heads, and its first kv_rank dims are the value: k and
    v up-projections are absorbed into the query and the output. A layer has one cache [context]
    [kv_rank + rope_dim]. A head of the raw q is [nope_dim | rope_dim].
    """

    n_heads: int
    kv_rank: int
    rope_dim: int
    nope_dim: int
    context: int  # positions in the cache
    eps: float  # of the RMSNorm of the first kv_rank dims
    scale: float
    kv_type: KvType
    rope_style: Literal["neox", "normal"] = "normal"
    window: ClassVar[int] = 0  # all positions are seen
    appends: ClassVar[bool] = True
    sinks: ClassVar[bool] = False

    def __post_init__(self) -> None:
        assert self.kv_rank % UNIT_DIMS == 0 and UNIT_DIMS <= self.kv_rank <= MAX_RANK, self
        assert self.rope_dim % UNIT_DIMS == 0 and UNIT_DIMS <= self.rope_dim <= MAX_ROPE_DIM, self
        assert self.n_heads >= 1 and self.nope_dim >= 0, self
        assert self.context >= 1 and max(self.cache_bytes) < MAX_CACHE_BYTES, self

    @property
    def n_places(self) -> int:
        return self.context

    @property
    def group(self) -> int:
        return self.n_heads

    @property
    def row_dim(self) -> int:
        return self.kv_rank + self.rope_dim

    @property
    def value_dim(self) -> int:
        return self.kv_rank

    @property
    def q_width(self) -> int:
        """Count the words of the raw q."""
        return self.n_heads * (self.nope_dim + self.rope_dim)

    @property
    def kv_types(self) -> KvTypes:
        """Name the types of keys and values, which are of the same rows."""
        return both(self.kv_type)

    @property
    def cache_bytes(self) -> tuple[int, ...]:
        """Count the bytes of a region of one layer's only cache."""
        return (region_bytes(self.kv_type, self.context, self.row_dim),)

    @property
    def hadamard_blocks(self) -> tuple[int, int]:
        """Count the numbers of a row that are transformed together, as key and as value."""
        block = hadamard_block(self.kv_type, self.kv_rank, self.rope_dim)
        return block, block

    @property
    def gain_widths(self) -> tuple[int, ...]:
        """Count the numbers of the only norm gain."""
        return (self.kv_rank,)

    @property
    def rope_bytes(self) -> int:
        """Count the bytes of the (cos, sin) table [context][rope_dim / 2], f32 pairs."""
        return self.context * self.rope_dim * 4


Shape = AttentionShape | LatentShape


def shape_of(mixer: Attention, context: int, kv_types: KvTypes, eps: float, ring: int = 0) -> Shape:
    """Return the shape of a model's attention over so many positions, some in a `ring`."""
    scale = mixer.scale or mixer.query_dim**-0.5
    if isinstance(mixer, LatentSpec):
        return LatentShape(
            n_heads=mixer.n_heads,
            kv_rank=mixer.kv_rank,
            rope_dim=mixer.rope_dim,
            nope_dim=mixer.nope_dim,
            context=context,
            eps=eps,
            scale=scale,
            kv_type=kv_types.keys,
            rope_style=mixer.rope.style,
        )
    return AttentionShape(
        n_heads=mixer.n_heads,
        n_kv_heads=mixer.n_kv_heads,
        head_dim=mixer.head_dim,
        rotary_dim=mixer.rope.dim,
        context=context,
        rope_style=mixer.rope.style,
        norm=mixer.qk_norm,
        eps=eps,
        scale=scale,
        kv_types=kv_types,
        window=mixer.window,
        ring=ring,
        sinks=mixer.sinks,
        value_norm=mixer.value_norm,
        appends=mixer.own_kv,
    )


MAX_SPLITS = 128
SHARED_BYTES = 16384
CPU_WORKGROUPS, GPU_WORKGROUPS = 4, 256  # enough to fill the device
THREAD_SPLITS, THREAD_HEADS = 32, 16  # of all heads; heads that a thread takes at most
GPU_LATENT_WORKGROUPS = 128  # their partials are four times as wide
CPU_HEADS, CPU_LATENT_UNITS = 4, 36  # at most in a workgroup, and in one lane
WIDE_DIM = 256  # of heads that have more, CPU drivers' lanes hold no more units than of latent rows


@dataclass(frozen=True)
class AttentionSplit:
    """Says how attention is spread over the device.

    `n_splits` workgroups lie along the positions, a team of `team_lanes` lanes works on a position,
    and a workgroup on `workgroup_heads` query heads.
    """

    workgroup_size: int
    n_splits: int
    team_lanes: int
    step_positions: int
    workgroup_heads: int
    subgroup: bool

    @property
    def suffix(self) -> str:
        """Return the suffix of the SPIR-V variants that run it."""
        return "+subgroup" if self.subgroup else ""

    def partials_words(self, shape: Shape) -> int:
        """Count the words of the partials tensor [n_heads][n_splits][value_dim + 2]."""
        return shape.n_heads * self.n_splits * (shape.value_dim + 2)

    def shared_bytes(self, shape: Shape) -> int:
        """Count the bytes of shared memory of one workgroup, see attention_state.glsl."""
        if self.workgroup_size == 1:  # a thread of the CPU
            return 0
        n_teams = self.workgroup_size // self.team_lanes
        heads = self.workgroup_heads
        is_latent = isinstance(shape, LatentShape)
        n_input_rows = heads if is_latent else heads + 1
        values = max(self.step_positions * heads, n_input_rows)
        words = max(n_teams * shape.value_dim, n_input_rows * shape.row_dim)
        words += values * (self.workgroup_size + n_teams + 1) + values * n_teams + heads * n_teams
        own_row_bytes = shape.row_dim // UNIT_DIMS * _raw_bytes(shape)
        return 4 * words + own_row_bytes * len(shape.cache_bytes)

    def check(self, shape: Shape) -> None:
        """Assert what the kernels assume of a split; choose_split keeps to it."""
        assert self.n_splits <= MAX_SPLITS and self.shared_bytes(shape) <= SHARED_BYTES, self
        assert (shape.value_dim // UNIT_DIMS) % self.team_lanes == 0, (self, shape)
        assert shape.group % self.workgroup_heads == 0, (self, shape)


def choose_split(shape: Shape, tuning: Tuning, n_splits: int = 0) -> AttentionSplit:
    """Choose a split; 0 = enough splits to fill the device.

    Teams are as wide as subgroups where those divide a value, so that sums stay in registers; else
    as wide as a value has units, so that GPU lanes coalesce. Neither context nor window have a say
    in it, so that they cannot change a bit, and layers can share pipelines; unused splits return
    early.
    """
    if tuning.mapping == "threads":
        return _thread_split(shape, n_splits)
    on_cpu = tuning.mapping == "blocks"
    is_latent = isinstance(shape, LatentShape)
    wanted = GPU_LATENT_WORKGROUPS if is_latent else GPU_WORKGROUPS
    wanted = CPU_WORKGROUPS if on_cpu else wanted
    size = tuning.workgroup_size
    for lanes, subgroup in _teams(shape, tuning, size):
        shares = _cpu_shares(shape, lanes, tuning) if on_cpu else _gpu_shares(shape, lanes, tuning)
        for heads, positions in shares or ([] if subgroup else [(1, 1)]):
            splits = n_splits or min(-(-wanted // (shape.n_heads // heads)), MAX_SPLITS)
            split = AttentionSplit(size, splits, lanes, positions, heads, subgroup)
            if split.shared_bytes(shape) <= SHARED_BYTES:
                return split
    raise AssertionError(f"no split of {shape} fits in {SHARED_BYTES} bytes of shared memory")


def _thread_split(shape: Shape, n_splits: int) -> AttentionSplit:
    """Choose a split for the CPU's threads, of any number: they take splits in turn."""
    heads = max(n for n in _divisors(shape.group) if n <= THREAD_HEADS)
    splits = n_splits or -(-THREAD_SPLITS // (shape.n_heads // heads))
    return AttentionSplit(1, splits, 1, 1, heads, subgroup=False)


def _teams(shape: Shape, tuning: Tuning, size: int) -> Iterator[tuple[int, bool]]:
    """Yield lanes of a team and whether it is a subgroup, the best first."""
    units, subgroup_size = shape.value_dim // UNIT_DIMS, tuning.subgroup_size
    is_known = tuning.required_subgroup_size in (0, subgroup_size)  # Intel's drivers choose another
    if 0 < subgroup_size <= size and units % subgroup_size == 0 and is_known:
        yield subgroup_size, True
    yield max(n for n in _divisors(units) if n <= size), False


def _cpu_shares(shape: Shape, lanes: int, tuning: Tuning) -> list[tuple[int, int]]:
    """List query heads of a workgroup and positions per step, the best first.

    Shaders unroll over both, and CPU drivers take seconds to compile more.
    """
    most = CPU_HEADS
    is_wide = tuning.mapping == "blocks" and shape.row_dim > WIDE_DIM
    if is_wide or isinstance(shape, LatentShape):
        most = max(1, min(most, CPU_LATENT_UNITS // sum(_lane_units(shape, lanes))))
    heads = [n for n in reversed(_divisors(shape.group)) if n <= most]
    return [(n_heads, n_positions) for n_heads in heads for n_positions in (2, 1)]


def _gpu_shares(shape: Shape, lanes: int, tuning: Tuning) -> list[tuple[int, int]]:
    """List query heads of a workgroup and positions per step, the best first.

    A row is read once for all heads of a workgroup, and a step waits once for all its positions:
    their product counts the bytes that a device full of workgroups waits for at once. At the same
    product more heads read fewer bytes from the device's cache. Empty where a lane has no room.
    """
    most_words = _most_lane_words(tuning)
    shares = [(heads, n) for heads in _divisors(shape.group) for n in (1, 2, 4)]
    fitting = [share for share in shares if _lane_words(shape, lanes, *share) <= most_words]
    return sorted(fitting, key=lambda share: (share[0] * share[1], share), reverse=True)


def _most_lane_words(tuning: Tuning) -> int:
    """Limit what a lane holds, so that no compiler spills and waves can hide each other's waiting.

    Seen in what Mesa's compilers make of the shapes of real models: addresses and temporaries take
    half as many registers again.
    """
    if tuning.subgroup_size >= 64:  # AMD: four waves or more of each SIMD
        return 128 if tuning.required_subgroup_size else 42  # GCN has one size and fewer registers
    if tuning.subgroup_size == 32 and not tuning.required_subgroup_size:
        return 108  # NVIDIA: 255 registers
    return 72  # Intel: 128 registers; and what is not known


def _lane_words(shape: Shape, lanes: int, heads: int, positions: int) -> int:
    """Count the registers of a lane for queries, sums, loaded rows and their scores."""
    row_units, value_units = _lane_units(shape, lanes)
    loaded = zip((row_units, value_units), shape.kv_types, strict=True)
    loaded_words = [n_units * _unit_words(kv_type) for n_units, kv_type in loaded]
    held = heads * (row_units + value_units) * UNIT_DIMS
    return held + positions * (sum(loaded_words[: len(shape.cache_bytes)]) + heads)


def _unit_words(kv_type: KvType) -> int:
    """Count the words that a lane holds of a unit that it loaded.

    Where there are scales: quants and what their block shares, in three words at most.
    """
    return 3 if kv_type in BLOCK_BYTES else UNIT_DIMS * QUANT_BITS[kv_type] // 32


def _raw_bytes(shape: Shape) -> int:
    """Count the bytes that a unit takes once it is loaded, in either cache: whole 16-byte words."""
    return 32 if "f32" in shape.kv_types else 16


def shape_numbers(shape: Shape) -> dict[str, object]:
    """Return what kernels need of a shape, as they name it."""
    norms = {}
    if isinstance(shape, AttentionShape):
        norms = {"norm_mode": NORM_MODES[shape.norm], "value_norm": int(shape.value_norm)}
    return {
        **vars(shape),
        **type_numbers(shape),
        **dict(zip(("k_hadamard", "v_hadamard"), shape.hadamard_blocks, strict=True)),
        **norms,
        "rope_style": ROPE_STYLES[shape.rope_style],
        "window": shape.window,
        "ring": shape.n_places if shape.n_places < shape.context else 0,
        "row_dim": shape.row_dim,
        "value_dim": shape.value_dim,
    }


def type_numbers(shape: Shape) -> dict[str, int]:
    """Return the constants that tell kernels the types of caches."""
    keys, values = (KV_NUMBERS[kv_type] for kv_type in shape.kv_types)
    return {"k_type": keys, "v_type": values}


def _lane_units(shape: Shape, lanes: int) -> tuple[int, int]:
    """Count the units of a row and of a value that one lane works on."""
    return -(-shape.row_dim // UNIT_DIMS // lanes), -(-shape.value_dim // UNIT_DIMS // lanes)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
