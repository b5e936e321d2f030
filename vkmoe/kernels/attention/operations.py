"""Appends attention of a batch: over keys and values of grouped heads, or over compressed rows.

Both rotate, append to the cache, and read it in splits, which another dispatch joins; where rows of
a batch may be of one sequence, all append in a dispatch of their own. Over compressed rows it is
multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv:2405.04434, section 2.1).
Shaders: attention.comp, latent_attention.comp, attention_combine.comp.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from vkmoe.gpu.kernels import KernelSpec, kernel
from vkmoe.gpu.program import Bound, Range, TensorRef, memory_range
from vkmoe.kernels.attention.hadamard import HeadRows, hadamard
from vkmoe.kernels.attention.shapes import (
    AttentionShape,
    AttentionSplit,
    LatentShape,
    Shape,
    shape_numbers,
)
from vkmoe.kernels.context import OpContext

ATTENTION = kernel(
    "attention",
    "r:qkv r:params w:partials",
    "address:k_cache address:v_cache address:q_gain address:k_gain address:rope_table "
    "u32:context f32:eps f32:scale u32:window u32:mode u32:n_regions "
    "u32:qkv_pitch u32:partials_pitch",
    "workgroup_size head_dim n_heads n_kv_heads rotary_dim rope_style norm_mode n_splits "
    "team_lanes step_positions workgroup_heads k_type v_type value_norm ring "
    "k_hadamard v_hadamard",
)
LATENT_ATTENTION = kernel(
    "latent_attention",
    "r:absorbed r:params r:q r:kv w:partials",
    "address:rows address:rope_table address:gain "
    "u32:context u32:q_offset u32:kv_offset f32:eps f32:scale u32:mode u32:n_regions "
    "u32:absorbed_pitch u32:q_pitch u32:kv_pitch u32:partials_pitch",
    "workgroup_size kv_rank rope_dim nope_dim rope_style n_splits "
    "team_lanes step_positions workgroup_heads k_type k_hadamard",
)
ATTENTION_COMBINE = kernel(
    "attention_combine",
    "r:partials r:params w:out",
    "address:sinks u32:context u32:window u32:partials_pitch u32:out_pitch",
    "workgroup_size head_dim n_splits",
)
WHOLE, APPEND, READ = range(3)  # modes of a dispatch, as attention_cache.glsl numbers them


class LayerCache(ABC):
    """Holds where a layer's caches are; a base of dataclasses.

    Each cache has `n_regions` behind one another, one for each sequence.
    """

    rope_table: int
    n_regions: int

    @property
    @abstractmethod
    def caches(self) -> tuple[int, ...]:
        """List the addresses of keys and values, or of the rows that are both."""

    @property
    @abstractmethod
    def gains(self) -> tuple[int, ...]:
        """List the addresses of the norms' gains, f32."""

    @property
    @abstractmethod
    def sinks(self) -> int:
        """Return the address of f32 [n_heads], one logit per head; 0: none."""

    @property
    def numbers(self) -> dict[str, object]:
        """Return what kernels need, as they name it."""
        ends = {"k_cache": self.caches[0], "v_cache": self.caches[-1], "sinks": self.sinks}
        return {**vars(self), **ends}

    def memory(self, shape: Shape) -> tuple[Range, ...]:
        """List the memory of the caches, all regions of each."""
        places = zip(self.caches, shape.cache_bytes, strict=True)
        return tuple(memory_range(cache, self.n_regions * n_bytes) for cache, n_bytes in places)

    def constants(self, shape: Shape) -> tuple[Range, ...]:
        """List the memory of the RoPE table and the norm gains."""
        gains = [*zip(self.gains, shape.gain_widths, strict=False)]
        assert all(gain for gain, _ in gains), self
        table = memory_range(self.rope_table, shape.rope_bytes)
        return table, *(memory_range(gain, 4 * width) for gain, width in gains)


@dataclass(frozen=True)
class KvCache(LayerCache):
    """Holds addresses of a layer's caches and what else its attention reads. Gain 0 = no norm.

    A layer that sees the caches of another gives any gain for k: kernels read it all the same.
    `sinks`: f32 [n_heads], one logit per head for the softmax's denominator; 0 = none.
    """

    keys: int
    values: int
    rope_table: int
    q_gain: int = 0
    k_gain: int = 0
    sinks: int = 0
    n_regions: int = 1

    @property
    def caches(self) -> tuple[int, ...]:
        return self.keys, self.values

    @property
    def gains(self) -> tuple[int, ...]:
        return self.q_gain, self.k_gain


@dataclass(frozen=True)
class LatentCache(LayerCache):
    """Holds addresses of one layer's cache and of what its attention reads besides."""

    rows: int  # [n_regions][context][kv_rank + rope_dim], in the shape's kv_type
    rope_table: int
    gain: int  # f32 [kv_rank], of the norm of the compressed part
    n_regions: int = 1
    sinks: ClassVar[int] = 0

    @property
    def caches(self) -> tuple[int, ...]:
        return (self.rows,)

    @property
    def gains(self) -> tuple[int, ...]:
        return (self.gain,)


