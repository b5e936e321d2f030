"""Compares gather, read_words and fill_shared with their twins: not a byte too few or too many.

read_words is the kernel that measures how fast memory is read; fill_shared runs in front of each
compared kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vkmoe.gpu.link_speed import GROUP_BYTES, UNITS_PER_LANE, WORKGROUP_SIZE, read_words, sums_words
from vkmoe.gpu.program import Program, TensorRef, memory_range
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.gpu.shared_memory import WORKGROUP_SIZE as FILLING_SIZE
from vkmoe.gpu.shared_memory import fill_shared
from vkmoe.kernels.comparison import Checks, KernelCase, Prepared, Words
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.family import Family, Setting, Setup, Trial, Used, Work, trial
from vkmoe.kernels.inputs import PARAMS, params_words, routing_of
from vkmoe.kernels.memory.operations import GROUP_BYTES as COPIED_BYTES
from vkmoe.kernels.memory.operations import LandingMemory, gather
from vkmoe.kernels.memory.twins import gather as gather_twin
from vkmoe.kernels.memory.twins import read_words as read_twin
from vkmoe.kernels.router.operations import RoutingLog
from vkmoe.kernels.shapes import TINY
from vkmoe.kernels.tuning import choose_tuning

N_LAYERS, LAYER = 3, 1
ALIGNMENT = 256


@dataclass(frozen=True)
class GatherCase(KernelCase):
    """Checks gather on `n_used` experts, of which those of `misses` are copied.

    Homes come first in memory and landing places behind them, in another order, all with random
    bytes between.
    """

    span_bytes: int
    n_used: int
    misses: tuple[int, ...]

    def prepare(self, runner: Runner) -> Prepared:
        rng = np.random.default_rng([0, self.span_bytes, self.n_used])
        stride = -(-self.span_bytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT
        memory = rng.integers(0, 256, 2 * self.n_used * stride, np.uint8)
        base, ids = runner.place(memory), rng.permutation(200)[: self.n_used].astype(np.uint32)
        homes, places = np.split(stride * np.arange(2 * self.n_used, dtype=np.uint64), 2)
        # Both count from ALIGNMENT, so that 0 is no address.
        addresses, partners = homes + np.uint64(ALIGNMENT), np.zeros(self.n_used, np.uint64)
        for slot, place in zip(self.misses, rng.permutation(places), strict=False):
            addresses[slot], partners[slot] = place + ALIGNMENT, homes[slot] + ALIGNMENT
        shift = np.uint64(base - ALIGNMENT)
        on_device = np.where(partners, partners + shift, 0).astype(np.uint64)
        weights = np.ones(self.n_used, np.float32)
        routing = TensorRef("routing", 6 * self.n_used)
        log = RoutingLog(N_LAYERS, self.n_used)
        half = memory_range(base, self.n_used * stride)
        landing = LandingMemory((memory_range(half.end, self.n_used * stride),), log, LAYER)
        program = Program("gather")
        op = OpContext(program, choose_tuning(runner.device.info), "gather")
        gather(op, routing, PARAMS, landing, self.span_bytes, (half,))

        def compare(checks: Checks, words: Sequence[Words]) -> None:
            wanted = gather_twin(memory, ids, addresses, partners, self.span_bytes)
            checks.equal("memory", runner.fetch(base, memory.size), wanted.memory)
            expected = np.full(log.tensor.n_words, SENTINEL, np.uint32)
            log.views(expected).filled[0, LAYER] = wanted.filled
            checks.equal("log", words[0], expected)

        words = routing_of(ids, weights, addresses + shift, on_device)
        inputs = {routing: words, PARAMS: params_words()}
        return Prepared(program, (log.tensor,), [(inputs, compare)])


@dataclass(frozen=True)
class ReadCase(KernelCase):
    """Lets `n_groups` workgroups read random words; one more word of sums must stay as it was."""

    n_groups: int

    def prepare(self, runner: Runner) -> Prepared:
        n_bytes = self.n_groups * GROUP_BYTES
        words = np.random.default_rng(0).integers(0, 1 << 32, n_bytes // 4, np.uint32)
        sums, program = TensorRef("sums", sums_words(n_bytes) + 1), Program("read words")
        read_words(program, runner.place(words), n_bytes, sums)

        def compare(checks: Checks, outputs: Sequence[Words]) -> None:
            found = outputs[0]
            checks.equal("sums", found[:-1], read_twin(words, WORKGROUP_SIZE, UNITS_PER_LANE))
            checks.untouched("the word behind the sums", found[-1:])

        return Prepared(program, (sums,), [({}, compare)])


@dataclass(frozen=True)
class FillCase(KernelCase):
    """Lets `n_groups` workgroups fill their memory; the unit that a lane reads is far or near."""

    n_groups: int
    value: int = 0x12345678
    first: int = 0

    def prepare(self, runner: Runner) -> Prepared:
        n_seen = self.n_groups * FILLING_SIZE
        seen, program = TensorRef("found", n_seen), Program("fill shared memory")
        fill_shared(program, seen, self.value, self.first)

        def compare(checks: Checks, outputs: Sequence[Words]) -> None:
            checks.equal("what lanes saw", outputs[0], np.full(n_seen, self.value, np.uint32))

        return Prepared(program, (seen,), [({}, compare)])


# ----- what is compared -----


def _gather(setting: Setting) -> Iterator[Trial]:
    yield trial(GatherCase(2 * COPIED_BYTES + 16 * 67, 5, (0, 3)))


def _read_words(setting: Setting) -> Iterator[Trial]:
    yield trial(ReadCase(5))


def _fill_shared(setting: Setting) -> Iterator[Trial]:
    yield trial(*(FillCase(5, first=first) for first in range(0, 1024, 64)))


# ----- what is measured -----


READ_MIB, TINY_READ_MIB = 64, 1


def _gather_works(setup: Setup) -> Iterator[Work]:
    """Copy all used experts, as if they were missed; their three matrices are of one type."""
    span, n_used = setup.shapes.span_bytes, setup.shapes.router.n_used
    case = GatherCase(span, n_used, tuple(range(n_used)))
    yield Work(f"gather {n_used} x {span} bytes", n_used * span, case.run)


def _read_words_works(setup: Setup) -> Iterator[Work]:
    mib = TINY_READ_MIB if setup.shapes is TINY else READ_MIB

    yield Work(f"read {mib} MiB", mib << 20, ReadCase((mib << 20) // GROUP_BYTES).run)


def _fill_shared_works(setup: Setup) -> Iterator[Work]:
    yield Work("fill 4096 x 16 KiB", 0, FillCase(4096).run)


def _gather_probe(used: Used) -> GatherCase:
    n_used = used.numbers["n_slots"]
    return GatherCase(2 * COPIED_BYTES + 16 * 67, n_used, (0, n_used - 1))


FAMILIES = {
    "gather": Family(_gather, _gather_works, probe=_gather_probe),
    "read_words": Family(_read_words, _read_words_works),
    "fill_shared": Family(_fill_shared, _fill_shared_works),
}
