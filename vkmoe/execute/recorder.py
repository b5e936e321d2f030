"""Records the program of a batch, whole or in segments, runs it, and reads what it reports.

Puts round the decoder's commands what the host exchanges with them, and owns that. Does not own
memory that outlives a token (weights, caches), nor what follows from a report.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import BatchKind, RunResult, TokenBatch
from vkmoe.choices import Executor
from vkmoe.closing import Closing
from vkmoe.execute.segments import (
    Bring,
    Part,
    bound_submits,
    cut_at_layers,
    cut_at_routers,
    part_bytes,
)
from vkmoe.gpu.backend import Backend, Recording, Submission
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.token_io import TokenIo
from vkmoe.gpu.transfer import Readback
from vkmoe.models.decoder import Decoder
from vkmoe.ops.candidates import CandidatesReader

__all__ = ["HostActions", "Recorded", "Segment", "TokenPrograms"]

_TIME_WEIGHT = 0.25  # of the newest run in the running estimate of the time

log = logging.getLogger("vkmoe")


class HostActions(Protocol):
    """Describes what the host does about experts round the submits of a run."""

    def begin(self, first: bool) -> int:
        """Make ready for a submit, and return the address of the expert table it shall read."""

    def end(self) -> None:
        """Note that the submit is over; it is not called for one that failed."""

    def bring(self, layer: int, experts: NDArray[np.uint32]) -> None:
        """Make experts [n_tokens, n_used] of a MoE layer available to the next submit."""


@dataclass(frozen=True)
class Segment:
    """Holds a recorded part of a program, and what the host does behind it."""

    program: Program
    recording: Recording
    then: Bring | None


class _Submit:
    """Groups segments that are queued one behind the other, without the host between them."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.recordings = tuple(segment.recording for segment in segments)
        self.then = segments[-1].then
        self.expected_ns = 0  # how long it takes, by those before


@dataclass(frozen=True)
class Recorded:
    """Holds a program as a whole, and its segments in order."""

    program: Program
    segments: tuple[Segment, ...]

    @cached_property
    def submits(self) -> list[_Submit]:
        """Group the segments: each group ends where the host has something to do."""
        groups: list[list[Segment]] = [[]]
        for segment in self.segments:
            groups[-1].append(segment)
            if segment.then is not None:
                groups.append([])
        return [_Submit(group) for group in groups]


class TokenPrograms(Closing):
    """Holds the programs of a decoder, recorded for every kind of batch, ready to be replayed.

    Fused, a program is one segment, or several that are queued together where one would take too
    long. Stepped, it ends a segment with the routing of each MoE layer, for the host to act on.
    """

    def __init__(
        self,
        backend: Backend,
        decoder: Decoder,
        executor: Executor = "fused",
        bytes_per_second: float | None = None,
    ) -> None:
        """Record the programs. Raises GpuErrors.

        At `bytes_per_second` the GPU gets at missed experts (at all weights, where it shares the
        host's memory): a fused token that takes too long for one submit at worst becomes several.
        None: not known, or nothing ends a submit that takes long; it stays one.
        """
        self._backend, space = backend, decoder.workspace
        borders = _submit_borders(backend, decoder, bytes_per_second)
        self._lands = decoder.mode.lands  # else the filled words mean nothing
        self._submissions: list[Submission] = []
        for tensor in space.tensors:
            backend.tensor(tensor)
        with ExitStack() as cleanup:  # kept unless something fails
            self.io = TokenIo(backend, space.params, space.log, space.candidates, len(borders) + 1)
            cleanup.callback(self.io.close)
            self._routing, self._filled = space.routing_log.views(self.io.view(space.log))
            words = self.io.view(space.candidates)
            self._candidates = CandidatesReader(words, decoder.spec.n_vocab)
            cleanup.callback(self._let_go)
            logits, n_bytes = backend.tensor(space.logits), space.logits.n_bytes
            self._logits = cleanup.enter_context(Readback(backend.device, logits, 0, n_bytes))
            self._recorder = _Recorder(backend, decoder, self.io, executor, borders)
            self.recorded: dict[BatchKind, Recorded] = {}
            for with_logits in (False, True):
                known = self.recorded.values()
                same = [segment for item in known for segment in item.segments]
                self.recorded[BatchKind(1, with_logits)] = self._recorder.record(with_logits, same)
            self._cleanup = cleanup.pop_all()

    # ----- running -----

    def run(self, batch: TokenBatch, host: HostActions) -> RunResult:
        """Process a batch, with `host` acting round its submits. Raises GpuErrors, and its own."""
        assert len(batch.tokens) == 1, "programs take one row"
        kind, self._submissions = batch.kind, []
        for index, submit in enumerate(self.recorded[kind].submits):
            self.io.send(batch, host.begin(index == 0))
            self._run(submit)
            host.end()
            if submit.then is not None:
                layer = submit.then.layer
                host.bring(layer, self._routing[:, layer].copy())
        top = self._candidates.read() if kind.with_logits else None
        return RunResult(self.routing(), self.filled() if self._lands else None, top)

    def _run(self, submit: _Submit) -> None:
        started = time.perf_counter_ns()
        expected = 0 if self._backend.device.info.is_cpu else submit.expected_ns
        self._submissions += self._backend.run(*submit.recordings, expected_ns=expected)
        elapsed = time.perf_counter_ns() - started
        known = submit.expected_ns or elapsed
        submit.expected_ns = int(known + _TIME_WEIGHT * (elapsed - known))
        self.io.receive(len(submit.recordings))

    # ----- reading -----

    def routing(self) -> NDArray[np.uint32]:
        """Return the experts the last run used: uint32 [n_tokens, n_moe_layers, n_used], a copy."""
        return self._routing.copy()

    def filled(self) -> NDArray[np.uint32]:
        """Return what the last run's misses left in landing places: see RoutingLog; a copy."""
        return self._filled.copy()

    def full_logits(self) -> NDArray[np.float32]:
        """Read all logits of the last run that wanted logits: float32 [n_vocab]."""
        return self._logits.read().view(np.float32)

    def intervals(self) -> list[tuple[int, int]]:
        """Return when each submit of the last run began and ended, in order, in nanoseconds.

        The clock is the compute queue's; submits whose times are not known are left out.
        `Device.has_common_clock` of the extension says whether copies may be compared with these.
        """
        known = (submission.interval() for submission in self._submissions)
        return [interval for interval in known if interval is not None]

    def program(self, with_logits: bool = True) -> Program:
        """Return the program of a token as a whole, however it is cut."""
        return self.recorded[BatchKind(1, with_logits)].program

    def close(self) -> None:
        """Free what is held. Must hold: no submit is in flight."""
        self._cleanup.close()

    def _let_go(self) -> None:
        """Drop mapped memory, which stays while its views live, and fences."""
        del self._routing, self._filled, self._candidates, self._submissions


