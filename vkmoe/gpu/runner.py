"""Runs small programs on given arrays, returns what they wrote, times recordings: for tests and
benchmarks.

Owns the arrays it places and one `Backend`, so that programs that name the same tensors share
their kernels. Does not compare anything.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.closing import Closing
from vkmoe.gpu.backend import Backend, Buffer, Recording
from vkmoe.gpu.device import Device, Intent, translate_errors
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.shared_memory import with_filled_shared
from vkmoe.gpu.transfer import Transfer

if TYPE_CHECKING:
    from vkmoe.gpu import _native

SENTINEL = 0x7FC0DEAD  # a NaN pattern: what a dispatch that did not run leaves behind
STAGING_BYTES = 1 << 20
Words = NDArray[np.uint32]


class Runner(Closing):
    """Places arrays at device addresses, runs programs on tensors. Use it as a context manager."""

    def __init__(self, device: Device, intent: Intent = "device", fills: bool = False) -> None:
        """Say in which memory arrays are placed; `fills`: shared memory too, ahead of each kernel.

        That is for comparisons (shared_memory.py). Devices that run no shaders have no such memory.
        """
        self.device, self._intent, self._fills = device, intent, fills and device.info.is_vulkan
        self._backend = Backend(device)
        self._transfer = Transfer(device, STAGING_BYTES)
        self._buffers: list[Buffer] = []
        self._recordings: list[tuple[Program, _native.Recording]] = []

    def another(self) -> Runner:
        """Make a runner like this one, which has nothing placed and has run nothing."""
        return Runner(self.device, self._intent, self._fills)

    def place(self, data: NDArray[np.generic]) -> int:
        """Copy an array to memory of its own; returns its address (256-byte aligned)."""
        raw = np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8)
        buffer = self.allocate(-(-raw.size // 4) * 4 + 256)
        offset = -buffer.address % 256
        self._transfer.write(buffer, offset, raw)
        self._transfer.flush()
        self._buffers.append(buffer)
        return int(buffer.address) + offset

    def allocate(self, n_bytes: int) -> Buffer:
        """Allocate memory for an array."""
        return self.device.allocate(self._intent, n_bytes, "placed")

    def find(self, address: int, n_bytes: int) -> tuple[Buffer, int]:
        """Find the buffer of placed memory, and the byte in it."""
        for buffer in self._buffers:
            if buffer.address <= address and address + n_bytes <= buffer.address + buffer.size:
                return buffer, address - buffer.address
        raise AssertionError(f"no placed memory at {address:#x}")

    def fetch(self, address: int, n_bytes: int) -> NDArray[np.uint8]:
        """Read placed memory back."""
        return self._transfer.read(*self.find(address, n_bytes), n_bytes)

    def run(
        self, program: Program, inputs: Mapping[TensorRef, NDArray[np.generic]], *outputs: TensorRef
    ) -> tuple[Words, ...]:
        """Run once, recorded at the first run; returns the words of the outputs.

        Words without input, or behind it in their tensor, start as SENTINEL.
        """
        refs = {ref for dispatch in program.dispatches() for ref in dispatch.tensors}
        for ref in sorted(refs | set(inputs) | set(outputs), key=lambda ref: ref.name):
            words = np.full(ref.n_words, SENTINEL, np.uint32)
            if ref in inputs:
                given = np.ascontiguousarray(inputs[ref]).reshape(-1).view(np.uint32)
                words[: given.size] = given
            self._transfer.write(self._backend.tensor(ref), 0, words.view(np.uint8))
        self._transfer.flush()
        self._backend.run(self._recording(program))
        return tuple(
            self._transfer.read(self._backend.tensor(ref), 0, ref.n_bytes).view(np.uint32)
            for ref in outputs
        )

    @property
    def variants(self) -> set[str]:
        """Return the names of the SPIR-V modules of all programs that have run."""
        return {dispatch.variant for program in self.programs for dispatch in program.dispatches()}

    @property
    def programs(self) -> tuple[Program, ...]:
        """List all programs that have run, in the order of their first run."""
        return tuple(program for program, _ in self._recordings)

    def record(
        self, program: Program, timed: bool, barriers: list[bool] | None = None
    ) -> _native.Recording:
        """Make a recording that runs on what the tensors hold; see `Backend.record`."""
        return self._backend.record(program, barriers, timed)

    def close(self) -> None:
        self._recordings.clear()
        self._transfer.close()
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()

    def _recording(self, program: Program) -> _native.Recording:
        for known, recording in self._recordings:
            if known is program:
                return recording
        ran, barriers = program, None
        if self._fills:
            ran = with_filled_shared(program, self.device.info)
            barriers = [True] * len(ran.commands)  # a fill and its kernel share no bytes
        recording = self._backend.record(ran, barriers)
        self._recordings.append((program, recording))
        return recording


class Times(NamedTuple):
    """Holds the seconds of each repeat: wall from submit to the end of the wait, and on the GPU."""

    wall: list[float]
    device: list[float]  # empty where the recording has no timestamps


def time_recording(
    device: Device,
    recording: Recording,
    repeats: int,
    timed: bool = True,
    queue: str = "compute",
    before: Recording | None = None,
) -> Times:
    """Submit `repeats` times. `before` is run, unmeasured, ahead of each (to flush caches)."""
    times = Times([], [])
    with translate_errors("timing a recording"):
        for _ in range(repeats):
            if before is not None:
                device.native.submit(before).wait()
            started = time.perf_counter()
            device.native.submit(recording, queue).wait()
            times.wall.append(time.perf_counter() - started)
            if timed:
                first, last = recording.timestamps()
                times.device.append((last - first) / 1e9)
    return times


class Flush(Closing):
    """Owns memory whose filling takes the place of all that caches hold."""

    def __init__(self, device: Device, n_bytes: int) -> None:
        self._scratch = device.allocate("device", n_bytes, "flush")
        recorder = device.native.recorder()
        recorder.fill(self._scratch, 0, n_bytes, 0)
        self.recording = recorder.finish()

    def close(self) -> None:
        self._scratch.close()
