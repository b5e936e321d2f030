"""Says what is converted while a model loads: which tensors, how many bytes they take then, and how
long it takes, which a short trial finds out.

Which types become which, and how, is the subject of quants/convert.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import numpy as np

from vkmoe.facts import Conversion, MemoryPlan
from vkmoe.models.tensors import FeedForwardTensors, ModelTensors
from vkmoe.models.trunk_tensors import FileMatrix
from vkmoe.placement.words import in_mib, in_time
from vkmoe.quants import TYPES, device_row_bytes, lay_out, loaded_type

__all__ = [
    "CONVERTING_BYTES",
    "N_THREADS",
    "conversion_line",
    "conversions",
    "expected_seconds",
    "growth_words",
]

N_THREADS = 4  # that lay out, convert or read rows while a model loads
# What converting takes besides the weights: of each thread the rows it works on, as float32 and
# in what decoding makes of them, and converted rows on their way to memory that is not mapped.
CONVERTING_BYTES = 24 << 20
SAMPLE_COLUMNS, SAMPLE_ROWS = 2048, 64  # of the trial, for each thread


class _Matrix(NamedTuple):
    """Describes a tensor, or a part of one: types in the file and on the device, rows, columns."""

    file_type: str
    loaded_type: str
    of_experts: bool
    n_tensors: int
    n_rows: int
    n_columns: int


def conversions(tensors: ModelTensors) -> tuple[Conversion, ...]:
    """Find all tensors that will change their type, added up by kind and sorted by it."""
    kinds: dict[tuple[str, str, bool], list[_Matrix]] = {}
    for matrix in _matrices(tensors):
        if matrix.loaded_type != matrix.file_type:
            kinds.setdefault(matrix[:3], []).append(matrix)
    return tuple(_summed(kinds[key]) for key in sorted(kinds))


def growth_words(found: Sequence[Conversion]) -> str:
    """Say why weights take more than their file, for plans and errors; empty where they do not."""
    growth = sum(item.loaded_bytes - item.file_bytes for item in found)
    if growth <= 0:
        return ""
    before = _joined(sorted({item.file_type for item in found}))
    after = _joined(sorted({item.loaded_type for item in found}))
    return f"{in_mib(growth)} more than in the file, as {after} instead of {before}"


def _joined(words: list[str]) -> str:
    """Join words as a list in a sentence."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _matrices(tensors: ModelTensors) -> Iterator[_Matrix]:
    """List all matrices of a model."""
    for block in tensors.expert_layers:
        yield from _matrices_of_block(block, of_experts=True)
    for tensor in tensors.trunk:
        if isinstance(tensor, FeedForwardTensors):
            yield from _matrices_of_block(tensor, of_experts=False)
        elif isinstance(tensor, FileMatrix):
            kinds = tensor.tensor.type, tensor.type
            yield _Matrix(*kinds, False, 1, tensor.n_rows, tensor.n_columns)


def _matrices_of_block(block: FeedForwardTensors, of_experts: bool) -> Iterator[_Matrix]:
    for matrix in block.matrices:
        n_rows, n_tensors = matrix.n_experts * matrix.n_rows, len(matrix.parts)
        kinds = matrix.type, loaded_type(matrix.type)
        yield _Matrix(*kinds, of_experts, n_tensors, n_rows, matrix.n_columns)


def _summed(matrices: list[_Matrix]) -> Conversion:
    """Add up matrices of one kind."""
    first = matrices[0]
    block = TYPES[first.file_type]
    weights = [matrix.n_rows * matrix.n_columns for matrix in matrices]
    return Conversion(
        *first[:3],
        n_tensors=sum(matrix.n_tensors for matrix in matrices),
        n_weights=sum(weights),
        file_bytes=sum(n // block.block_weights * block.block_bytes for n in weights),
        loaded_bytes=sum(
            matrix.n_rows * device_row_bytes(matrix.loaded_type, matrix.n_columns)
            for matrix in matrices
        ),
    )


def expected_seconds(found: Iterable[Conversion], expert_share: float = 1.0) -> float:
    """Estimate the seconds that converting will take, by a short trial of each type.

    `expert_share` of the routed experts are converted. Reading the file is not included.
    """
    return sum(
        item.n_weights
        * (expert_share if item.of_experts else 1)
        / _weights_per_second(item.file_type, item.loaded_type)
        for item in found
    )


def conversion_line(plan: MemoryPlan) -> str:
    """Say in a line what is converted to what, bytes and expected seconds; empty for nothing."""
    found = plan.conversions
    if not found:
        return ""
    n_slots, n_experts = sum(plan.host_slots), plan.sizing.n_total if plan.sizing else 0
    again = n_slots > 0 and any(item.of_experts for item in found)
    seconds = expected_seconds(found, n_slots / max(1, n_experts) if again else 1.0)
    before = sum(item.file_bytes for item in found)
    after = sum(item.loaded_bytes for item in found)
    return (
        f"converting {_joined(list(_counts(found)))}: {in_mib(before)} -> {in_mib(after)}, "
        f"about {in_time(seconds)}"
        + ("; experts again each time they are read from the file" if again else "")
    )


def _counts(found: Iterable[Conversion]) -> Iterator[str]:
    """Say how many tensors there are of each pair of types."""
    counts: dict[tuple[str, str], int] = {}
    for item in found:
        pair = item.file_type, item.loaded_type
        counts[pair] = counts.get(pair, 0) + item.n_tensors
    word = "tensor" if next(iter(counts.values())) == 1 else "tensors"
    for (before, after), n_tensors in counts.items():
        yield " ".join([f"{n_tensors:,}", *word.split(), "of", before, "to", after])
        word = ""  # once is enough


@cache
def _weights_per_second(file_type: str, kind: str) -> float:
    """Measure the speed of all threads together."""
    target = kind if kind != "F16" else "F32"  # of which only the rounding differs
    shape = SAMPLE_ROWS, TYPES[file_type].row_bytes(SAMPLE_COLUMNS)
    sample = np.random.default_rng(0).integers(0, 256, shape, np.uint8)

    def convert(_: int) -> None:
        lay_out(file_type, target, sample, SAMPLE_COLUMNS)

    convert(0)  # what is done once only
    with ThreadPoolExecutor(N_THREADS) as threads:
        began = time.perf_counter()
        list(threads.map(convert, range(N_THREADS)))
    n_weights = N_THREADS * SAMPLE_ROWS * SAMPLE_COLUMNS
    return n_weights / max(time.perf_counter() - began, 1e-9)
