"""Compares read_words with its twin: the kernel that measures how fast memory is read."""

from __future__ import annotations

import numpy as np

from vkmoe.gpu.link_speed import (
    GROUP_BYTES,
    UNITS_PER_LANE,
    WORKGROUP_SIZE,
    read_words,
    sums_words,
)
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.reference.read_words import read_words as twin
from vkmoe.selftest.comparison import Checks

__all__ = ["ReadCase"]


class ReadCase:
    """Lets `n_groups` workgroups read random words; one more word of sums must stay as it was."""

    def __init__(self, runner: Runner, n_groups: int, seed: int = 0) -> None:
        self._runner, self._n_bytes = runner, n_groups * GROUP_BYTES
        rng = np.random.default_rng(seed)
        self.words = rng.integers(0, 1 << 32, self._n_bytes // 4, np.uint32)
        self.sums = TensorRef("sums", sums_words(self._n_bytes) + 1)
        self._program = Program("read words")
        read_words(self._program, runner.place(self.words), self._n_bytes, self.sums)

    def run(self, checks: Checks) -> None:
        (found,) = self._runner.run(self._program, {}, self.sums)
        checks.equal("sums", found[:-1], twin(self.words, WORKGROUP_SIZE, UNITS_PER_LANE))
        checks.equal("the word behind the sums", found[-1:], np.array([SENTINEL], np.uint32))

    def time(self) -> float | None:
        """Measure GB per second out of device memory."""
        self._runner.run(self._program, {})
        runtime = self._runner.nanoseconds(self._program)
        return self._n_bytes / runtime if runtime else None
