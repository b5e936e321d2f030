"""Decode attention of one token: norm, RoPE, KV append, split softmax over the cache, and the join.

Shaders: attention.comp, attention_combine.comp. Twins: vkmoe/reference/attention.py.
Sliding windows and sinks would be further constants of `AttentionShape`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Program, Range, TensorRef, memory_range
from vkmoe.ops.tuning import Tuning

__all__ = ["AttentionShape", "AttentionSplit", "KvCache", "attention", "choose_split"]

ATTENTION = kernel(
    "attention",
    "r:qkv r:params w:partials",
    "address:k_cache address:v_cache address:q_gain address:k_gain address:rope_table "
    "u32:context f32:eps f32:scale",
    "workgroup_size head_dim n_heads n_kv_heads rotary_dim rope_style norm_mode n_splits "
    "team_lanes step_positions workgroup_heads",
)
ATTENTION_COMBINE = kernel(
    "attention_combine",
    "r:partials r:params w:out",
    "u32:context",
    "workgroup_size head_dim n_splits",
)

ROPE_STYLES = {"neox": 0, "normal": 1}
NORM_MODES = {"none": 0, "per_head": 1, "full_width": 2}
UNIT_DIMS = 8  # dims a lane loads at once
MAX_SPLITS = 128  # attention_combine.comp
SHARED_BYTES = 16384
CPU_WORKGROUPS, GPU_WORKGROUPS = 4, 128  # enough to fill the device


@dataclass(frozen=True)
class AttentionShape:
    """What the model fixes. Rows of qkv are [n_heads*head_dim | n_kv_heads*head_dim | the same]."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    rotary_dim: int
    context: int  # positions in the cache
    rope_style: Literal["neox", "normal"]
    norm: Literal["none", "per_head", "full_width"]  # RMSNorm of q and k before RoPE
    eps: float
    scale: float
    kv_type: Literal["F16", "F32"]

    def __post_init__(self) -> None:
        assert self.head_dim % 32 == 0 and 32 <= self.head_dim <= 256, self
        assert self.n_heads % self.n_kv_heads == 0 and self.group <= 16, self
        assert self.rotary_dim % 2 == 0 and 2 <= self.rotary_dim <= self.head_dim, self
        assert self.context >= 1 and self.cache_bytes < 1 << 32, self

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.n_heads // self.n_kv_heads

    @property
    def qkv_width(self) -> int:
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim

    @property
    def cache_bytes(self) -> int:
        """Bytes of the K cache of one layer [n_kv_heads][context][head_dim]; V has the same."""
        return self.n_kv_heads * self.context * self.head_dim * (2 if self.kv_type == "F16" else 4)

    @property
    def rope_bytes(self) -> int:
        """Bytes of the (cos, sin) table [context][rotary_dim / 2], f32 pairs."""
        return self.context * self.rotary_dim * 4


@dataclass(frozen=True)
class KvCache:
    """Addresses of one layer's caches and of what its attention reads besides. Gain 0 = no norm."""

    keys: int
    values: int
    rope_table: int
    q_gain: int = 0
    k_gain: int = 0


@dataclass(frozen=True)
class AttentionSplit:
    """How attention is spread over the device: `n_splits` workgroups along the positions, a team of
    `team_lanes` lanes per position, `workgroup_heads` query heads per workgroup."""

    workgroup_size: int
    n_splits: int
    team_lanes: int
    step_positions: int
    workgroup_heads: int
    subgroup: bool

    def partials_words(self, shape: AttentionShape) -> int:
        """Words of the partials tensor [n_heads][n_splits][head_dim + 2]."""
        return shape.n_heads * self.n_splits * (shape.head_dim + 2)

    def shared_bytes(self, shape: AttentionShape) -> int:
        """Shared memory of one workgroup, see attention_state.glsl."""
        n_teams = self.workgroup_size // self.team_lanes
        heads = self.workgroup_heads
        values = max(self.step_positions * heads, heads + 1)
        words = max(n_teams, heads + 1) * shape.head_dim
        words += values * (self.workgroup_size + n_teams + 1) + values * n_teams + heads * n_teams
        own_row_bytes = shape.head_dim * (2 if shape.kv_type == "F16" else 4)
        return 4 * words + 2 * own_row_bytes


