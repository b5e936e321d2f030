"""What a case of a kernel family is run with and what comes of it, and the ways to run one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from vkmoe.gpu.device import Device
from vkmoe.gpu.runner import Runner
from vkmoe.ops.tuning import Tuning
from vkmoe.quants import device_row_bytes
from vkmoe.selftest.comparison import Checks

__all__ = [
    "CPU_BYTES",
    "GPU_BYTES",
    "Compare",
    "Family",
    "Measured",
    "Setting",
    "compared",
    "timed",
]

# Weights read by a measured dispatch: on GPUs more than their caches hold (up to 128 MiB).
CPU_BYTES, GPU_BYTES = 2 << 20, 256 << 20


@dataclass(frozen=True)
class Setting:
    """What one variant is run with.

    `axis` is its weight or cache type; `timed` asks for its speed.
    """

    axis: str
    tuning: Tuning
    device: Device
    timed: bool

    def rows_of(self, n_columns: int, n_matrices: int) -> int:
        """Rows per matrix so that all of them together have the measured size."""
        n_bytes = CPU_BYTES if self.device.info.is_cpu else GPU_BYTES
        return max(1, n_bytes // n_matrices // device_row_bytes(self.axis, n_columns))


class Measured(NamedTuple):
    """What came of one case: comparisons, SPIR-V modules that ran, GB/s of weights."""

    what: str
    checks: Checks
    variants: set[str]
    gigabytes_per_second: float | None = None


Cases = Callable[[Setting], Iterator[Measured]]
Compare = Callable[[Runner], Checks]


class Family(NamedTuple):
    """`chosen_by` says which suffix of the tuning selects among its variants."""

    cases: Cases
    chosen_by: Literal["dot_suffix", "reduce_suffix", "nothing"]


def compared(setting: Setting, what: str, *compares: Compare) -> Measured:
    """One case of several comparisons, each with a runner of its own."""
    checks, variants = Checks(), set[str]()
    for compare in compares:
        # What a wrong kernel leaves may be anything; the comparison must still come to its end.
        with Runner(setting.device) as runner, np.errstate(all="ignore"):
            checks.checks += compare(runner).checks
            variants |= runner.variants
    return Measured(what, checks, variants)


def timed(setting: Setting, measured: Measured, time: Callable[[Runner], float | None]) -> Measured:
    """The case with its speed, if the setting wants one. A wrong result has no speed."""
    if not (setting.timed and measured.checks.worst.ok):
        return measured
    with Runner(setting.device) as runner:
        return measured._replace(gigabytes_per_second=time(runner))
