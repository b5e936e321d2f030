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
from vkmoe.gpu.program import Bound, Program, Range, TensorRef

# The parameters (shaders/include/params.glsl): a header, whose last words are zero, and rows.
HEADER_WORDS, ROW_WORDS = 8, 4
# Expert table address, serial, rows in use, landing row, rows that want logits, first of the head.
_HEADER = struct.Struct("<Q5I4x")
_ROW = struct.Struct("<4I")  # token, position, sequence, picked


def param_words(n_rows: int) -> int:
    """Count the words of the parameters of a program that has `n_rows` rows."""
    return HEADER_WORDS + ROW_WORDS * n_rows


def pack_params(
    view: memoryview,
    batch: TokenBatch,
    table_address: int,
    serial: int,
    landing_row: int = 0,
    first_picked: int = 0,
) -> None:
    """Write the parameters of a batch to `view`, of param_words(the program's rows) words.

    Rows that the batch does not have stay what they are. Only missed experts of `landing_row` land.
    The head runs for rows that want logits from the `first_picked` of them on.
    """
    n_rows = len(batch.tokens)
    picked = [row for row, wanted in enumerate(batch.wants_logits) if wanted]
    numbers = (table_address, serial, n_rows, landing_row, len(picked), first_picked)
    _HEADER.pack_into(view, 0, *numbers)
    picked += [0] * (n_rows - len(picked))
    rows = zip(batch.tokens, batch.positions, batch.sequences, picked, strict=True)
    for row, words in enumerate(rows):
        _ROW.pack_into(view, _HEADER.size + row * _ROW.size, *words)


class TokenIo:
    """Owns the host's end of a batch: the parameter and readback buffers and the serial number.

    The readback buffer has the log, which has fewer words where a program has fewer rows, then the
    candidates.
    """

    def __init__(
        self,
        backend: Backend,
        params: TensorRef,
        log: TensorRef,
        candidates: TensorRef,
    ) -> None:
        """Allocate the buffers for tensors of the most rows that any program has; clear the log."""
        self._params, self._log = params, log
        self._in = backend.device.allocate("host", params.n_bytes, "params")
        self._starts = {log.name: 0, candidates.name: log.n_words}  # words of the buffer
        n_words = log.n_words + candidates.n_words
        self._out = backend.device.allocate("readback", 4 * n_words, "readback")
        backend.bind("host params", self._in)
        backend.bind("readback", self._out)
        backend.clear(log)
        # What every token touches is made once: NumPy's first calls after a submit are slow.
        self._params_view = self._in.view().data
        self._words = self._out.view().view(np.uint32)
        self._data = self._words.data
        self.serial = 0

    def copy_in(self, program: Program, n_rows: int = 1) -> None:
        """Append the copy that makes the parameters of `n_rows` rows device-local."""
        n_bytes = 4 * param_words(n_rows)
        target = self._params.words(0, param_words(n_rows))
        program.copy(Range("host params", 0, n_bytes), target, "params in")

    def copy_out(self, program: Program, outputs: Sequence[Bound]) -> None:
        """Append the copies of the first words of some outputs to the readback buffer."""
        for tensor, written in outputs:
            assert written.start == 0, written
            start = 4 * self._starts[tensor.name]
            target = Range("readback", start, start + written.end)
            program.copy(written, target, f"{tensor.name} out")

    def send(self, batch: TokenBatch, table_address: int, first_picked: int = 0) -> None:
        """Write the parameters of the next submit. No submit may be in flight."""
        self.serial = self.serial % 0xFFFFFFFF + 1  # never 0, which the log is cleared to
        landing_row = self.serial % len(batch.tokens)  # each has its turn
        numbers = (table_address, self.serial, landing_row, first_picked)
        pack_params(self._params_view, batch, *numbers)

    def receive(self, n_programs: int = 1) -> None:
        """Make results readable and check that they are of what was just waited for.

        That is so many programs, each of which left its proof in the log. Raises DeviceLostError
        when one is missing: some drivers signal fences as success after a watchdog has reset the
        GPU.
        """
        self._out.invalidate(0, self._out.size)
        if (self._data[0], self._data[1]) != (self.serial, n_programs):
            raise DeviceLostError(
                "the GPU reported a finished token whose log was not written",
                "either the driver reset the GPU (close other GPU programs and try again), or this "
                "device computes nothing at all (see `vkmoe selftest --only finish`)",
            )

    def view(self, output: TensorRef) -> NDArray[np.uint32]:
        """Return an output's words, where `receive` leaves them; to be let go before `close`.

        Of the log that of a program with fewer rows will do.
        """
        start = self._starts[output.name]
        return self._words[start : start + output.n_words]

    def close(self) -> None:
        del self._params_view, self._words, self._data
        self._in.close()
        self._out.close()
