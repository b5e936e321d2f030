"""The programs of a token as recorded: runs them and reads what they report.

Owns what the host writes and reads per token, and the running estimate of the time. Does not own
memory that outlives a token (weights, caches), nor what follows from a report.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vkmoe.closing import Closing
from vkmoe.gpu.backend import Backend, Recording
from vkmoe.gpu.program import Program
from vkmoe.gpu.token_io import TokenIo
from vkmoe.gpu.transfer import Readback
from vkmoe.models.decoder import Decoder, Workspace
from vkmoe.ops.candidates import Candidates, CandidatesReader
from vkmoe.ops.router import LOG_HEADER_WORDS

__all__ = ["Recorded", "TokenPrograms"]

LOG, CANDIDATES = 0, 1  # the outputs of a token, in the order of its readback buffer
_TIME_WEIGHT = 0.25  # of the newest token in the running estimate of the token time


@dataclass(frozen=True)
class Recorded:
    """A program and its recording."""

    program: Program
    recording: Recording


class TokenPrograms(Closing):
    """The decoder's program with logits and the one without, ready to be replayed."""

    def __init__(
        self, backend: Backend, decoder: Decoder, space: Workspace, n_moe_layers: int, n_used: int
    ) -> None:
        """`n_used` experts are used per MoE layer. Raises GpuErrors."""
        self._backend, self._decoder = backend, decoder
        for tensor in space.tensors:
            backend.tensor(tensor)
        with ExitStack() as cleanup:  # kept unless something fails
            self.io = TokenIo(backend, space.params, (space.log, space.candidates))
            cleanup.callback(self.io.close)
            self._routing = self.io.view(LOG)[LOG_HEADER_WORDS:].reshape(-1, n_used)[:n_moe_layers]
            self._candidates = CandidatesReader(self.io.view(CANDIDATES))
            cleanup.callback(self._drop_views)
            logits = backend.tensor(space.logits)
            readback = Readback(backend.device, logits, 0, space.logits.n_bytes)
            self._logits = cleanup.enter_context(readback)
            self.recorded = {flag: self._record(flag) for flag in (False, True)}
            self._cleanup = cleanup.pop_all()
        self._token_ns = {False: 0, True: 0}

    def run(self, token: int, position: int, table_address: int, with_logits: bool) -> None:
        """Process one token with the experts where that table says. Raises GpuErrors."""
        is_cpu = self._backend.device.info.is_cpu
        self.io.send(token, position, table_address)
        started = time.perf_counter_ns()
        expected = 0 if is_cpu else self._token_ns[with_logits]
        self._backend.run(self.recorded[with_logits].recording, expected)
        self._note_time(with_logits, time.perf_counter_ns() - started)
        self.io.receive()

    def routing(self) -> NDArray[np.uint32]:
        """The experts the last token used (a copy): uint32 [n_moe_layers, n_used]."""
        return self._routing.copy()

    def candidates(self) -> Candidates:
        """The largest logits of the last token, which was run with logits."""
        return self._candidates.read()

    def full_logits(self) -> NDArray[np.float32]:
        """All logits of the last token run with logits: float32 [n_vocab]."""
        return self._logits.read().view(np.float32)

    def close(self) -> None:
        """Must hold: no submit is in flight."""
        self._cleanup.close()

    def _drop_views(self) -> None:
        """Of mapped memory, which stays while they live."""
        del self._routing, self._candidates

    def _record(self, with_logits: bool) -> Recorded:
        """The decoder's program between the copy in and the copies out."""
        body = self._decoder.token_program(with_logits)
        program = Program(body.name)
        self.io.copy_in(program)
        program.commands.extend(body.commands)
        self._decoder.close_program(program)
        self.io.copy_out(program, 2 if with_logits else 1)
        return Recorded(program, self._backend.record(program))

    def _note_time(self, with_logits: bool, elapsed_ns: int) -> None:
        known = self._token_ns[with_logits]
        self._token_ns[with_logits] = (
            elapsed_ns if not known else int(known + _TIME_WEIGHT * (elapsed_ns - known))
        )
