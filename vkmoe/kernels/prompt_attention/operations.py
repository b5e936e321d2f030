"""Appends attention of the rows of prompts: first what they add to the caches, then what they see.

Rows may be of several sequences, each with its own region of the caches. The bits of a row depend
on no other row, and on no cut of a prompt into batches. Shaders: append_rows.comp,
append_latent_rows.comp, prompt_attention.comp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from vkmoe.gpu.kernels import KernelSpec, kernel
from vkmoe.gpu.program import Bound, TensorRef, memory_range, workgroup_lines
from vkmoe.kernels.attention.hadamard import HeadRows, hadamard
from vkmoe.kernels.attention.operations import (
    KvCache,
    LatentCache,
    LatentQkv,
    LayerCache,
    places,
    transform_back,
)
from vkmoe.kernels.attention.shapes import (
    CPU_LATENT_UNITS,
    SHARED_BYTES,
    UNIT_DIMS,
    AttentionShape,
    LatentShape,
    Shape,
    shape_numbers,
)
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.launches import UNITS_SHARED_BYTES, Launch
from vkmoe.kernels.tuning import Tuning

APPEND_ROWS = kernel(
    "append_rows",
    "rw:qkv r:params",
    "address:k_cache address:v_cache address:q_gain address:k_gain address:rope_table "
    "u32:context u32:n_regions u32:qkv_pitch f32:eps",
    "workgroup_size head_dim n_heads n_kv_heads rotary_dim rope_style norm_mode k_type v_type "
    "value_norm ring k_hadamard v_hadamard",
)
APPEND_LATENT_ROWS = kernel(
    "append_latent_rows",
    "rw:q r:params r:kv",
    "address:rows address:rope_table address:gain "
    "u32:context u32:n_regions u32:q_offset u32:q_pitch u32:kv_offset u32:kv_pitch f32:eps",
    "workgroup_size kv_rank rope_dim nope_dim n_heads rope_style k_type k_hadamard",
)
PROMPT_ATTENTION = kernel(
    "prompt_attention",
    "r:queries r:params r:rest w:out",
    "address:k_cache address:v_cache address:sinks u32:context u32:n_regions u32:window f32:scale "
    "u32:query_pitch u32:rest_offset u32:rest_pitch u32:rest_stride u32:out_pitch",
    "workgroup_size row_dim value_dim n_heads n_kv_heads workgroup_heads k_type v_type ring "
    "matrix_rows matrix_columns matrix_depth subgroup_size",
)

GPU_LANES = 128  # which every device takes
BLOCK, CHUNK = 32, 8  # positions and vec4s of a row that prompt_tile.glsl stages at once
# Sums of a lane on GPUs: what every compiler has registers for beside what it decodes.
WIDE_VALUES = 256  # dims
LANE_SUMS, LANE_SUMS_OF_MORE = 32, 16
CPU_LANES, CPU_COLUMNS = 8, 8  # at most
# On matrix units: lanes at most, and slices of 16 bytes (f16) of a row that are staged at once. A
# row's slices are made whole for all matrices; each line has one more, that is empty.
UNIT_LANES, SLICE_BYTES, CHUNK_SLICES, WHOLE_SLICES = 128, 16, 16, 4
MATRIX_SUMS, FEW_MATRIX_SUMS = 64, 16  # of a lane, at most; where it has 128 registers (Intel)
THREAD_COLUMNS = 32  # of CPU threads, which share what is read of the cache


class PromptTensors(NamedTuple):
    """Holds what all dispatches of attention of prompts' rows work on."""

    params: TensorRef  # of the rows
    out: TensorRef  # f32 [n_heads * value_dim] a row


