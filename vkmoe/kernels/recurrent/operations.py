"""Appends what layers with a recurrent state need: the gated delta rule behind a short convolution,
and the gates of heads.

A sequence's state is a matrix for each head (Yang et al. 2024, arXiv:2412.06464, section 3), and
the last rows that were projected, which the convolution reads. Rows of a batch are computed one
after the other, whatever their number: a chunked form would round otherwise where a prompt is cut
otherwise. Shaders: delta_inputs.comp, delta_step.comp, gate_heads.comp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from vkmoe.facts import RING_ROWS, DeltaNetSpec
from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Range, TensorRef, memory_range
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.tuning import Tuning

DELTA_INPUTS = kernel(
    "delta_inputs",
    "r:projected r:params rw:mixed",
    "address:taps address:scales address:biases address:ring u32:n_regions "
    "u32:beta_offset u32:alpha_offset u32:projected_pitch u32:mixed_pitch u32:mode",
    "workgroup_size head_dim n_key_heads n_heads n_taps",
)
DELTA_STEP = kernel(
    "delta_step",
    "r:mixed r:params w:out",
    "address:states u32:mixed_pitch u32:out_pitch",
    "workgroup_size head_dim n_key_heads n_heads tiled n_decays n_versions n_columns n_parts",
)
GATE_HEADS = kernel(
    "gate_heads",
    "rw:heads r:params r:gates",
    "address:gain u32:gates_offset u32:heads_pitch u32:gates_pitch f32:eps",
    "workgroup_size head_dim is_silu",
)
WHOLE, READ, STORE = range(3)  # modes of delta_inputs.comp
WHOLE_ROWS = 8  # that may be put into the ring while it is read
Gate = Literal["silu", "sigmoid"]


@dataclass(frozen=True)
class DeltaShape:
    """Describes the rows and the state of a layer: heads as in `DeltaNetSpec`, a decay for each
    head, and how many versions of the state are kept, of the last positions."""

    n_key_heads: int
    n_heads: int
    head_dim: int
    n_taps: int
    tiled: bool
    n_versions: int = 1
    n_decays: int = 1  # of a head: one, or one for each row of its state

    @classmethod
    def of(cls, spec: DeltaNetSpec, n_versions: int) -> DeltaShape:
        heads = spec.n_key_heads, spec.n_heads, spec.head_dim
        return cls(*heads, spec.n_taps, spec.tiled, n_versions)

    @property
    def n_channels(self) -> int:
        """Count the channels of the convolution: q and k of each key head, v of each head."""
        return (2 * self.n_key_heads + self.n_heads) * self.head_dim

    @property
    def mixed_words(self) -> int:
        """Count the words of a row that delta_step.comp reads."""
        return self.n_channels + self.n_heads * (self.n_decays + 1)

    @property
    def out_words(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def ring_bytes(self) -> int:
        """Count the bytes of the ring of a sequence."""
        return 4 * RING_ROWS * self.n_channels

    @property
    def states_bytes(self) -> int:
        """Count the bytes of all versions of the state of a sequence."""
        return 4 * self.n_versions * self.n_heads * self.head_dim**2


@dataclass(frozen=True)
class DeltaSplit:
    """Says how delta_step.comp spreads a head: columns of a workgroup, lanes of a column."""

    n_columns: int
    n_parts: int

    @property
    def workgroup_size(self) -> int:
        return self.n_columns * self.n_parts


MAX_LANES = 256  # delta_step.comp


def choose_split(shape: DeltaShape, tuning: Tuning) -> DeltaSplit:
    """Spread a column over four lanes of a GPU, of which each has a quarter of it in registers; a
    CPU's barriers cost more than that gains."""
    if tuning.mapping != "lanes":
        return DeltaSplit(min(tuning.workgroup_size, shape.head_dim), 1)
    parts = 4 if shape.head_dim % 4 == 0 else 1
    columns = min(32, shape.head_dim)
    while shape.head_dim % columns:
        columns //= 2
    return DeltaSplit(columns, parts)


class DeltaMemory(NamedTuple):
    """Holds addresses of what a layer keeps, of all sequences, and of its vectors."""

    ring: int  # f32 [n_regions][RING_ROWS][n_channels]
    states: int  # f32 [n_regions][n_versions][n_heads][head_dim][head_dim]
    taps: int  # f32 [n_channels][n_taps], the oldest first
    scales: int  # f32 [n_heads]
    biases: int  # f32 [n_heads]
    n_regions: int = 1

    def kept(self, shape: DeltaShape) -> tuple[Range, Range]:
        """List the memory of the rings and the states."""
        return (
            memory_range(self.ring, self.n_regions * shape.ring_bytes),
            memory_range(self.states, self.n_regions * shape.states_bytes),
        )

    def vectors(self, shape: DeltaShape) -> tuple[Range, ...]:
        """List the memory of the vectors."""
        of_heads = (memory_range(at, 4 * shape.n_heads) for at in (self.scales, self.biases))
        return memory_range(self.taps, 4 * shape.n_channels * shape.n_taps), *of_heads


