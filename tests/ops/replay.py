"""A program recorded once and replayed with new inputs, as the engine does it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from vkmoe.gpu.backend import Backend
from vkmoe.gpu.device import Device
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import SENTINEL
from vkmoe.gpu.transfer import Transfer

PARAMS = TensorRef("params", 16)
Words = NDArray[np.uint32]


def params_words(position: int = 0, serial: int = 0, table: int = 0, token: int = 0) -> Words:
    """The per-token parameters as params.glsl lays them out."""
    words = np.zeros(16, np.uint32)
    words[:6] = token, position, position + 1, serial, table & 0xFFFFFFFF, table >> 32
    return words


class Replay:
    """Owns the tensors of one program; each run fills what has no input with a NaN pattern."""

    def __init__(self, device: Device, program: Program) -> None:
        self._backend = Backend(device)
        self._transfer = Transfer(device, staging_bytes=1 << 20)
        refs = {ref for command in program.commands for ref in getattr(command, "tensors", ())}
        self._refs: list[TensorRef] = sorted(refs, key=lambda ref: ref.name)
        self._recording = self._backend.record(program)

    def run(
        self, inputs: Mapping[TensorRef, NDArray[np.generic]], *outputs: TensorRef,
    ) -> tuple[Words, ...]:
        """Replay; returns the words of the outputs."""
        for ref in self._refs:
            words = np.full(ref.n_words, SENTINEL, np.uint32)
            if ref in inputs:
                given = np.ascontiguousarray(inputs[ref]).reshape(-1).view(np.uint32)
                words[:given.size] = given
            self._transfer.write(self._backend.tensor(ref), 0, words.view(np.uint8))
        self._transfer.flush()
        self._backend.run(self._recording)
        return tuple(
            self._transfer.read(self._backend.tensor(ref), 0, ref.n_bytes).view(np.uint32)
            for ref in outputs)

    def close(self) -> None:
        self._transfer.close()
