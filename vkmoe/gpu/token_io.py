"""What the host and a token's program exchange: parameters in, one readback buffer out.

Parameters are copied device-local at the head of the program and results are copied out at its end:
shaders never touch host memory (gpu-facts.md, rules 2 and 3).
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkmoe.errors import DeviceLostError
from vkmoe.gpu.backend import Backend
from vkmoe.gpu.program import Program, Range, TensorRef

__all__ = ["PARAM_WORDS", "TokenIo"]

# token, position, expert table address, serial, eleven reserved words.
# Must be kept in sync with shaders/include/params.glsl.
PARAMS = struct.Struct("<2IQ12I")
PARAM_WORDS = PARAMS.size // 4


class TokenIo:
    """The host's end of a token: owns the parameter and readback buffers and the serial number."""

    def __init__(self, backend: Backend, params: TensorRef, outputs: tuple[TensorRef, ...]) -> None:
        """`outputs` lie one behind the other in the readback buffer; the first is the log."""
        self._params, self._outputs = params, outputs
        self._in = backend.device.allocate("host", params.n_bytes, "params")
        n_bytes = sum(output.n_bytes for output in outputs)
        self._out = backend.device.allocate("readback", n_bytes, "readback")
        backend.bind("host params", self._in)
        backend.bind("readback", self._out)
        self._params_view: Any = self._in.view()  # a buffer, which NumPy's stubs do not say
        self._words = self._out.view().view(np.uint32)
        ends = np.cumsum([output.n_words for output in outputs]).tolist()
        self._views = np.split(self._words, ends[:-1])
        self.serial = 0

    def copy_in(self, program: Program) -> None:
        """Append the copy that makes the parameters device-local."""
        n_bytes = self._params.n_bytes
        program.copy(Range("host params", 0, n_bytes), self._params.whole, "params in")

    def copy_out(self, program: Program, n_outputs: int) -> None:
        """Append the copies of the first `n_outputs` outputs to the readback buffer."""
        start = 0
        for output in self._outputs[:n_outputs]:
            target = Range("readback", start, start + output.n_bytes)
            program.copy(output.whole, target, f"{output.name} out")
            start += output.n_bytes

    def send(self, token: int, position: int, table_address: int) -> None:
        """Write the parameters of the next submit. No submit may be in flight."""
        self.serial = (self.serial + 1) & 0xFFFFFFFF
        head = (token, position, table_address, self.serial)
        PARAMS.pack_into(self._params_view, 0, *head, *([0] * 11))

    def receive(self) -> None:
        """Make the results readable and check that they are of the submit just waited for.

        Raises DeviceLostError when the log's serial is another: a watchdog's reset signals fences
        as success (gpu-facts.md, section 3).
        """
        self._out.invalidate(0, self._out.size)
        if int(self._words[0]) != self.serial:
            raise DeviceLostError(
                "the GPU reported a finished token whose log was not written",
                "the driver reset the GPU (watchdog); close other GPU programs and try again",
            )

    def words(self, output: int) -> NDArray[np.uint32]:
        """A copy of one output, as of the last `receive`."""
        return self._views[output].copy()

    def close(self) -> None:
        del self._params_view, self._words, self._views
        self._in.close()
        self._out.close()