class Projected(NamedTuple):
    """Holds what was projected of each row: channels in front, b and a of each head behind."""

    rows: TensorRef
    beta_offset: int  # word at which b begins
    alpha_offset: int


def delta_inputs(
    op: OpContext,
    shape: DeltaShape,
    memory: DeltaMemory,
    projected: Projected,
    params: TensorRef,
    mixed: TensorRef,
) -> None:
    """Append mixed = q, k, v, decays and betas of each row, f32 [mixed_words].

    Reads the rows before the batch in the ring, and puts the last ones of each sequence there.
    """
    assert shape.n_taps < RING_ROWS - WHOLE_ROWS and shape.n_decays == 1, shape
    ring, _ = memory.kept(shape)
    end = max(projected.beta_offset, projected.alpha_offset) + shape.n_heads
    numbers = {
        **vars(op.tuning),
        **vars(shape),
        **memory._asdict(),
        **projected._asdict(),
        "projected_pitch": projected.rows.row_words,
        "mixed_pitch": mixed.row_words,
    }
    for mode in (WHOLE,) if op.n_rows <= WHOLE_ROWS else (READ, STORE):
        op.append(
            DELTA_INPUTS.dispatch(
                f"delta_inputs{op.tuning.reduce_suffix}",
                {**numbers, "mode": mode},
                {
                    "projected": projected.rows.rows(op.n_rows, 0, end),
                    "params": params,
                    "mixed": mixed.rows(op.n_rows, 0, shape.mixed_words),
                },
                (2 * shape.n_key_heads + shape.n_heads, op.n_rows, 1),
                op.label,
                reads=(ring, *memory.vectors(shape)) if mode != STORE else (),
                writes=(ring,) if mode != READ else (),
            )
        )


def delta_step(
    op: OpContext,
    shape: DeltaShape,
    split: DeltaSplit,
    memory: DeltaMemory,
    mixed: TensorRef,
    params: TensorRef,
    out: TensorRef,
) -> None:
    """Append out = q^T S of each row, f32 [n_heads * head_dim], with S after that row."""
    assert shape.head_dim % split.n_columns == 0 == shape.head_dim % split.n_parts, (shape, split)
    assert split.workgroup_size <= MAX_LANES and shape.n_heads % shape.n_key_heads == 0, split
    _, states = memory.kept(shape)
    op.append(
        DELTA_STEP.dispatch(
            "delta_step",
            {
                **vars(shape),
                **vars(split),
                "workgroup_size": split.workgroup_size,
                "tiled": int(shape.tiled),
                "states": memory.states,
                "mixed_pitch": mixed.row_words,
                "out_pitch": out.row_words,
            },
            {
                "mixed": mixed.rows(op.n_rows, 0, shape.mixed_words),
                "params": params,
                "out": out.rows(op.n_rows, 0, shape.out_words),
            },
            (shape.head_dim // split.n_columns, shape.n_heads, memory.n_regions),
            op.label,
            reads=(states,),
            writes=(states,),
        )
    )


class HeadGates(NamedTuple):
    """Holds the gates of all heads of each row, raw, from a word of a tensor's rows on."""

    rows: TensorRef
    offset: int
    gate: Gate
    gain: int = 0  # address of f32 [head_dim], of a norm of each head before; 0: there is none
    eps: float = 0.0


def gate_heads(
    op: OpContext,
    heads: TensorRef,
    head_dim: int,
    n_heads: int,
    gates: HeadGates,
    params: TensorRef,
) -> None:
    """Append heads = norm(heads) * gate(gates), of each row and head: f32 [n_heads][head_dim]."""
    width = n_heads * head_dim
    op.append(
        GATE_HEADS.dispatch(
            f"gate_heads{op.tuning.reduce_suffix}",
            {
                **vars(op.tuning),
                "head_dim": head_dim,
                "is_silu": int(gates.gate == "silu"),
                "gain": gates.gain,
                "eps": gates.eps,
                "gates_offset": gates.offset,
                "heads_pitch": heads.row_words,
                "gates_pitch": gates.rows.row_words,
            },
            {
                "heads": heads.rows(op.n_rows, 0, width),
                "params": params,
                "gates": gates.rows.rows(op.n_rows, gates.offset, width),
            },
            (n_heads, 1, op.n_rows),
            op.label,
            reads=(memory_range(gates.gain, 4 * head_dim),) if gates.gain else (),
        )
    )
