"""Records the program of a token, whole or in segments, runs it, and reads what it reports.

Puts round the decoder's commands what the host exchanges with them. Owns what the host writes and
reads per token, and the running estimate of the time. Does not own memory that outlives a token
(weights, caches), nor what follows from a report.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vkmoe.choices import Executor
from vkmoe.closing import Closing
from vkmoe.execute.segments import bound_submits, cut, layer_ends, part_bytes, segments
from vkmoe.gpu.backend import Backend, Recording, Submission
from vkmoe.gpu.program import Command, Program
from vkmoe.gpu.token_io import TokenIo
from vkmoe.gpu.transfer import Readback
from vkmoe.models.decoder import Decoder
from vkmoe.models.workspace import Workspace
from vkmoe.ops.candidates import Candidates, CandidatesReader
from vkmoe.ops.router import LOG_HEADER_WORDS

__all__ = ["Recorded", "TokenPrograms"]

LOG, CANDIDATES = 0, 1  # the outputs of a token, in the order of its readback buffer
_TIME_WEIGHT = 0.25  # of the newest token in the running estimate of the token time
_WHOLE = -1  # where there is the number of a step: all of them

log = logging.getLogger("vkmoe")


class TokenPrograms(Closing):
    """The decoder's program with logits and the one without, ready to be replayed.

    Fused, a token is one call of `run`. Stepped, it is `n_steps` calls of `run_step`, which end
    with the routing of one MoE layer each, and with the rest of the layers at last.
    """

    def __init__(
        self,
        backend: Backend,
        decoder: Decoder,
        space: Workspace,
        n_moe_layers: int,
        n_used: int,
        executor: Executor = "fused",
        bytes_per_second: float | None = None,
    ) -> None:
        """`n_used` experts are used per MoE layer. Raises GpuErrors.

        What `executor` needs is recorded now, what the other one needs at its first use. At
        `bytes_per_second` the GPU gets at missed experts (at all weights, where it shares the
        host's memory): a fused token that takes too long for one submit at worst becomes several.
        None: not known, or nothing ends a submit that takes long; it stays one.
        """
        self._backend = backend
        self.n_steps = n_moe_layers + 1
        borders = _submit_borders(backend, decoder, n_used, bytes_per_second)
        self._submissions: list[Submission] = []
        self._expected_ns: dict[tuple[int, bool], int] = {}
        for tensor in space.tensors:
            backend.tensor(tensor)
        with ExitStack() as cleanup:  # kept unless something fails
            outputs = (space.log, space.candidates)
            self.io = TokenIo(backend, space.params, outputs, len(borders) + 1)
            cleanup.callback(self.io.close)
            words = self.io.view(LOG)[LOG_HEADER_WORDS:]
            # Behind the ids of all layers lie two words for each of them (ops/router.py).
            ids, filled = words[: words.size // 3], words[words.size // 3 :]
            self._routing = ids.reshape(-1, n_used)[:n_moe_layers]
            self._filled = filled.reshape(-1, n_used, 2)[:n_moe_layers]
            self._candidates = CandidatesReader(self.io.view(CANDIDATES))
            cleanup.callback(self._let_go)
            logits = backend.tensor(space.logits)
            readback = Readback(backend.device, logits, 0, space.logits.n_bytes)
            self._logits = cleanup.enter_context(readback)
            self._recorder = _Recorder(backend, decoder, self.io, borders)
            self.recorded: dict[bool, Recorded] = {}
            self._steps: dict[bool, list[Recorded]] = {}
            self._prepare(executor)
            self._cleanup = cleanup.pop_all()

    # ----- running -----

    def run(self, token: int, position: int, table_address: int, with_logits: bool) -> None:
        """Process one token with the experts where that table says. Raises GpuErrors."""
        if with_logits not in self.recorded:
            self._prepare("fused")
        self._submissions = []
        recordings = self.recorded[with_logits].recordings
        self._run(recordings, token, position, table_address, (_WHOLE, with_logits))

    def run_step(
        self, step: int, token: int, position: int, table_address: int, with_logits: bool
    ) -> None:
        """Process one token up to the routing of MoE layer `step`, from that of the one before.

        The table says where the experts of MoE layer `step - 1` are, which `step_routing` gave. The
        last step leaves what `run` leaves, to the last bit. Raises GpuErrors.
        """
        if with_logits not in self._steps:
            self._prepare("stepped")
        if step == 0:
            self._submissions = []
        recordings = self._steps[with_logits][step].recordings
        self._run(recordings, token, position, table_address, (step, with_logits))

    def _run(
        self,
        recordings: Sequence[Recording],
        token: int,
        position: int,
        table_address: int,
        what: tuple[int, bool],
    ) -> None:
        self.io.send(token, position, table_address)
        started = time.perf_counter_ns()
        known = self._expected_ns.get(what, 0)
        expected = 0 if self._backend.device.info.is_cpu else known
        self._submissions += self._backend.run_all(recordings, expected)
        elapsed = time.perf_counter_ns() - started
        self._expected_ns[what] = (
            int(known + _TIME_WEIGHT * (elapsed - known)) if known else elapsed
        )
        self.io.receive(len(recordings))

    # ----- reading -----

    def routing(self) -> NDArray[np.uint32]:
        """Return the experts the last token used (a copy): uint32 [n_moe_layers, n_used]."""
        return self._routing.copy()

    def step_routing(self, layer: int) -> NDArray[np.uint32]:
        """Return the experts MoE layer `layer` uses (a copy), after that step: uint32 [n_used]."""
        routing: NDArray[np.uint32] = self._routing[layer].copy()
        return routing

    def filled(self) -> NDArray[np.uint32]:
        """Return what the last token's misses left in landing places (a copy).

        uint32 [n_moe_layers, n_used, 2]: gate and up, then down, as `filled_words` has them.
        """
        return self._filled.copy()

    def candidates(self) -> Candidates:
        """Return the largest logits of the last token, which was run with logits."""
        return self._candidates.read()

    def full_logits(self) -> NDArray[np.float32]:
        """Read all logits of the last token run with logits: float32 [n_vocab]."""
        return self._logits.read().view(np.float32)

    def intervals(self) -> list[tuple[int, int]]:
        """Return when each submit of the last token began and ended, in order, in nanoseconds.

        The clock is the compute queue's; empty where that has no timestamps. A submit whose times
        are not known is left out. `Device.has_common_clock` of the extension says whether intervals
        of copies on the upload queue may be compared with these.
        """
        known = (submission.interval() for submission in self._submissions)
        return [interval for interval in known if interval is not None]

    def program(self, with_logits: bool = True) -> Program:
        """Return the program of a token as a whole, however it is cut."""
        known = self.recorded.get(with_logits)
        return known.program if known else self._recorder.whole(with_logits)

    def close(self) -> None:
        """Must hold: no submit is in flight."""
        self._cleanup.close()

    def _let_go(self) -> None:
        """Drop mapped memory, which stays while its views live, and fences."""
        del self._routing, self._filled, self._candidates, self._submissions

    def _prepare(self, executor: Executor) -> None:
        if executor == "fused":
            self.recorded = {flag: self._recorder.fused(flag) for flag in (False, True)}
        else:
            prompt = self._recorder.steps(False)
            self._steps = {False: prompt, True: self._recorder.steps(True, prompt[:-1])}


def _submit_borders(
    backend: Backend, decoder: Decoder, n_used: int, bytes_per_second: float | None
) -> tuple[int, ...]:
    """Choose the layers that begin a submit of their own; n_layers means the output head."""
    if bytes_per_second is None:
        return ()
    shared = backend.device.info.is_uma
    cache_bytes = decoder.cache_bytes if shared else None
    parts = part_bytes(decoder.weights, n_used, cache_bytes)
    bounded = bound_submits([n_bytes / bytes_per_second for n_bytes in parts])
    warning = bounded.warning(n_layers=len(parts) - 1)
    if warning is not None:
        log.warning(warning)
    return bounded.borders


@dataclass(frozen=True)
class Recorded:
    """A program and its recordings, which are submitted one behind the other."""

    program: Program
    recordings: tuple[Recording, ...]


class _Recorder:
    """Makes the recordings of one decoder, timed where the device can. Methods raise GpuErrors."""

    def __init__(
        self, backend: Backend, decoder: Decoder, io: TokenIo, borders: Sequence[int]
    ) -> None:
        """`borders` are the layers that begin another submit; n_layers means the output head."""
        self._backend, self._decoder, self._io, self._borders = backend, decoder, io, borders
        self._timed = backend.device.native.has_timestamps()

    def whole(self, with_logits: bool) -> Program:
        """Build the program of a token between the copy in and the copies out."""
        body = self._decoder.token_program(with_logits)
        return self._dressed(body.name, body.commands, with_logits)

    def fused(self, with_logits: bool) -> Recorded:
        """Record the whole: one piece, and one more for each border."""
        whole = self.whole(with_logits)
        if not self._borders:
            return Recorded(whole, (self._record(whole),))
        body = self._decoder.token_program(with_logits)
        ends = [end for end in layer_ends(body.commands) if end < len(body.commands)]
        parts = cut(body.commands, [ends[at - 1] for at in self._borders if at <= len(ends)])
        pieces = [
            self._piece(f"{body.name} {index}", part, index, index + 1 == len(parts), with_logits)
            for index, part in enumerate(parts)
        ]
        return Recorded(whole, tuple(self._record(piece) for piece in pieces))

    def steps(self, with_logits: bool, known: Sequence[Recorded] = ()) -> list[Recorded]:
        """Record the segments that end at routers; the last one alone depends on `with_logits`.

        `known` are the first ones, if they are recorded already.
        """
        parts = segments(self._decoder.token_program(with_logits).commands)
        steps = list(known)
        for index in range(len(steps), len(parts)):
            is_last = index + 1 == len(parts)
            program = self._dressed(f"step {index}", parts[index], with_logits and is_last)
            steps.append(Recorded(program, (self._record(program),)))
        return steps

    def _dressed(self, name: str, commands: Sequence[Command], with_logits: bool) -> Program:
        """Build a program of commands with parameters of its own, the serial number and reports."""
        program = Program(name)
        self._io.copy_in(program)
        program.commands.extend(commands)
        self._decoder.close_program(program)
        self._io.copy_out(program, 2 if with_logits else 1)
        return program

    def _piece(
        self, name: str, commands: Sequence[Command], index: int, is_last: bool, with_logits: bool
    ) -> Program:
        """Build a piece. All share the parameters of the first; each leaves proof that it ran."""
        program = Program(name)
        if index == 0:
            self._io.copy_in(program)
        else:
            self._io.clear_serial(program)
        program.commands.extend(commands)
        self._decoder.close_program(program)
        if is_last:
            self._io.copy_out(program, 2 if with_logits else 1)
        else:
            self._io.copy_serial(program, index)
        return program

    def _record(self, program: Program) -> Recording:
        return self._backend.record(program, timed=self._timed)
