"""How long one checked dispatch takes, what an empty one takes, and how fast memory is copied.

Owns the clock of `bench.kernels`: the device's own timestamps, or where it has none the wall time
of a submit less that of an empty submit. A fill of more memory than caches hold goes before each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bench.measure import Mode, Summary, percentile, summarise
from bench.parts.common import MIB, time_recording
from vkmoe.closing import Closing
from vkmoe.errors import VkmoeError
from vkmoe.gpu.device import Device
from vkmoe.gpu.program import Dispatch, Program
from vkmoe.gpu.runner import Runner
from vkmoe.gpu.transfer import Transfer
from vkmoe.selftest.comparison import Check, Checks
from vkmoe.selftest.logits import FinishCase

if TYPE_CHECKING:
    from vkmoe.gpu import _native

__all__ = ["EMPTIEST", "Clock", "Floor", "WrongKernelError", "check_or_raise"]

MIN_SECONDS = 1e-8  # where noise makes a submit faster than an empty one
EMPTIEST = FinishCase((1,))  # one workgroup, which stores one word
HINT = "nothing wrong is timed; `vkmoe selftest` says what else this device computes wrongly"


class WrongKernelError(VkmoeError):
    """A kernel's result is not its twin's, so its time means nothing."""


class Floor(NamedTuple):
    """What no dispatch can be faster than."""

    copy_gb_per_s: Summary  # bytes read plus bytes written
    empty_dispatch_us: Summary  # `finish`: one workgroup that stores a word


class Clock(Closing):
    """Times dispatches on one device. Use it as a context manager."""

    def __init__(self, device: Device, repeats: int, flush_mib: int) -> None:
        self._device, self._repeats = device, repeats
        self._scratch = device.allocate("device", flush_mib * MIB, "flush")
        recorder = device.native.recorder()
        recorder.fill(self._scratch, 0, self._scratch.size, 0)
        self._flush = recorder.finish()
        self.mode: Mode = "gpu_timestamp" if _has_timestamps(device) else "wall"
        self._empty_submit = 0.0
        if self.mode == "wall":
            nothing = device.native.recorder().finish()
            self._empty_submit = percentile(self._seconds(nothing), 50)

    @property
    def explanation(self) -> str:
        """Which clock runs, in words."""
        if self.mode == "gpu_timestamp":
            return "gpu_timestamp: the device's own clock, before and behind one dispatch"
        return f"wall: submit and wait, less an empty submit ({1e6 * self._empty_submit:.1f} us)"

    def close(self) -> None:
        self._scratch.close()

    def dispatch_us(self, runner: Runner, variant: str) -> Summary:
        """Microseconds of the last dispatch of a variant that a runner has run, alone."""
        commands = [
            command
            for program in runner.programs
            for command in program.commands
            if isinstance(command, Dispatch) and command.variant == variant
        ]
        assert commands, (variant, runner.variants)
        alone = Program(variant, [commands[-1]])
        seconds = self._seconds(runner.record(alone, timed=self.mode == "gpu_timestamp"))
        return summarise([1e6 * took for took in seconds])

    def floor(self, copy_mib: int) -> Floor:
        """Checked like everything else: the word must be stored, every byte must arrive."""
        with Runner(self._device) as runner:
            check_or_raise(runner, EMPTIEST.run, "finish, one word")
            empty = self.dispatch_us(runner, "finish")
        return Floor(self._copy_speed(copy_mib * MIB), empty)

    def _copy_speed(self, n_bytes: int) -> Summary:
        """GB/s of a copy within device memory, both directions counted."""
        source = self._device.allocate("device", n_bytes, "copy source")
        target = self._device.allocate("device", n_bytes, "copy target")
        pattern = np.random.default_rng(0).integers(0, 256, n_bytes, np.uint8)
        timed = self.mode == "gpu_timestamp"
        recorder = self._device.native.recorder(n_timestamps=2 if timed else 0)
        if timed:
            recorder.timestamp(0)
        recorder.copy(source, 0, target, 0, n_bytes)
        if timed:
            recorder.timestamp(1)
        with Transfer(self._device) as transfer:
            transfer.write(source, 0, pattern)
            transfer.flush()
            seconds = self._seconds(recorder.finish())
            arrived = transfer.read(target, 0, n_bytes)
        source.close()
        target.close()
        if not np.array_equal(arrived, pattern):
            raise WrongKernelError("a copy within device memory brought other bytes", HINT)
        return summarise([2 * n_bytes / took / 1e9 for took in seconds])

    def _seconds(self, recording: _native.Recording) -> list[float]:
        """One warming run, then the repeats."""
        timed = self.mode == "gpu_timestamp"
        times = time_recording(
            self._device, recording, 1 + self._repeats, timed, before=self._flush
        )
        if timed:
            return times.device[1:]
        return [max(took - self._empty_submit, MIN_SECONDS) for took in times.wall[1:]]


def check_or_raise(runner: Runner, check: Callable[[Runner], Checks], what: str) -> Check:
    """The worst comparison of a case; WrongKernelError if one failed.

    What a wrong kernel leaves may be anything; the comparison must still come to its end.
    """
    with np.errstate(all="ignore"):
        worst = check(runner).worst
    if not worst.ok:
        raise WrongKernelError(
            f"{what}: {worst.what} is wrong: error {worst.error:.2e}, allowed "
            f"{worst.limit:.2e}{worst.where}",
            HINT,
        )
    return worst


def _has_timestamps(device: Device) -> bool:
    try:
        device.native.recorder(n_timestamps=2)
    except ValueError:
        return False
    return True
