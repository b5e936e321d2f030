"""Lists the matrices that a token reads, as work for the kernels that `vkmoe tune` measures.

Those of a model come from its tensors; those for no model in particular have the shapes of
Qwen3-30B-A3B (arXiv:2505.09388). Each makes a case of the self-test of about its shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from vkmoe.facts import ExpertSpec
from vkmoe.kernels.comparison import KernelCase
from vkmoe.kernels.experts.cases import DownCase, GateUpCase
from vkmoe.kernels.experts.spans import Use
from vkmoe.kernels.launches import KernelClass, MatvecFamily, kernel_class
from vkmoe.kernels.matvec.cases import MatvecCase, ResidualCase
from vkmoe.kernels.tuning import Tuning
from vkmoe.models import ModelFile
from vkmoe.models.tensors import FeedForwardTensors, LayerTensors
from vkmoe.models.trunk_tensors import FileMatrix
from vkmoe.quants import device_row_bytes

COMMON_TYPES = ("Q4_K", "Q6_K", "Q8_0", "MXFP4")
N_PARTIALS = 512  # of the norm before a matvec: those of width 2048, four rows to a workgroup


class MatrixWork(NamedTuple):
    """Names a dispatch: its kernel, its type, and the form of its matrix in each of `n_slots`."""

    family: MatvecFamily
    type: str
    n_rows: int
    n_columns: int
    n_slots: int = 1

    @property
    def kernel(self) -> KernelClass:
        """Return its class, as ops find it."""
        n_rows = self.n_rows * (self.n_slots if self.family == "expert_gate_up" else 1)
        n_columns = self.n_columns * (self.n_slots if self.family == "expert_down" else 1)
        return kernel_class(self.family, self.type, n_rows, n_columns)

    @property
    def row_bytes(self) -> int:
        """Count the bytes of a row in all slots, and of gate and up together."""
        n_matrices = 2 if self.family == "expert_gate_up" else 1
        return self.n_slots * n_matrices * device_row_bytes(self.type, self.n_columns)

    def case(self, tuning: Tuning, most_bytes: int) -> KernelCase:
        """Make a case of this shape, with fewer rows where these would be too many bytes."""
        n_rows, kind = max(1, min(self.n_rows, most_bytes // self.row_bytes)), self.type
        use = Use(self.n_slots, self.n_slots)
        if self.family == "matvec":
            return MatvecCase(tuning, ((kind, n_rows),), self.n_columns, N_PARTIALS)
        if self.family == "matvec_residual":
            return ResidualCase(tuning, kind, n_rows, self.n_columns)
        if self.family == "expert_gate_up":
            return GateUpCase(tuning, (kind, kind), use, n_rows, self.n_columns, N_PARTIALS)
        return DownCase(tuning, kind, use, n_rows, self.n_columns)


Works = dict[KernelClass, MatrixWork]


def largest_of_each_class(works: Counter[MatrixWork]) -> Works:
    """Choose the work of each class that a token reads most bytes for; those of most come first."""
    by_bytes = sorted(works, key=lambda work: -works[work] * work.n_rows * work.row_bytes)
    found: Works = {}
    for work in by_bytes:
        found.setdefault(work.kernel, work)
    return found


def common_works() -> Counter[MatrixWork]:
    """Count the work of a token of Qwen3-30B-A3B in each of the common types."""
    works = Counter({MatrixWork("matvec", "F32", 128, 2048): 48})
    for kind in COMMON_TYPES:
        works[MatrixWork("expert_gate_up", kind, 768, 2048, 8)] = 48
        works[MatrixWork("expert_down", kind, 2048, 768, 8)] = 48
        works[MatrixWork("matvec", kind, 5120, 2048)] = 48
        works[MatrixWork("matvec_residual", kind, 2048, 4096)] = 48
        works[MatrixWork("matvec", kind, 151936, 2048)] = 1
    return works


def works_of(model: ModelFile) -> Counter[MatrixWork]:
    """Count the work of a token of a model."""
    works: Counter[MatrixWork] = Counter()
    for layer, spec in zip(model.tensors.layers, model.spec.layers, strict=True):
        block = spec.feed_forward
        n_used = block.n_used if isinstance(block, ExpertSpec) else 1
        works.update(_matvecs(layer))
        works.update(_blocks(layer, n_used))
    output = model.tensors.output
    works[MatrixWork("matvec", output.type, output.n_rows, output.n_columns)] += 1
    return works


def _matvecs(layer: LayerTensors) -> Iterator[MatrixWork]:
    """List the matrices of a layer but its blocks; neighbours of one type share a dispatch."""
    parts = {**layer.mixer, **layer.feed_forward}
    first = [("q_down", "kv"), ("q",)] if "q_down" in parts else [("q", "k", "v", "kv")]
    for names in (*first, ("k_up",), ("v_up",), ("router", "shared_gate")):
        found = [part for name in names if isinstance(part := parts.get(name), FileMatrix)]
        for kind, group in groupby(found, key=lambda matrix: matrix.type):
            matrices = list(group)
            n_rows = sum(matrix.n_rows for matrix in matrices)
            yield MatrixWork("matvec", kind, n_rows, matrices[0].n_columns)
    output = parts["output"]
    assert isinstance(output, FileMatrix)
    yield MatrixWork("matvec_residual", output.type, output.n_rows, output.n_columns)


def _blocks(layer: LayerTensors, n_used: int) -> Iterator[MatrixWork]:
    """List gate and up, and down, of the experts or the one block, and of the shared expert."""
    for block, n_slots in ((layer.block, n_used), (layer.feed_forward.get("shared"), 1)):
        if isinstance(block, FeedForwardTensors):
            gate, up, down = block.matrices
            for kind in dict.fromkeys((gate.type, up.type)):
                yield MatrixWork("expert_gate_up", kind, gate.n_rows, gate.n_columns, n_slots)
            yield MatrixWork("expert_down", down.type, down.n_rows, down.n_columns, n_slots)
