"""Runs the self-test's cases on CPU threads, as `vkmoe.gpu.runner.Runner` does on a device."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.cpu.programs import Rig, Words, words
from tests.gpu.invented import LAVAPIPE
from vkmoe.cpu.lowering import record
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import SENTINEL

__all__ = ["CpuRunner"]


class CpuRunner:
    """What cases ask of a runner: memory for arrays, and programs run on tensors."""

    def __init__(self, native: ModuleType, n_threads: int = 2) -> None:
        self._rig, self._placed = Rig(native, n_threads), dict[int, NDArray[np.uint8]]()
        self._tensors: dict[str, Words] = {}
        self._recordings: list[tuple[Program, Any]] = []
        self.native = native
        self.device = SimpleNamespace(info=LAVAPIPE)  # whose limits a case may ask for

    def __enter__(self) -> CpuRunner:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def place(self, data: NDArray[np.generic]) -> int:
        raw = np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8)
        room = np.zeros(raw.size + 512, np.uint8)
        first = -room.ctypes.data % 256
        room[first : first + raw.size] = raw
        address = room.ctypes.data + first
        self._placed[address] = room[first : first + raw.size]
        self._rig.regions.add(address, raw.size)
        return address

    def fetch(self, address: int, n_bytes: int) -> NDArray[np.uint8]:
        for first, bytes_ in self._placed.items():
            if first <= address and address + n_bytes <= first + bytes_.size:
                return bytes_[address - first :][:n_bytes].copy()
        raise AssertionError(f"no placed memory at {address:#x}")

    def run(
        self, program: Program, inputs: Mapping[TensorRef, NDArray[Any]], *outputs: TensorRef
    ) -> tuple[Words, ...]:
        refs = {ref for dispatch in program.dispatches() for ref in dispatch.tensors}
        for ref in refs | set(inputs) | set(outputs):
            tensor = self._tensors.setdefault(ref.name, np.zeros(ref.n_words, np.uint32))
            tensor[:] = SENTINEL
            if ref in inputs:
                given = words(np.ascontiguousarray(inputs[ref]))
                tensor[: given.size] = given
        self._recording(program).run(self._rig.pool)
        return tuple(self._tensors[ref.name].copy() for ref in outputs)

    def _recording(self, program: Program) -> Any:
        for known, recording in self._recordings:
            if known is program:
                return recording
        recording = record(program, self._tensors, self.native.Recording(self._rig.regions))
        self._recordings.append((program, recording))
        return recording
