"""How long converting weights will take, found out by a short trial, and the line that says it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

from vkmoe.facts import Conversion, MemoryPlan
from vkmoe.placement.conversions import joined
from vkmoe.placement.loaded import N_THREADS
from vkmoe.placement.words import in_mib, in_time
from vkmoe.quants import TYPES, lay_out

__all__ = ["conversion_line", "expected_seconds"]

SAMPLE_COLUMNS, SAMPLE_ROWS = 2048, 64  # of each thread


def expected_seconds(found: Iterable[Conversion], expert_share: float = 1.0) -> float:
    """How long the converting will take, by a short trial of each type on this machine.

    `expert_share` of the routed experts are converted. Not included: reading the file.
    """
    return sum(
        item.n_weights
        * (expert_share if item.of_experts else 1)
        / _weights_per_second(item.file_type, item.loaded_type)
        for item in found
    )


def conversion_line(plan: MemoryPlan) -> str:
    """One line: what is converted to what, bytes and expected seconds; empty for nothing."""
    found = plan.conversions
    if not found:
        return ""
    n_places, n_experts = sum(plan.host_places), plan.sizing.n_total if plan.sizing else 0
    again = n_places > 0 and any(item.of_experts for item in found)
    seconds = expected_seconds(found, n_places / max(1, n_experts) if again else 1.0)
    before = sum(item.file_bytes for item in found)
    after = sum(item.loaded_bytes for item in found)
    return (
        f"converting {joined(list(_counts(found)))}: {in_mib(before)} -> {in_mib(after)}, "
        f"about {in_time(seconds)}"
        + ("; experts again each time they are read from the file" if again else "")
    )


def _counts(found: Iterable[Conversion]) -> Iterator[str]:
    """How many tensors of each pair of types, in words."""
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
    """Of all threads together."""
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