def _submit_borders(
    backend: Backend, decoder: Decoder, bytes_per_second: float | None
) -> tuple[int, ...]:
    """Choose the layers that begin a submit of their own; n_layers means the output head."""
    if bytes_per_second is None:
        return ()
    shared = backend.device.info.is_uma
    cache_bytes = decoder.cache_bytes if shared else None
    parts = part_bytes(decoder.weights, decoder.workspace.routing_log.n_used, cache_bytes)
    bounded = bound_submits([n_bytes / bytes_per_second for n_bytes in parts])
    warning = bounded.warning(n_layers=len(parts) - 1)
    if warning is not None:
        log.warning(warning)
    return bounded.borders


@dataclass(frozen=True)
class _Recorder:
    """Makes the recordings of one decoder, timed where the device can. Methods raise GpuErrors."""

    backend: Backend
    decoder: Decoder
    io: TokenIo
    executor: Executor
    borders: Sequence[int]  # the layers that begin another submit; n_layers means the output head

    def record(self, with_logits: bool, known: Sequence[Segment] = ()) -> Recorded:
        """Record the program of a token. `known` segments of the same commands are used again."""
        body = self.decoder.token_program(with_logits)
        whole = self._dressed(body.name, Part(body.commands), 0, self._outputs(with_logits))
        if self.executor == "stepped":
            parts = cut_at_routers(body.commands)
        else:
            parts = cut_at_layers(body.commands, self.borders)
        segments: list[Segment] = []
        place = 0  # in its submit
        for index, part in enumerate(parts):
            ends_submit = part.then is not None or index + 1 == len(parts)
            outputs = self._outputs(with_logits and index + 1 == len(parts)) if ends_submit else ()
            name = f"{body.name} {index}" if len(parts) > 1 else body.name
            program = self._dressed(name, part, place, outputs)
            place = 0 if ends_submit else place + 1
            segments.append(self.segment(program, part.then, known))
        return Recorded(whole, tuple(segments))

    def _outputs(self, with_logits: bool) -> tuple[TensorRef, ...]:
        space = self.decoder.workspace
        return (space.log, space.candidates) if with_logits else (space.log,)

    def _dressed(self, name: str, part: Part, place: int, outputs: Sequence[TensorRef]) -> Program:
        """Build the program of a part: parameters in, the serial number, reports out.

        Segments of one submit share the parameters of the first, and each leaves proof that it ran:
        the last one all `outputs`, one at another `place` its serial.
        """
        program = Program(name)
        if place == 0:
            self.io.copy_in(program)
        else:
            self.io.clear_serial(program)
        program.commands.extend(part.commands)
        self.decoder.close_program(program)
        if outputs:
            self.io.copy_out(program, outputs)
        else:
            self.io.copy_serial(program, place)
        return program

    def segment(
        self, program: Program, then: Bring | None = None, known: Sequence[Segment] = ()
    ) -> Segment:
        """Record a program, or take the known segment that has the same commands."""
        for segment in known:
            if segment.then == then and segment.program.commands == program.commands:
                return segment
        return Segment(program, self.backend.record(program, timed=True), then)
