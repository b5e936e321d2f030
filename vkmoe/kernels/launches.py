"""Says how the kernels that read weights are launched, one by one: their classes and their sizes.

A class is what a size is chosen for: a kernel, a type of weights and the form of the matrix. Where
an expert lies, or what else is in a submit, is no part of it: that must never change a sum. The
sizes themselves are chosen in tuning.py, or measured by `vkmoe tune`. Kernels that multiply tiles
have one shape for all.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from vkmoe.quants.code_books import LARGEST_BYTES

MatvecFamily = Literal["matvec", "matvec_residual", "expert_gate_up", "expert_down"]
RowClass = Literal["few", "some", "many"]
ColumnClass = Literal["short", "long"]
# What tiles multiply: f16 on matrix units or in lanes, or f32. What a device has of it first is its
# own choice.
TileNumbers = Literal["matrix", "f16", "f32"]

# The kernels that run beside these where experts are kept, which must be launched as they are.
KEEPING = {"expert_gate_up": "expert_gate_up_keep", "expert_down": "expert_down_keep"}

# Four rows to a workgroup leave most of a GPU idle below the first bound (routers, a single k or
# v), and fill any several times above the second (output heads).
MOST_FEW, MOST_SOME = 1024, 16384
MOST_SHORT = 1024  # columns; 32 to a lane, they occupy half of a workgroup of 64


# What a device must have of shared memory for kernels on matrix units, besides what its tiles take.
UNITS_SHARED_BYTES = 32768


class Launch(NamedTuple):
    """Says how a kernel is spread: lanes and rows of a workgroup, and lanes of a subgroup.

    `rows` counts dot products: gate and up together have half as many rows.
    """

    workgroup_size: int
    rows: int
    subgroup_size: int = 0  # that the pipeline must have; 0: what the driver chooses

    def __str__(self) -> str:
        by = f" by {self.subgroup_size}" if self.subgroup_size else ""
        return f"{self.workgroup_size} x {self.rows}{by}"


class Tile(NamedTuple):
    """Says how the kernels that multiply tiles spread them: what each lane has sums of at once.

    With matrix units it is what each subgroup has, in matrices of one shape. A product is the same
    to the bit in tiles of any shape, for one shape of matrices.
    """

    workgroup_size: int
    dots: int  # rows of weights that a workgroup has, those of gate and up counted apart
    lane_dots: int  # of which a lane, or a subgroup, has so many
    lane_columns: int
    matrix_rows: int = 0  # this and the next two: of a MatrixShape; 0: no matrix units
    matrix_columns: int = 0
    matrix_depth: int = 0
    subgroup_size: int = 0
    loads_ahead: int = 0  # 1: what the next step needs is loaded during a step, in more registers
    required_size: int = 0  # of subgroups, where devices have several; 0: the driver's choice

    @property
    def columns(self) -> int:
        """Return how many rows of a batch, or pairs, a tile has at most."""
        return self.lane_dots * self.lane_columns // max(1, self.subgroup_size)

    @property
    def launch(self) -> Launch:
        """Return how a kernel is launched that multiplies such tiles."""
        return Launch(self.workgroup_size, self.dots, self.required_size)

    @property
    def shared_bytes(self) -> int:
        """Return what a tile of f32 has in shared memory: 32 weights of each row, a code book.

        With matrix units these are of f16 and have 16 bytes more, rows and columns have units, and
        each subgroup has a matrix of sums.
        """
        lines = self.dots + self.columns
        if self.subgroup_size == 0:
            return 4 * 32 * lines + LARGEST_BYTES
        sums = self.workgroup_size // self.subgroup_size * self.matrix_rows * self.matrix_columns
        return 80 * lines + 4 * (lines + self.columns + sums + 2) + LARGEST_BYTES

    def __str__(self) -> str:
        return f"{self.dots} x {self.columns} by {self.workgroup_size}"


class KernelClass(NamedTuple):
    """Names what a launch is chosen for."""

    family: MatvecFamily
    type: str
    rows: RowClass
    columns: ColumnClass


def kernel_class(family: MatvecFamily, kind: str, n_rows: int, n_columns: int) -> KernelClass:
    """Find the class of a dispatch: all its rows, and the columns that one sum runs over."""
    rows: RowClass = "few" if n_rows <= MOST_FEW else "some" if n_rows <= MOST_SOME else "many"
    return KernelClass(family, kind, rows, "short" if n_columns <= MOST_SHORT else "long")
