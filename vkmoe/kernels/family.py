"""This module says what a family of kernels is: what is compared of it, and what is measured.

A family is declared beside its cases. Trials are small shapes for comparison, the works are the
same cases in the shapes of real models, for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, NamedTuple, get_args

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
    suffix: str  # "", "+subgroup", "+blocks", "+blocks64", "+half"

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


class Family(NamedTuple):
    """Holds the trials of a kernel, and its works in the shapes of a model.

    `chosen_by` is the tuning's suffix that selects a variant.
    """

    trials: Callable[[Setting], Iterator[Trial]]
    works: Callable[[Setup], Iterator[Work]]
    chosen_by: Literal["dot_suffix", "tile_suffix", "reduce_suffix", "walk_suffix", "nothing"] = (
        "nothing"
    )


def weights_work(
    setup: Setup, role: str, text: str, check: Callable[[Runner], Checks], form: tuple[int, int]
) -> Work:
    """Describe what reads a matrix [n_rows, n_columns] of a weight type once; `text` shows it."""
    kind, (n_rows, n_columns) = setup.variant.axis, form
    fits = n_columns % BLOCK_WEIGHTS[kind] == 0
    row_bytes = device_row_bytes(kind, n_columns, setup.tuning.layout) if fits else 0
    n_weights = n_rows * n_columns
    return Work(f"{role} {text}", n_rows * row_bytes, check, n_weights, role, ((kind, n_columns),))