def choose_split(
    shape: AttentionShape,
    tuning: Tuning,
    workgroup_size: int = 0,
    n_splits: int = 0,
) -> AttentionSplit:
    """A split for a device; 0 = the tuning's workgroup size, and enough splits to fill the device.

    Teams are as wide as subgroups where those divide a row, so that sums stay in registers; else as
    wide as a row has units, so that GPU lanes coalesce. The code unrolls over a workgroup's heads
    and its positions per step: CPU drivers take seconds to compile more, GPUs run out of registers.
    The context has no say in it, so that its size cannot change a bit; unused splits return early.
    """
    on_cpu = tuning.mapping != "lanes"
    size = workgroup_size or tuning.workgroup_size
    units = shape.head_dim // UNIT_DIMS
    lanes = max(n for n in _divisors(units) if n <= size)
    subgroup = 0 < tuning.subgroup_size <= size and units % tuning.subgroup_size == 0
    if subgroup:
        lanes = tuning.subgroup_size
    most_heads = 4 if on_cpu else max(1, 8 // (units // lanes))
    heads = max(n for n in _divisors(shape.group) if n <= most_heads)
    wanted = CPU_WORKGROUPS if on_cpu else GPU_WORKGROUPS
    splits = n_splits or min(-(-wanted // (shape.n_heads // heads)), MAX_SPLITS)
    for step_positions in (2, 1) if on_cpu else (4, 2, 1):
        split = AttentionSplit(size, splits, lanes, step_positions, heads, subgroup)
        if split.shared_bytes(shape) <= SHARED_BYTES:
            return split
    raise AssertionError(f"no split of {shape} fits in {SHARED_BYTES} bytes of shared memory")


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def attention(
    program: Program,
    shape: AttentionShape,
    split: AttentionSplit,
    cache: KvCache,
    qkv: TensorRef,
    params: TensorRef,
    partials: TensorRef,
    out: TensorRef,
    label: str,
) -> None:
    """out = attention of the token in `params` over the cache, to which its k and v are appended.

    qkv f32 [qkv_width] raw; out f32 [n_heads * head_dim]. Two dispatches.
    """
    assert qkv.n_words >= shape.qkv_width and out.n_words >= shape.n_heads * shape.head_dim
    assert partials.n_words >= split.partials_words(shape)
    assert split.n_splits <= MAX_SPLITS and split.shared_bytes(shape) <= SHARED_BYTES
    assert (shape.head_dim // UNIT_DIMS) % split.team_lanes == 0
    assert shape.group % split.workgroup_heads == 0
    assert shape.norm == "none" or (cache.q_gain and cache.k_gain)
    suffix = "+subgroup" if split.subgroup else ""
    caches = (
        memory_range(cache.keys, shape.cache_bytes),
        memory_range(cache.values, shape.cache_bytes),
    )
    program.append(
        ATTENTION.dispatch(
            f"attention.{shape.kv_type.lower()}{suffix}",
            {
                "workgroup_size": split.workgroup_size,
                "head_dim": shape.head_dim,
                "n_heads": shape.n_heads,
                "n_kv_heads": shape.n_kv_heads,
                "rotary_dim": shape.rotary_dim,
                "rope_style": ROPE_STYLES[shape.rope_style],
                "norm_mode": NORM_MODES[shape.norm],
                "n_splits": split.n_splits,
                "team_lanes": split.team_lanes,
                "step_positions": split.step_positions,
                "workgroup_heads": split.workgroup_heads,
            },
            {"qkv": qkv, "params": params, "partials": partials},
            {
                "k_cache": cache.keys,
                "v_cache": cache.values,
                "q_gain": cache.q_gain,
                "k_gain": cache.k_gain,
                "rope_table": cache.rope_table,
                "context": shape.context,
                "eps": shape.eps,
                "scale": shape.scale,
            },
            (shape.n_heads // split.workgroup_heads, split.n_splits, 1),
            label,
            ranges={
                "qkv": qkv.words(0, shape.qkv_width),
                "partials": partials.words(0, split.partials_words(shape)),
            },
            memory_reads=(*caches, *_constant_reads(shape, cache)),
            memory_writes=caches,
        )
    )
    program.append(
        ATTENTION_COMBINE.dispatch(
            "attention_combine",
            {
                "workgroup_size": split.workgroup_size,
                "head_dim": shape.head_dim,
                "n_splits": split.n_splits,
            },
            {"partials": partials, "params": params, "out": out},
            {"context": shape.context},
            (shape.n_heads, 1, 1),
            f"{label} combine",
            ranges={
                "partials": partials.words(0, split.partials_words(shape)),
                "out": out.words(0, shape.n_heads * shape.head_dim),
            },
        )
    )


def _constant_reads(shape: AttentionShape, cache: KvCache) -> tuple[Range, ...]:
    """The RoPE table and the norm gains."""
    reads = [memory_range(cache.rope_table, shape.rope_bytes)]
    if shape.norm != "none":
        full_width = shape.norm == "full_width"
        for gain, n_heads in ((cache.q_gain, shape.n_heads), (cache.k_gain, shape.n_kv_heads)):
            reads.append(memory_range(gain, 4 * shape.head_dim * (n_heads if full_width else 1)))
    return tuple(reads)
