"""Measures how classes of kernels are best launched on a device, and chooses.

A launch is timed only once a case of the self-test agrees with its twin, and chosen only once all
cases of its kernel do, those that keep experts among them. Launches are timed in turns, so that
what slows the device down slows all of them; a newcomer must be clearly faster than the table's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from vkmoe.gpu.device import Device
from vkmoe.gpu.runner import Flush, Runner, time_recording
from vkmoe.kernels.families import FAMILIES
from vkmoe.kernels.family import Setting, launched
from vkmoe.kernels.launches import KEEPING, KernelClass, Launch
from vkmoe.kernels.tuning import Tuning, choose_tuning
from vkmoe.placement.remembered import Measured
from vkmoe.selftest.matrices import MatrixWork

if TYPE_CHECKING:
    from vkmoe.gpu.backend import Recording

MARGIN = 0.03  # by which a newcomer must be faster, besides what the times scatter
# What a timed case reads: of GPUs enough workgroups for any; caches are flushed before each run.
CPU_BYTES, GPU_BYTES, FLUSH_BYTES = 1 << 20, 32 << 20, 256 << 20
T = TypeVar("T")
LEAST_ROUNDS, MOST_ROUNDS, SECONDS = 5, 25, 0.25  # of the launches of one class


def measure_launches(
    device: Device, works: Mapping[KernelClass, MatrixWork], limit_s: float
) -> Iterator[Measured | None]:
    """Measure the classes of `works` one after another; begins none after `limit_s` seconds.

    Yields None for a class whose launch by the table computes wrongly. Raises GpuErrors.
    """
    began, tuner = time.monotonic(), _Tuner(device)
    try:
        for kernel, work in works.items():
            if time.monotonic() - began > limit_s:
                return
            yield tuner.measure(kernel, work)
    finally:
        tuner.close()


def candidates(tuning: Tuning, kernel: KernelClass, device: Device) -> list[Launch]:
    """List the launches worth trying for a class, the table's first."""
    base = tuning.table_launch(kernel)
    if tuning.mapping == "blocks":  # more rows take a CPU's compiler seconds
        found = [base._replace(rows=rows) for rows in (4, 8)]
    else:
        least = 2 if kernel.family == "expert_gate_up" else 1  # a row of it is two dot products
        found = [base._replace(rows=rows) for rows in (1, 2, 4, 8) if rows >= least]
        found += [base._replace(workgroup_size=size) for size in (32, 128)]
        found += [base._replace(subgroup_size=size) for size in (8, 16, 32, 64)]
    allowed = [launch for launch in found if tuning.allows(kernel, launch, device.info)]
    return list(dict.fromkeys((base, *allowed)))


def choose(times: Mapping[T, Sequence[float]], table: T) -> tuple[T, float]:
    """Choose the fastest by its median, and say what share of the table's time it saves.

    It must save more than MARGIN and half of what the middle half of the times spreads over.
    """
    quartiles = {launch: np.percentile(taken, (25, 50, 75)) for launch, taken in times.items()}
    base, best, gain = quartiles[table], table, 0.0
    for launch, (low, median, high) in quartiles.items():
        spread = 0.5 * max((high - low) / median, (base[2] - base[0]) / base[1])
        saved = 1.0 - float(median / base[1])
        if saved > max(gain, MARGIN + spread):
            best, gain = launch, saved
    return best, gain


class _Arm(NamedTuple):
    """Holds a launch that is timed, with what keeps its memory."""

    launch: Launch
    runner: Runner
    recording: Recording


class _Tuner:
    """Checks and times launches on a device; remembers which are right."""

    def __init__(self, device: Device) -> None:
        self._device, self._table = device, choose_tuning(device.info)
        self._timed = device.native.has_timestamps()
        self._right: dict[tuple[str, str, Launch, bool], bool] = {}
        self._flush = None if device.info.is_cpu else Flush(device, FLUSH_BYTES)

    def close(self) -> None:
        if self._flush is not None:
            self._flush.close()

    def measure(self, kernel: KernelClass, work: MatrixWork) -> Measured | None:
        """Measure a class by one work; None where the table's launch computes wrongly."""
        table, *others = candidates(self._table, kernel, self._device)
        if not self._is_right(kernel, table):
            return None
        right = [table, *(launch for launch in others if self._is_right(kernel, launch))]
        times = self._time(kernel, work, right)
        while True:
            best, gain = choose(times, table)
            if best == table or self._is_right(kernel, best, thorough=True):
                return Measured(kernel, table, best, gain)
            del times[best]

    def _is_right(self, kernel: KernelClass, launch: Launch, thorough: bool = False) -> bool:
        """Compare a launch with the twin, in one case, or in all that the kernel has."""
        key = (kernel.family, kernel.type, launch, thorough)
        if key not in self._right:
            self._right[key] = all(self._agreements(kernel, launch, thorough))
        return self._right[key]

    def _agreements(self, kernel: KernelClass, launch: Launch, thorough: bool) -> Iterator[bool]:
        families: tuple[str, ...] = (kernel.family,)
        if thorough and kernel.family in KEEPING:
            families += (KEEPING[kernel.family],)
        setting = Setting(kernel.type, launched(self._table, kernel, launch))
        for family in families:
            for trial in FAMILIES[family].trials(setting):
                for compare in trial.compares if thorough else trial.compares[:1]:
                    with Runner(self._device) as runner, np.errstate(all="ignore"):
                        yield compare(runner).worst.ok
                if not thorough:
                    return

    def _time(
        self, kernel: KernelClass, work: MatrixWork, launches: Sequence[Launch]
    ) -> dict[Launch, list[float]]:
        """Time launches in turns; seconds of each."""
        most_bytes = CPU_BYTES if self._device.info.is_cpu else GPU_BYTES
        arms, times = list[_Arm](), {launch: list[float]() for launch in launches}
        try:
            for launch in launches:
                runner = Runner(self._device)
                case = work.case(launched(self._table, kernel, launch), most_bytes)
                ready = case.prepare(runner)
                runner.run(ready.program, ready.rounds[0][0])
                arms.append(_Arm(launch, runner, runner.record(ready.program, self._timed)))
            began = time.monotonic()
            for n_done in range(MOST_ROUNDS):
                if n_done >= LEAST_ROUNDS and time.monotonic() - began > SECONDS:
                    break
                for arm in arms:
                    times[arm.launch].append(self._seconds(arm.recording))
        finally:
            for arm in arms:
                arm.runner.close()
        return times

    def _seconds(self, recording: Recording) -> float:
        """Run once with cold caches; the device's own clock, or else submit and wait."""
        flush = self._flush.recording if self._flush else None
        times = time_recording(self._device, recording, 1, self._timed, before=flush)
        return max(*times.device, 1e-9) if self._timed else times.wall[0]