class LatentQkv(NamedTuple):
    """Holds what each row brings to latent attention; q and kv may be one tensor."""

    absorbed: TensorRef  # f32 [n_heads * kv_rank]
    q: TensorRef  # raw f32 [n_heads][nope_dim + rope_dim], of which the rope part is read
    kv: TensorRef  # raw f32 [kv_rank + rope_dim]
    q_offset: int = 0  # word at which q begins
    kv_offset: int = 0

    def bound(self, shape: LatentShape, n_rows: int) -> dict[str, Bound]:
        """Bind what kernels read of the first rows."""
        return {
            "absorbed": self.absorbed.rows(n_rows, 0, shape.n_heads * shape.kv_rank),
            "q": self.q.rows(n_rows, self.q_offset, shape.q_width),
            "kv": self.kv.rows(n_rows, self.kv_offset, shape.row_dim),
        }


class AttentionTensors(NamedTuple):
    """Holds what all dispatches of an attention work on, whatever its kind."""

    params: TensorRef  # of the batch
    partials: TensorRef  # scratch: AttentionSplit.partials_words
    out: TensorRef  # f32 [n_heads * value_dim]


def attention(
    op: OpContext,
    shape: AttentionShape,
    split: AttentionSplit,
    cache: KvCache,
    qkv: TensorRef,
    tensors: AttentionTensors,
) -> None:
    """Append out = attention of each row of `params` over its region, once its k and v are there.

    qkv f32 [qkv_width] raw; out f32 [n_heads * head_dim]. Two dispatches; three for several rows
    that bring k and v.
    """
    given = {"qkv": qkv.rows(op.n_rows, 0, shape.qkv_width)}
    _attend(op, ATTENTION, shape, split, cache, given, tensors)


def latent_attention(
    op: OpContext,
    shape: LatentShape,
    split: AttentionSplit,
    cache: LatentCache,
    qkv: LatentQkv,
    tensors: AttentionTensors,
) -> None:
    """Append out = attention of each row of `params` over its region, once its own is there.

    out f32 [n_heads * kv_rank]. Two dispatches; three for several rows.
    """
    given = qkv.bound(shape, op.n_rows)
    _attend(op, LATENT_ATTENTION, shape, split, cache, given, tensors)


def places(bound: Mapping[str, Bound]) -> dict[str, int]:
    """Say where the parts of rows begin in tensors, and how far they lie apart, as kernels do."""
    offsets = {f"{name}_offset": item.range.start // 4 for name, item in bound.items()}
    return offsets | {f"{name}_pitch": item.tensor.row_words for name, item in bound.items()}


def _attend(
    op: OpContext,
    spec: KernelSpec,
    shape: Shape,
    split: AttentionSplit,
    cache: LayerCache,
    given: Mapping[str, Bound],
    tensors: AttentionTensors,
) -> None:
    """Append what leaves the partials of all splits, and what joins these.

    Several rows may be of one sequence, and then see each other: they append in a dispatch before.
    Where the caches are another layer's, that has appended.
    """
    split.check(shape)
    assert shape.sinks == (cache.sinks != 0), (shape, cache)
    caches, constants = cache.memory(shape), cache.constants(shape)
    partials = {"partials": tensors.partials.rows(op.n_rows, 0, split.partials_words(shape))}
    out = {"out": tensors.out.rows(op.n_rows, 0, shape.n_heads * shape.value_dim)}
    numbers = {**shape_numbers(shape), **vars(split), **cache.numbers}
    numbers |= places({**given, **partials, **out})
    modes = (WHOLE,) if op.n_rows == 1 else (APPEND, READ)
    for mode in modes if shape.appends else (READ,):
        n_splits = 1 if mode == APPEND else split.n_splits
        op.append(
            spec.dispatch(
                f"{spec.name}{split.suffix}",
                {**numbers, "mode": mode},
                {**given, **partials, "params": tensors.params},
                (shape.n_heads // split.workgroup_heads, n_splits, op.n_rows),
                op.label,
                reads=(*caches, *constants),
                writes=caches if mode != READ else (),
            )
        )
    _join_splits(op, shape, numbers, {**partials, **out, "params": tensors.params}, cache.sinks)
    transform_back(op, shape, tensors.out, tensors.params)


def transform_back(op: OpContext, shape: Shape, out: TensorRef, params: TensorRef) -> None:
    """Append what makes sums of values of sums of transformed ones: f32 [n_heads * value_dim]."""
    heads = HeadRows(out, 0, shape.n_heads, shape.value_dim, shape.value_dim)
    hadamard(op, heads, shape.hadamard_blocks[1], params)


def _join_splits(
    op: OpContext,
    shape: Shape,
    numbers: Mapping[str, object],
    bound: Mapping[str, TensorRef | Bound],
    sinks: int,
) -> None:
    """Append what joins the partials of all splits."""
    op.append(
        ATTENTION_COMBINE.dispatch(
            "attention_combine",
            {**numbers, "head_dim": shape.value_dim},
            bound,
            (shape.n_heads, 1, op.n_rows),
            f"{op.label} combine",
            reads=(memory_range(sinks, 4 * shape.n_heads),) if sinks else (),
        )
    )
