"""This module says what a family of kernels is: what is compared of it, and what is measured.

A family is declared beside its cases. Trials are small shapes for comparison, the works are the
same cases in the shapes of real models, for speed. A probe is a case for a dispatch of a model's
program: it runs the same pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, Literal, NamedTuple, Protocol, get_args

from vkmoe.gpu.runner import Runner
from vkmoe.kernels.comparison import Checks, KernelCase
from vkmoe.kernels.launches import ColumnClass, KernelClass, Launch, MatvecFamily, RowClass
from vkmoe.kernels.matvec.operations import BLOCK_WEIGHTS
from vkmoe.kernels.rows import RowsCase
from vkmoe.kernels.shapes import KernelShapes
from vkmoe.kernels.tuning import Tuning
from vkmoe.quants import device_row_bytes

MIXED_TYPE = "Q4_K"  # the one whose gate goes with an up of another type in every mapping


class Setting(NamedTuple):
    """Holds what a variant is run with; `axis` is its weight type."""

    axis: str
    tuning: Tuning


def forms_of(family: MatvecFamily, kind: str) -> Iterator[KernelClass]:
    """List the classes of a kernel that reads weights of a type: one for each form of matrix."""
    for rows, columns in product(get_args(RowClass), get_args(ColumnClass)):
        yield KernelClass(family, kind, rows, columns)


def launched(tuning: Tuning, kernel: KernelClass, launch: Launch) -> Tuning:
    """Return the tuning that launches a kernel in this way, whatever the form of its matrix."""
    forms = forms_of(kernel.family, kernel.type)
    return replace(tuning, launches=tuple((form, launch) for form in forms))


class Trial(NamedTuple):
    """Names comparisons that give one result, each with a runner of its own."""

    what: str
    compares: Sequence[Callable[[Runner], Checks]]


def trial(*cases: KernelCase | RowsCase, what: str = "") -> Trial:
    """Return the trial of some cases."""
    return Trial(what, [case.run for case in cases])


class Variant(NamedTuple):
    """Holds the parts of a SPIR-V name such as `matvec.q4_k+subgroup`."""

    name: str
    family: str
    axis: str  # weight type, upper case; "" for none
    suffix: str  # "", "+subgroup", "+blocks", "+blocks64", "+half", "+matrix"

    @classmethod
    def parse(cls, name: str) -> Variant:
        stem, plus, mapping = name.partition("+")
        family, _, axis = stem.partition(".")
        return cls(name, family, axis.upper(), plus + mapping)


@dataclass(frozen=True)
class Setup:
    """Pairs one variant with one model's shapes."""

    variant: Variant
    tuning: Tuning
    shapes: KernelShapes


@dataclass(frozen=True)
class Work:
    """Holds one dispatch to check and time; `n_bytes` are what it must read, 0: next to nothing."""

    what: str
    n_bytes: int
    check: Callable[[Runner], Checks]
    n_weights: int = 0  # among what it reads, each counted once
    role: str = ""  # of the matrix: of each role a model file has types of its own
    blocks: tuple[tuple[str, int], ...] = ()  # (type, columns) that must be whole blocks
    is_usual: bool = True  # whether it is measured where only some types are wanted

    @property
    def misfit(self) -> str:
        """Say why no model has this type here, or nothing."""
        for kind, columns in self.blocks:
            if columns % BLOCK_WEIGHTS[kind]:
                return f"rows of {columns} are not whole blocks"
        return ""


class Used(NamedTuple):
    """Describes a dispatch of a model's program, for which a probe is made.

    `numbers` are its push and specialisation constants by name.
    """

    variant: Variant
    numbers: Mapping[str, Any]
    groups: tuple[int, int, int]
    subgroup_size: int
    tuning: Tuning
    types: tuple[str, str]  # of gate and up, whose dispatches follow each other
    mixer: Any  # the kernels of its layer's attention or delta rule: `shape` and `split`

    @property
    def n_columns(self) -> int:
        """Count the columns of its matrix."""
        return int(self.numbers["n_blocks"]) * BLOCK_WEIGHTS[self.variant.axis]

    @property
    def n_rows(self) -> int:
        """Return a number of rows that takes the same ways through the kernel as its matrix has."""
        return few_rows(self.numbers["n_rows"], self._group_rows)

    @property
    def segments(self) -> tuple[tuple[str, int], ...]:
        """List type and number of rows of each matrix of a dispatch that takes up to three."""
        ends = [0, *(self.numbers[name] for name in ("rows_end0", "rows_end1", "n_rows"))]
        sizes = (end - start for start, end in pairwise(ends) if end > start)
        return tuple((self.variant.axis, few_rows(size, self._group_rows)) for size in sizes)

    @property
    def _group_rows(self) -> int:
        """Count the rows that a workgroup takes, or a multiple of them."""
        return self.tuning.tile.dots if "lane_dots" in self.numbers else MOST_GROUP_ROWS

    def launched(self, family: MatvecFamily, dots: int = 1) -> Tuning:
        """Return the tuning that launches a kernel as here; a row of it is so many products."""
        numbers = self.numbers
        launch = Launch(numbers["workgroup_size"], dots * numbers["rows"], self.subgroup_size)
        return launched(self.tuning, KernelClass(family, self.variant.axis, "few", "short"), launch)


MOST_GROUP_ROWS = 16  # a multiple of the rows of any workgroup that multiplies vectors


def few_rows(n_rows: int, whole: int) -> int:
    """Cut a number of rows to some workgroups, with as many in the last one as there are.

    A workgroup takes `whole` rows, or a divisor of these.
    """
    return n_rows if n_rows < 2 * whole else whole + n_rows % whole


class Probe(Protocol):
    """Compares kernels with their twins. Probes of several dispatches that are equal are one."""

    def run(self, runner: Runner) -> Checks:
        """Compare them; the runner must be new."""


class Family(NamedTuple):
    """Holds the trials of a kernel, and its works in the shapes of a model.

    `chosen_by` is the tuning's suffix that selects a variant. Without a `probe` no model has it.
    """

    trials: Callable[[Setting], Iterator[Trial]]
    works: Callable[[Setup], Iterator[Work]]
    chosen_by: Literal[
        "dot_suffix", "tile_suffix", "reduce_suffix", "walk_suffix", "attend_suffix", "nothing"
    ] = "nothing"
    probe: Callable[[Used], Probe] | None = None


def weights_work(
    setup: Setup, role: str, text: str, check: Callable[[Runner], Checks], form: tuple[int, int]
) -> Work:
    """Describe what reads a matrix [n_rows, n_columns] of a weight type once; `text` shows it."""
    kind, (n_rows, n_columns) = setup.variant.axis, form
    fits = n_columns % BLOCK_WEIGHTS[kind] == 0
    row_bytes = device_row_bytes(kind, n_columns, setup.tuning.layout) if fits else 0
    n_weights = n_rows * n_columns
    return Work(f"{role} {text}", n_rows * row_bytes, check, n_weights, role, ((kind, n_columns),))
