"""This module owns what host and token program exchange: parameters in, one readback buffer out.

Parameters are copied device-local at the head of the program and results are copied out at its end:
shaders never touch host memory, since small reads over the bus are what slows a GPU down most.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import TokenBatch
from vkmoe.errors import DeviceLostError
from vkmoe.gpu.backend import Backend
from vkmoe.gpu.program import Program, Range, TensorRef

__all__ = ["TokenIo", "pack_params", "param_words"]

# The parameters (shaders/include/params.glsl): a header, whose last words are zero, and rows.
HEADER_WORDS, ROW_WORDS = 8, 4
WANTS_LOGITS = 1  # a row's flag
_HEADER = struct.Struct("<Q3I12x")  # expert table address, serial, rows in use, landing row
_ROW = struct.Struct("<4I")  # token, position, sequence, flags


def param_words(n_rows: int) -> int:
    """Count the words of the parameters of a program that has `n_rows` rows."""
    return HEADER_WORDS + ROW_WORDS * n_rows


def pack_params(
    view: memoryview, batch: TokenBatch, table_address: int, serial: int, landing_row: int = 0
) -> None:
    """Write the parameters of a batch to `view`, of param_words(the program's rows) words.

    Rows that the batch does not have stay what they are. Only missed experts of `landing_row` land.
    """
    _HEADER.pack_into(view, 0, table_address, serial, len(batch.tokens), landing_row)
    rows = zip(batch.tokens, batch.positions, batch.sequences, batch.wants_logits, strict=True)
    for row, (token, position, sequence, wants_logits) in enumerate(rows):
        flags = WANTS_LOGITS * wants_logits
        _ROW.pack_into(view, _HEADER.size + row * _ROW.size, token, position, sequence, flags)


class TokenIo:
    """Owns the host's end of a token: the parameter and readback buffers and the serial number."""

    def __init__(
        self,
        backend: Backend,
        params: TensorRef,
        log: TensorRef,
        candidates: TensorRef,
        n_pieces: int = 1,
    ) -> None:
        """Allocate the buffers; that of results has the log, then the candidates.

        Behind them is a word for each but the last of the pieces that a run may be cut into.
        """
        self._params, self._log = params, log
        self._in = backend.device.allocate("host", params.n_bytes, "params")
        self._starts = {log.name: 0, candidates.name: log.n_words}  # words of the readback buffer
        self._serials_at = log.n_words + candidates.n_words
        n_bytes = 4 * (self._serials_at + n_pieces - 1)
        self._out = backend.device.allocate("readback", n_bytes, "readback")
        backend.bind("host params", self._in)
        backend.bind("readback", self._out)
        # What every token touches is made once: NumPy's first calls after a submit are slow.
        self._params_view = self._in.view().data
        self._words = self._out.view().view(np.uint32)
        self._data = self._words.data
        self._n_bytes = self._out.size
        self.serial = 0

    def copy_in(self, program: Program) -> None:
        """Append the copy that makes the parameters device-local."""
        n_bytes = self._params.n_bytes
        program.copy(Range("host params", 0, n_bytes), self._params.whole, "params in")

    def copy_out(self, program: Program, outputs: Sequence[TensorRef]) -> None:
        """Append the copies of some outputs to the readback buffer."""
        for output in outputs:
            start = 4 * self._starts[output.name]
            target = Range("readback", start, start + output.n_bytes)
            program.copy(output.whole, target, f"{output.name} out")

    def clear_serial(self, program: Program) -> None:
        """Append the copy that takes the serial of the piece before out of the log.

        The pieces of a token have the same serial: what is left there would vouch for the next.
        """
        zero = self._params.words(HEADER_WORDS - 1, 1)
        program.copy(zero, self._log.words(0, 1), "serial cleared")

    def copy_serial(self, program: Program, piece: int) -> None:
        """Append the copy of the log's serial to the readback word of a piece."""
        start = 4 * (self._serials_at + piece)
        target = Range("readback", start, start + 4)
        program.copy(self._log.words(0, 1), target, f"serial {piece} out")

    def send(self, batch: TokenBatch, table_address: int) -> None:
        """Write the parameters of the next submit. No submit may be in flight."""
        self.serial = self.serial % 0xFFFFFFFF + 1  # never 0, which the log begins with
        pack_params(self._params_view, batch, table_address, self.serial)

    def receive(self, n_pieces: int = 1) -> None:
        """Make the results readable and check that they are of the submits just waited for.

        Raises DeviceLostError when a serial is another: some drivers signal fences as success after
        a watchdog has reset the GPU.
        """
        self._out.invalidate(0, self._n_bytes)
        first, words = self._serials_at, self._data
        if [words[0], *words[first : first + n_pieces - 1]] != [self.serial] * n_pieces:
            raise DeviceLostError(
                "the GPU reported a finished token whose log was not written",
                "either the driver reset the GPU (close other GPU programs and try again), or this "
                "device computes nothing at all (see `vkmoe selftest --only finish`)",
            )

    def view(self, output: TensorRef) -> NDArray[np.uint32]:
        """Return an output's words, where `receive` leaves them; to be let go before `close`."""
        start = self._starts[output.name]
        return self._words[start : start + output.n_words]

    def close(self) -> None:
        del self._params_view, self._words, self._data
        self._in.close()
        self._out.close()
