"""Multiplies quantised matrices by vectors: plain (q/k/v, router, output head), with residual, and
for stacks of one matrix per head; a vector for each row of a batch. Fetches rows of the embedding.

Shaders: matvec.comp, embed.comp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Bound, Range, TensorRef, memory_range, workgroup_lines
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.launches import Launch, kernel_class
from vkmoe.kernels.norms.operations import NOT_NORMED, NormInput, NormOutput
from vkmoe.quants import TYPES

MATVEC = kernel(
    "matvec",
    "r:x w:y r:norm_partials",
    "address:weights0 address:weights1 address:weights2 address:bias u32:rows_end0 u32:rows_end1 "
    "u32:n_rows u32:row_bytes u32:n_blocks u32:output_offset u32:x_offset u32:x_stride "
    "u32:x_pitch u32:y_pitch u32:partials_pitch u32:n_partials f32:inverse_width f32:eps",
    "workgroup_size rows walk_rows columns loaded_words",
)
MATVEC_RESIDUAL = kernel(
    "matvec_residual",
    "r:x rw:hidden w:gained w:partials",
    "address:weights address:gain address:bias u32:n_rows u32:row_bytes u32:n_blocks "
    "u32:x_pitch u32:hidden_pitch u32:partials_pitch",
    "workgroup_size rows walk_rows columns loaded_words adds",
)
EMBED = kernel(
    "embed",
    "r:params w:hidden w:gained w:partials",
    "address:embeddings address:gain u32:n_vocab u32:row_bytes u32:n_blocks "
    "u32:hidden_pitch u32:partials_pitch f32:scale",
    "workgroup_size",
)
EMBED_WEIGHTS = 32  # what one lane of it unpacks

# Types without blocks are read in chunks of 32.
BLOCK_WEIGHTS = {name: max(32, kind.block_weights) for name, kind in TYPES.items()}


class Rows:
    """Says what the rows of a matrix are, wherever it starts; a base of dataclasses."""

    type: str
    n_rows: int
    n_columns: int
    row_bytes: int

    @property
    def n_blocks(self) -> int:
        return self.n_columns // BLOCK_WEIGHTS[self.type]

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.row_bytes

    @property
    def numbers(self) -> dict[str, int]:
        """Return what kernels need to read it, as they name it."""
        return {"n_rows": self.n_rows, "row_bytes": self.row_bytes, "n_blocks": self.n_blocks}


@dataclass(frozen=True)
class Matrix(Rows):
    """Describes a weight matrix [n_rows, n_columns] in device layout, reached by address.

    Rows are aligned to 16 bytes, but for those that are as in a file.
    """

    type: str
    address: int
    n_rows: int
    n_columns: int
    row_bytes: int

    def __post_init__(self) -> None:
        assert self.type in BLOCK_WEIGHTS, self.type
        assert self.n_columns % BLOCK_WEIGHTS[self.type] == 0, (self.type, self.n_columns)
        is_aligned = self.address % 16 == 0 and self.row_bytes % 16 == 0
        assert is_aligned or self.row_bytes == TYPES[self.type].row_bytes(self.n_columns), self

    @property
    def memory(self) -> Range:
        return memory_range(self.address, self.n_bytes)


# What matvec is given where there are neither biases, a norm, nor heads.
PLAIN: dict[str, float] = {
    **dict.fromkeys(("bias", "output_offset", "x_offset", "x_stride"), 0),
    **NOT_NORMED,
}


def _spread(op: OpContext, launch: Launch, x: TensorRef) -> dict[str, int]:
    """Say how a workgroup takes rows of the batch, and how far these lie apart in x."""
    assert op.n_rows == 1 or x.row_words % 4 == 0, x
    columns = op.tuning.columns(op.n_rows)
    return {
        "columns": columns,
        "walk_rows": op.tuning.walk_rows(launch, columns),
        "x_pitch": x.row_words // 4,
    }


def matvec(
    op: OpContext,
    matrices: Sequence[Matrix],
    x: TensorRef,
    y: TensorRef,
    norm: NormInput | None = None,
    *,
    bias: int = 0,
) -> None:
    """Append y = concatenation of matrix @ x over the matrices, all of the same columns, plus bias.

    x and y are of each row of the batch.
    Neighbouring matrices of one type (up to three) share a dispatch; others get their own, with no
    barrier between.
    `bias` is the address of f32 [all rows], 0 for none.
    """
    assert x.row_words >= matrices[0].n_columns
    assert all(matrix.n_columns == matrices[0].n_columns for matrix in matrices)
    offset = 0
    for group in groups_of_three(matrices):
        n_rows = sum(matrix.n_rows for matrix in group)
        numbers = {
            **(norm.numbers if norm else {}),
            **group_numbers(group),
            **{"bias": bias, "output_offset": offset},
        }
        bound = {
            "x": x.rows(op.n_rows, 0, group[0].n_columns),
            "y": y.rows(op.n_rows, offset, n_rows),
            "norm_partials": norm.tensor(op.n_rows) if norm else x.part(0, 0),  # which is not read
        }
        _append_matvec(op, group, numbers, bound, bias_range(bias, offset, n_rows))
        offset += n_rows


def _append_matvec(
    op: OpContext,
    group: Sequence[Matrix],
    numbers: Mapping[str, float],
    bound: Mapping[str, Bound],
    biases: tuple[Range, ...] = (),
    n_heads: int = 1,
) -> None:
    """Append the dispatch of matrices that share one, or of a stack of one for each head."""
    kind, n_rows = group[0].type, sum(matrix.n_rows for matrix in group)
    launch = op.tuning.launch(kernel_class("matvec", kind, n_rows, group[0].n_columns))
    spread = _spread(op, launch, bound["x"].tensor)
    n_groups = -(-n_rows // n_heads // launch.rows)
    lines = workgroup_lines(n_groups) if n_heads == 1 else (n_groups, n_heads)
    dispatch = MATVEC.dispatch(
        f"matvec.{kind.lower()}{op.tuning.dot_suffix}",
        {
            **vars(op.tuning),
            **launch._asdict(),
            **PLAIN,
            **numbers,
            **spread,
            "y_pitch": bound["y"].tensor.row_words,
        },
        bound,
        (*lines, op.n_rows // spread["columns"]),
        op.label,
        reads=(*(matrix.memory for matrix in group), *biases),
    )
    op.launch(dispatch, launch)


def groups_of_three(matrices: Sequence[Matrix]) -> Iterator[list[Matrix]]:
    """Yield neighbours of one type, three at most: what one dispatch takes."""
    for _, same_type in groupby(matrices, key=lambda matrix: matrix.type):
        group = list(same_type)
        for start in range(0, len(group), 3):
            yield group[start : start + 3]


def group_numbers(group: list[Matrix]) -> dict[str, int]:
    """Describe up to three matrices of one type; the last stands in for missing ones."""
    ends = list(accumulate(matrix.n_rows for matrix in group))
    return {
        **group[0].numbers,
        **{f"weights{i}": group[min(i, len(group) - 1)].address for i in range(3)},
        "rows_end0": ends[0],
        "rows_end1": ends[min(1, len(ends) - 1)],
        "n_rows": ends[-1],
    }


def bias_range(bias: int, first: int, count: int) -> tuple[Range, ...]:
    """Return the memory of some biases; nothing where there are none."""
    assert bias % 4 == 0, bias
    return (memory_range(bias + 4 * first, 4 * count),) if bias else ()


def matvec_heads(
    op: OpContext, stack: Matrix, n_heads: int, x: TensorRef, x_stride: int, y: TensorRef
) -> None:
    """Append y[head] = W[head] @ x[head][:n_columns] for every head, of each row of the batch.

    `stack` is [n_heads * rows, n_columns], a head's rows behind those of the head before; y is
    [n_heads * rows]. In a row of x a head's part begins `x_stride` words behind the one before.
    """
    assert stack.n_rows % n_heads == 0 and x_stride % 4 == 0 < x_stride
    numbers = {
        **group_numbers([stack]),
        **dict.fromkeys(("rows_end0", "rows_end1", "n_rows"), stack.n_rows // n_heads),
        "x_stride": x_stride // 4,
    }
    bound = {
        "x": x.rows(op.n_rows, 0, (n_heads - 1) * x_stride + stack.n_columns),
        "y": y.rows(op.n_rows, 0, stack.n_rows),
        "norm_partials": x.part(0, 0),
    }
    _append_matvec(op, [stack], numbers, bound, n_heads=n_heads)


def matvec_residual(
    op: OpContext, matrix: Matrix, x: TensorRef, output: NormOutput, *, bias: int = 0
) -> int:
    """Append hidden += matrix @ x + bias; gained = hidden * gain, of each row of the batch.

    Returns the number of partials left in a row. `bias` is the address of f32 [n_rows], 0 for none.
    """
    launch = op.tuning.launch(
        kernel_class("matvec_residual", matrix.type, matrix.n_rows, matrix.n_columns)
    )
    n_groups, spread = -(-matrix.n_rows // launch.rows), _spread(op, launch, x)
    gains = memory_range(output.gain, 4 * matrix.n_rows)
    op.launch(
        MATVEC_RESIDUAL.dispatch(
            f"matvec_residual.{matrix.type.lower()}{op.tuning.dot_suffix}",
            {
                **vars(op.tuning),
                **launch._asdict(),
                **matrix.numbers,
                **output.numbers,
                **spread,
                "weights": matrix.address,
                "bias": bias,
            },
            {"x": x.rows(op.n_rows, 0, matrix.n_columns), **output.tensors(op.n_rows)},
            (*workgroup_lines(n_groups), op.n_rows // spread["columns"]),
            op.label,
            reads=(matrix.memory, gains, *bias_range(bias, 0, matrix.n_rows)),
        ),
        launch,
    )
    return output.n_partials(n_groups)


def embed(
    op: OpContext,
    embeddings: Matrix,
    params: TensorRef,
    output: NormOutput,
    scale: float = 1.0,
) -> int:
    """Append hidden = scale * embeddings[token]; gained = hidden * gain, of each row of `params`.

    Returns the number of partials left in a row; 0 where the output has no gain, and hidden alone
    is written.
    """
    n_groups = -(-(embeddings.n_columns // EMBED_WEIGHTS) // op.tuning.workgroup_size)
    op.append(
        EMBED.dispatch(
            f"embed.{embeddings.type.lower()}",
            {
                **vars(op.tuning),
                **embeddings.numbers,
                **output.numbers,
                "embeddings": embeddings.address,
                "n_vocab": embeddings.n_rows,
                "scale": scale,
            },
            {"params": params, **output.tensors(op.n_rows)},
            (n_groups, 1, op.n_rows),
            op.label,
            reads=(embeddings.memory, *bias_range(output.gain, 0, embeddings.n_columns)),
        )
    )
    return output.n_partials(n_groups) if output.gain else 0