@dataclass(frozen=True)
class PromptTiling:
    """Says how attention of prompts is spread over the device.

    A workgroup takes `workgroup_heads` heads of rows that share a kv head: columns, in the shaders.
    """

    workgroup_size: int
    workgroup_heads: int
    suffix: str  # of the SPIR-V variants that run it
    matrix_rows: int = 0  # this and the next two: of a MatrixShape; 0: no matrix units
    matrix_columns: int = 0
    matrix_depth: int = 0
    subgroup_size: int = 0  # with matrix units
    required_size: int = 0  # of subgroups, where devices have several; 0: the driver's choice

    def n_groups(self, shape: Shape, n_rows: int) -> tuple[int, int, int]:
        """Count the workgroups that take all heads of some rows."""
        n, lines = workgroup_lines(-(-n_rows * shape.group // self.workgroup_heads))
        return n, shape.n_heads // shape.group, lines

    def shared_bytes(self, shape: Shape) -> int:
        """Count what a workgroup has in shared memory, with matrix units (prompt_matrix.glsl)."""
        n_slices, columns = _whole_slices(shape.row_dim), self.workgroup_heads
        width = min(n_slices, CHUNK_SLICES)
        lines = columns * (n_slices + 1 + BLOCK // UNIT_DIMS + 1)
        lines += max(BLOCK * (width + 1), width * UNIT_DIMS * (BLOCK // UNIT_DIMS + 1))
        matrices = self.n_subgroups * 4 * self.matrix_rows * self.matrix_columns
        scores = max(columns * (4 * BLOCK + SLICE_BYTES), matrices)
        return SLICE_BYTES * lines + scores + 12 * columns + 4

    def lane_sums(self, shape: Shape) -> int:
        """Count the sums that a lane has, with matrix units."""
        dims = min(_whole_slices(shape.row_dim), CHUNK_SLICES) * UNIT_DIMS
        n_chunks = -(-shape.value_dim // (CHUNK_SLICES * UNIT_DIMS))
        own = -(-dims // (self.matrix_columns * self.n_subgroups))
        return n_chunks * own * self.matrix_columns * self.workgroup_heads // self.subgroup_size

    @property
    def n_subgroups(self) -> int:
        return self.workgroup_size // self.subgroup_size


def _whole_slices(n_dims: int) -> int:
    return -(-n_dims // (UNIT_DIMS * WHOLE_SLICES)) * WHOLE_SLICES


def choose_tiling(shape: Shape, tuning: Tuning) -> PromptTiling:
    """Choose a tiling, which neither rows, context nor window have a say in.

    On CPU drivers whose subgroups are wide enough a workgroup is one subgroup, and its lanes hold
    all dims of few columns. Elsewhere a lane has as many sums of a tile as it has registers for.
    Matrix units take rows of 16 bits and less, where these fit in shared memory.
    """
    if tuning.mapping == "threads":
        return PromptTiling(1, THREAD_COLUMNS, "")
    if (on_units := _matrix_tiling(shape, tuning)) is not None:
        return on_units
    units, value_units = -(-shape.row_dim // UNIT_DIMS), -(-shape.value_dim // UNIT_DIMS)
    if tuning.walk_suffix:
        lane_units = -(-units // CPU_LANES) + -(-value_units // CPU_LANES)
        columns = max(1, min(CPU_COLUMNS, CPU_LATENT_UNITS // lane_units))
        return PromptTiling(CPU_LANES, columns, tuning.walk_suffix)
    lanes_of_unit = _power_of_two(GPU_LANES // value_units)
    # Rows of 256 dims take registers, too: with more sums Tiger Lake's compiler spills.
    few = set(shape.kv_types) != {"f16"} or shape.value_dim == WIDE_VALUES
    lane_sums = LANE_SUMS_OF_MORE if few else LANE_SUMS
    columns = min(32, lanes_of_unit * lane_sums // UNIT_DIMS)
    words = 4 * (CHUNK + 1) * (2 * columns + BLOCK) + 5 * columns
    assert 4 * words <= SHARED_BYTES, (shape, columns)
    return PromptTiling(GPU_LANES, columns, tuning.walk_suffix)


def _matrix_tiling(shape: Shape, tuning: Tuning) -> PromptTiling | None:
    """Choose a tiling for matrix units; None where there are none, or they cannot take the rows.

    They multiply f16, so that caches of f32 are left to others.
    """
    tile = tuning.matrix_tile
    if tile is None or "f32" in shape.kv_types:
        return None
    sizes = tile.matrix_rows, tile.matrix_columns, tile.matrix_depth
    lanes = min(UNIT_LANES, tile.workgroup_size)
    subgroups = tile.subgroup_size, tile.required_size
    most_sums = MATRIX_SUMS if tile.loads_ahead else FEW_MATRIX_SUMS
    takes_more = tile.loads_ahead or tile.subgroup_size > 8  # if it must; there it would spill
    room = max(tile.shared_bytes, UNITS_SHARED_BYTES)
    for columns in (n for n in (32, 16, 8) if n <= lanes):
        tiling = PromptTiling(lanes, columns, "+matrix", *sizes, *subgroups)
        few_sums = tiling.lane_sums(shape) <= most_sums
        able = few_sums or (takes_more and columns == tile.matrix_rows)
        if columns % tile.matrix_rows == 0 and able and tiling.shared_bytes(shape) <= room:
            return tiling
    return None


def _power_of_two(most: int) -> int:
    """Find the largest power of two up to a number."""
    return 1 << (most.bit_length() - 1)


def append_rows(
    op: OpContext, shape: AttentionShape, cache: KvCache, qkv: TensorRef, params: TensorRef
) -> None:
    """Append: q of each row is normed and rotated in its place, k and v go into the caches.

    Where keys are transformed, so is q.

    qkv: rows of which the first qkv_width words are q, k and v, raw; v and k stay what they are
    there. Where the caches are another layer's, that is done with q alone.
    """
    given = {"qkv": qkv.rows(op.n_rows, 0, shape.qkv_width)}
    n_spans = shape.n_heads + 2 * shape.n_kv_heads * shape.appends
    n_spans = 3 if shape.norm == "full_width" else n_spans
    _append(op, APPEND_ROWS, shape, cache, {**given, "params": params.bound}, n_spans)
    queries = HeadRows(qkv, 0, shape.n_heads, shape.head_dim, shape.head_dim)
    hadamard(op, queries, shape.hadamard_blocks[0], params)


def append_latent_rows(
    op: OpContext, shape: LatentShape, cache: LatentCache, qkv: LatentQkv, params: TensorRef
) -> None:
    """Append: the rotary part of each row's q is rotated in its place, its kv goes into the cache.

    The offsets of `qkv` are words of a row. Where rows are transformed, so are the absorbed and the
    rotary parts of queries.
    """
    given = qkv.bound(shape, op.n_rows)
    del given["absorbed"]
    _append(op, APPEND_LATENT_ROWS, shape, cache, {**given, "params": params.bound}, n_spans=2)
    block, n_heads = shape.hadamard_blocks[0], shape.n_heads
    hadamard(op, HeadRows(qkv.absorbed, 0, n_heads, shape.kv_rank, shape.kv_rank), block, params)
    head, offset = shape.nope_dim + shape.rope_dim, qkv.q_offset + shape.nope_dim
    hadamard(op, HeadRows(qkv.q, offset, n_heads, head, shape.rope_dim), block, params)


def _append(
    op: OpContext,
    spec: KernelSpec,
    shape: Shape,
    cache: LayerCache,
    bound: Mapping[str, Bound],
    n_spans: int,
) -> None:
    """Append what puts rows into the caches."""
    op.append(
        spec.dispatch(
            f"{spec.name}{op.tuning.walk_suffix}",
            {**vars(op.tuning), **shape_numbers(shape), **cache.numbers, **places(bound)},
            bound,
            (n_spans, op.n_rows, 1),
            op.label,
            reads=cache.constants(shape),
            writes=cache.memory(shape) if shape.appends else (),
        )
    )


def prompt_attention(
    op: OpContext,
    shape: AttentionShape,
    tiling: PromptTiling,
    cache: KvCache,
    qkv: TensorRef,
    tensors: PromptTensors,
) -> None:
    """Append out = attention of each row over what it sees, once append_rows has run.

    qkv: rows of which the first n_heads * head_dim words are q.
    """
    rest = {"rest_offset": 0, "rest_pitch": 0, "rest_stride": 0}
    queries = qkv.rows(op.n_rows, 0, shape.n_heads * shape.head_dim)
    bound = {"queries": queries, "rest": qkv.part(0, 0)}
    _attend(op, shape, tiling, cache, bound, rest, tensors)


def latent_prompt_attention(
    op: OpContext,
    shape: LatentShape,
    tiling: PromptTiling,
    cache: LatentCache,
    qkv: LatentQkv,
    tensors: PromptTensors,
) -> None:
    """Append out = attention of each row over what it sees, once append_latent_rows has run.

    out f32 [n_heads * kv_rank] a row. Only the rotary part of each head of q is read.
    """
    rest = {
        "rest_offset": qkv.q_offset + shape.nope_dim,
        "rest_pitch": qkv.q.row_words,
        "rest_stride": shape.nope_dim + shape.rope_dim,
    }
    given = qkv.bound(shape, op.n_rows)
    bound = {"queries": given["absorbed"], "rest": given["q"]}
    _attend(op, shape, tiling, cache, bound, rest, tensors)


def _attend(
    op: OpContext,
    shape: Shape,
    tiling: PromptTiling,
    cache: LayerCache,
    queries: Mapping[str, Bound],
    rest: Mapping[str, int],
    tensors: PromptTensors,
) -> None:
    """Append the walk of the caches; `rest` says where the second part of queries is."""
    assert shape.sinks == (cache.sinks != 0), (shape, cache)
    sinks = (memory_range(cache.sinks, 4 * shape.n_heads),) if cache.sinks else ()
    numbers = {
        **shape_numbers(shape),
        **vars(tiling),
        **cache.numbers,
        "n_kv_heads": shape.n_heads // shape.group,
        "query_pitch": queries["queries"].tensor.row_words,
        "out_pitch": tensors.out.row_words,
        **rest,
    }
    out = tensors.out.rows(op.n_rows, 0, shape.n_heads * shape.value_dim)
    op.launch(
        PROMPT_ATTENTION.dispatch(
            f"prompt_attention{tiling.suffix}",
            numbers,
            {**queries, "params": tensors.params, "out": out},
            tiling.n_groups(shape, op.n_rows),
            op.label,
            reads=(*cache.memory(shape), *sinks),
        ),
        Launch(tiling.workgroup_size, 1, tiling.required_size),
    )
    transform_back(op, shape, tensors.out, tensors.params)
