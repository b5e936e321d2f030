"""Records the program of a batch, whole or in segments, runs it, and reads what it reports.

Puts round the decoder's commands what the host exchanges with them, and owns that. Does not own
memory that outlives a token (weights, caches), nor what follows from a report.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import BatchKind, RunResult, TokenBatch, TopLogits
from vkmoe.choices import Executor
from vkmoe.closing import Closing
from vkmoe.execute.chunk_sizes import ChunkSizes
from vkmoe.execute.cpu_worker import CpuWorker
from vkmoe.execute.segments import (
    TARGET_S,
    Bounded,
    Bring,
    Compute,
    Part,
    bound_submits,
    cut_at_handovers,
    cut_at_layers,
    cut_at_marks,
    cut_at_routers,
    cut_prompt_at_routers,
    cut_within,
    part_bytes,
)
from vkmoe.experts.records.timing import Computing
from vkmoe.gpu.backend import Backend, Link, Recording, Submission
from vkmoe.gpu.program import Bound, Command, Program
from vkmoe.gpu.token_io import TokenIo
from vkmoe.gpu.transfer import Readback, Transfer
from vkmoe.interrupts import checkpoint
from vkmoe.kernels.logits.operations import PROOF_WORDS, CandidatesReader
from vkmoe.kernels.router.operations import LogViews
from vkmoe.models.decoder import Decoder
from vkmoe.modes import Hybrid

_TIME_WEIGHT = 0.25  # of the newest run in the running estimate of the time
# Drivers of CPUs reset nothing: there a submit of a prompt makes Ctrl-C and other replies wait.
_CPU_TARGET_S = 1.0

log = logging.getLogger("vkmoe")


class HostActions(Protocol):
    """Describes what the host does about experts round the submits of a run."""

    def begin(self, first: bool) -> int:
        """Make ready for a submit, and return the address of the expert table it shall read."""

    def meanwhile(self) -> None:
        """Do what can wait until the first submit of a run is under way."""

    def end(self) -> None:
        """Note that the submit is over; it is not called for one that failed."""

    def bring(self, layer: int, experts: NDArray[np.uint32], guess: bool = True) -> None:
        """Make experts [n_rows, n_used] of a MoE layer available to the next submit.

        They are one of its groups, for which nothing is to be guessed, or all that it uses.
        """

    def groups(self, experts: NDArray[np.uint32]) -> Sequence[NDArray[np.uint32]]:
        """Split distinct experts of a MoE layer into groups that `bring` can make available."""


@dataclass(frozen=True)
class Segment:
    """Holds a recorded part of a program, and what the host does behind it."""

    program: Program
    recording: Recording
    then: Bring | Compute | None
    waits: bool = False  # for what the CPU computes beside it


class Submit:
    """Groups segments that are queued one behind the other, without the host between them."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments, last = tuple(segments), segments[-1].then
        self.then = last if isinstance(last, Bring) else None
        self.expected_ns = 0  # how long it takes, by those before; 0: not known yet
        self._n_runs = 0

    @property
    def is_warm(self) -> bool:
        """Say whether the time is more than that of the first run, which touches memory first."""
        return self._n_runs > 1

    def took(self, ns: float) -> None:
        """Note how long it took now. Mutates."""
        weight = _TIME_WEIGHT if self.is_warm else 1.0
        self._n_runs += 1
        self.expected_ns += int(weight * (ns - self.expected_ns))


@dataclass(frozen=True)
class Recorded:
    """Holds the segments of a program, in order, and what makes it as a whole, to be looked at.

    Those of a prompt stand alone: any of them may begin a submit.
    """

    whole: Callable[[], Program]
    segments: tuple[Segment, ...]
    stand_alone: bool = False

    @cached_property
    def program(self) -> Program:
        """Return the program as a whole."""
        return self.whole()

    @cached_property
    def is_chain(self) -> bool:
        """Say whether the CPU computes experts between segments."""
        return any(isinstance(segment.then, Compute) for segment in self.segments)

    @cached_property
    def submits(self) -> list[Submit]:
        """Group the segments: each group ends where the host has something to do."""
        groups: list[list[Segment]] = [[]]
        for segment in self.segments:
            groups[-1].append(segment)
            if isinstance(segment.then, Bring) or self.stand_alone:
                groups.append([])
        return [Submit(group) for group in groups if group]

    def queues(self) -> Iterator[list[Submit]]:
        """Yield the submits that are queued together, without a wait between them.

        Where segments stand alone, neighbours are one submit while their times come to TARGET_S.
        (In 242 submits a prompt took an H100 131 ms, of which its commands ran for 31.) A part of
        experts, which may have to run again, has the host before and behind it. A chain in which
        the CPU computes experts is one queue.
        """
        if self.is_chain:
            yield self.submits
            return
        queue: list[Submit] = []
        in_groups, together = False, 0
        for submit in self.submits:
            together += submit.expected_ns
            known = bool(submit.expected_ns and queue and queue[-1].expected_ns)
            if queue and not (self.stand_alone and known and together <= TARGET_S * 1e9):
                yield queue
                queue, together = [], submit.expected_ns
            queue.append(submit)
            if submit.then is not None or in_groups:
                yield queue
                queue, together = [], 0
            in_groups = submit.then is not None and submit.then.in_groups
        if queue:
            yield queue


class TokenPrograms(Closing):
    """Holds the programs of a decoder, recorded for kinds of batches, ready to be replayed.

    A kind is recorded when a batch of it first comes; that of one row to decode at once.

    Fused, a program that decodes is one segment, or several that are queued together where one
    would take too long; one of a prompt has segments small enough to be queued by their times.
    Stepped, a program ends a segment with the routing of each MoE layer, for the host to act on.
    """

    def __init__(
        self,
        backend: Backend,
        decoder: Decoder,
        executor: Executor = "fused",
        bytes_per_second: float | None = None,
        worker: CpuWorker | None = None,
    ) -> None:
        """Record the program of one row. Raises GpuErrors.

        The `worker` computes the experts of the CPU, if there are any.
        At `bytes_per_second` the GPU gets at missed experts (at all weights, where it shares the
        host's memory): a fused token that takes too long for one submit at worst becomes several.
        None: not known, or nothing ends a submit that takes long; it stays one.
        """
        self._backend, self._space, space = backend, decoder.workspace, decoder.workspace
        self._worker = worker
        spec, self._lands = decoder.spec, decoder.mode.lands  # else filled words mean nothing
        self._n_vocab, self._picks, self._width = spec.n_vocab, spec.picks, spec.width
        self.batch = TokenBatch.one(0, 0, with_logits=False)  # the last one
        self._kinds: dict[tuple[object, ...], BatchKind] = {}  # by shapes of batches
        self._submissions: list[Submission] = []
        self._submitted_ns = 0  # in submits, by the host's clock, since the start
        sizes = space.row_sizes["prompt"] or (0,)
        self._chunks = ChunkSizes(sizes, _CPU_TARGET_S if backend.device.info.is_cpu else TARGET_S)
        # Where a prompt is cut by time, what follows it may not depend on where.
        self._fits_chunks = not isinstance(decoder.mode, Hybrid)
        self.prompt_rows = sizes[0 if self._fits_chunks else -1]  # of the next chunk
        for tensor in space.tensors:
            backend.tensor(tensor)
        with ExitStack() as cleanup:  # kept unless something fails
            self._map(cleanup)
            self._recorder = Recorder(backend, decoder, self.io, executor, bytes_per_second)
            bounds = self._recorder.bounds(space.row_sizes["decode"][-1])
            if warning := bounds.warning(spec.n_layers):
                log.warning(warning)
            self.recorded: dict[BatchKind, Recorded] = {}
            for n_logits in (0, 1):
                self.recording(BatchKind("decode", 1, n_logits))
            self._cleanup = cleanup.pop_all()

    def _map(self, cleanup: ExitStack) -> None:
        """Map the memory that the host writes before a run, and reads after it."""
        backend, space = self._backend, self._space
        self.io = TokenIo(backend, space.params, space.log, space.candidates)
        cleanup.callback(self.io.close)
        self._views: dict[int, LogViews] = {}  # by the rows of a program
        self._read: LogViews = self._log_views(1, 1)  # of the last run's rows
        rows = self.io.view(space.candidates).reshape(space.candidates.n_rows, -1)
        self._candidates = [CandidatesReader(words, self._n_vocab) for words in rows]
        cleanup.callback(self._let_go)
        logits, n_bytes = backend.tensor(space.logits), 4 * space.logits.row_words
        self._logits = [
            cleanup.enter_context(Readback(backend.device, logits, row * n_bytes, n_bytes))
            for row in range(space.logits.n_rows)
        ]

    def recording(self, kind: BatchKind) -> Recorded:
        """Return what is recorded for a kind of batches, recorded now if need be."""
        if kind not in self.recorded:
            alike = [item for other, item in self.recorded.items() if other[:2] == kind[:2]]
            known = [segment for item in alike for segment in item.segments]
            if self._worker is not None:
                self._worker.record(kind)
            self.recorded[kind] = self._recorder.record(kind, known)
        return self.recorded[kind]

    @property
    def executor(self) -> Executor:
        """Return how programs are cut now."""
        return self._recorder.executor

    def renew(self, decoder: Decoder, executor: Executor | None = None) -> None:
        """Record by another decoder from now on, each kind when a batch of it next comes.

        The two differ only in where memory is. `executor`: how to cut; None: as before. Must hold:
        no submit is in flight.
        """
        executor = executor or self.executor
        self._recorder = replace(self._recorder, decoder=decoder, executor=executor)
        self.recorded.clear()

    # ----- running -----

    def make_ready(self, batch: TokenBatch) -> None:
        """Record what a batch needs and no batch before it needed. Raises GpuErrors."""
        self.recording(self._kind(batch))

    def run(self, batch: TokenBatch, host: HostActions) -> RunResult:
        """Process a batch, with `host` acting round its submits. Raises GpuErrors, and its own."""
        kind, n_rows = self._kind(batch), len(batch.tokens)
        recorded = self.recording(kind)
        if batch.phase == "prompt" and 0 in batch.positions:
            self._chunks.begin_prompt()
        self.batch, self._submissions = batch, []
        self._read = self._log_views(kind.n_rows, n_rows)
        then: Bring | None = None
        for index, queue in enumerate(recorded.queues()):
            for act in self._actions(then, host):
                checkpoint()
                act()
                self.io.send(batch, host.begin(index == 0))
                if self._worker is not None:  # now that its table is the one of this run
                    self._worker.begin(kind, batch)
                self._run(queue, host.meanwhile if index == 0 else None, recorded.stand_alone)
                host.end()
            then = queue[-1].then
        if batch.phase == "prompt" and n_rows == kind.n_rows and self._fits_chunks:
            self._fit_chunks(kind.n_rows, recorded)
        return RunResult(
            self.routing(), self.filled() if self._lands else None, self._tops(kind, batch)
        )

    def run_head(self, first: int, host: HostActions) -> tuple[TopLogits, ...]:
        """Return the largest logits of rows of the last batch, a prompt, that want any.

        Of those it is the `first` and as many behind it as the head takes. They left their state,
        which the head alone reads. Raises GpuErrors.
        """
        batch, kind = self.batch, self._kind(self.batch)
        assert kind.phase == "prompt" and 0 <= first < sum(batch.wants_logits), (batch, first)
        self.io.send(batch, host.begin(True), first)
        self._run(self.recording(kind).submits[-1:], None)
        host.end()
        return self._tops(kind, batch, first)

    def _tops(self, kind: BatchKind, batch: TokenBatch, first: int = 0) -> tuple[TopLogits, ...]:
        return self.tops(min(sum(batch.wants_logits) - first, kind.n_logits))

    def tops(self, n: int) -> tuple[TopLogits, ...]:
        """Read the largest logits of the first rows for which the head ran last."""
        return tuple(reader.read() for reader in self._candidates[:n])

    def _run(
        self,
        queue: Sequence[Submit],
        meanwhile: Callable[[], None] | None,
        as_one: bool = False,
    ) -> None:
        started = time.perf_counter_ns()
        known = sum(submit.expected_ns for submit in queue)
        expected = 0 if self._backend.device.info.is_cpu else known
        segments = [segment for submit in queue for segment in submit.segments]
        if any(isinstance(segment.then, Compute) for segment in segments):
            links = [
                Link(segment.recording, self._work(segment), segment.waits) for segment in segments
            ]
            self._submissions += self._backend.run_chain(links, meanwhile)
        else:
            recordings = [segment.recording for segment in segments]
            self._submissions += self._backend.run(
                *recordings, expected_ns=expected, meanwhile=meanwhile, as_one=as_one
            )
        elapsed = time.perf_counter_ns() - started
        self._submitted_ns += elapsed
        for submit in queue:
            submit.took(elapsed * submit.expected_ns / known if known else elapsed / len(queue))
        self.io.receive(len(segments))

    def _work(self, segment: Segment) -> Callable[[], None] | None:
        """Return what the CPU computes when a segment has run; None: nothing."""
        if not isinstance(segment.then, Compute):
            return None
        assert self._worker is not None, segment.program.name
        return partial(self._worker.compute, segment.then.layer)

    def _fit_chunks(self, n_rows: int, recorded: Recorded) -> None:
        """Choose the rows of the next chunk, so that no submit takes longer than its target."""
        if all(submit.is_warm for submit in recorded.submits):
            longest_s = max(submit.expected_ns for submit in recorded.submits) / 1e9
            self.prompt_rows = self._chunks.next(n_rows, longest_s)

    def _actions(self, then: Bring | None, host: HostActions) -> list[Callable[[], None]]:
        """List what the host does before each run of what comes next, which runs as often."""
        if then is None:
            return [lambda: None]
        layer = then.layer
        experts = self._read.ids[:, layer].copy()
        if then.in_groups:
            if self._picks(layer):
                experts = experts[np.flatnonzero(self.batch.wants_logits)]
            groups = host.groups(np.unique(experts)) if experts.size else ()
            bring = partial(host.bring, layer, guess=False)
            return [partial(bring, group[None]) for group in groups] or [lambda: None]
        return [partial(host.bring, layer, experts)]

    def _kind(self, batch: TokenBatch) -> BatchKind:
        """Choose the smallest program that takes a batch."""
        shape = (batch.phase, len(batch.tokens), sum(batch.wants_logits), batch.wants_states)
        if shape not in self._kinds:
            self._kinds[shape] = self._find_kind(batch)
        return self._kinds[shape]

    def _find_kind(self, batch: TokenBatch) -> BatchKind:
        n_rows, n_logits = len(batch.tokens), sum(batch.wants_logits)
        assert 0 < n_rows <= self._space.row_sizes[batch.phase][-1], batch
        if batch.phase == "decode":
            assert n_logits in (0, n_rows), "rows to decode want logits, all or none"
            return self._space.batch_kind("decode", n_rows, n_logits)
        n_logits = 0 if batch.wants_states else n_logits
        n_logits = min(n_logits, self._space.logits.n_rows)  # the head runs again for the others
        return self._space.batch_kind("prompt", n_rows, n_logits)

    def _log_views(self, n_rows: int, n_used: int) -> LogViews:
        """Return views of the first rows of the log of a program with `n_rows` rows."""
        if n_rows not in self._views:
            log = self._space.routing_log(n_rows)
            self._views[n_rows] = log.views(self.io.view(log.tensor))
        ids, filled = self._views[n_rows]
        return LogViews(ids[:n_used], filled[:n_used])

    # ----- reading -----

    def routing(self) -> NDArray[np.uint32]:
        """Return the experts the last run used: uint32 [n_rows, n_moe_layers, n_used], a copy."""
        return self._read.ids.copy()

    def filled(self) -> NDArray[np.uint32]:
        """Return what the last run's misses left in landing places: see RoutingLog; a copy."""
        return self._read.filled.copy()

    def full_logits(self, index: int = 0) -> NDArray[np.float32]:
        """Read all logits of the index-th row for which the head ran last: f32 [n_vocab]."""
        return self._logits[index].read().view(np.float32)[: self._n_vocab]

    def states(self, first: int, n_rows: int) -> NDArray[np.float32]:
        """Read what the last layer left of rows of the last run: f32 [n_rows, width], a copy.

        Must hold: it was of a prompt, and wanted states of these rows. Raises GpuErrors.
        """
        assert self.batch.wants_states and all(self.batch.wants_logits[first : first + n_rows])
        hidden, device = self._space.hidden, self._backend.device
        row_bytes = 4 * hidden.row_words
        with Transfer(device) as transfer:
            memory = self._backend.tensor(hidden)
            data = transfer.read(memory, first * row_bytes, n_rows * row_bytes)
        rows = data.view(np.float32).reshape(n_rows, hidden.row_words)
        return rows[:, : self._width]

    def intervals(self) -> list[tuple[int, int]]:
        """Return when each submit of the last run began and ended, in order, in nanoseconds.

        The clock is the compute queue's; submits whose times are not known are left out.
        `Device.has_common_clock` of the extension says whether copies may be compared with these.
        """
        known = (submission.interval() for submission in self._submissions)
        return [interval for interval in known if interval is not None]

    def computing(self) -> Computing:
        """Return when the last run computed, by the device's clock, and sums by the host's."""
        cpu_ns = self._worker.busy_ns if self._worker is not None else 0
        n_submits = len(self._submissions)
        return Computing(self.intervals(), n_submits, self._submitted_ns, cpu_ns)

    def program(self, with_logits: bool = True) -> Program:
        """Return the program of a token as a whole, however it is cut."""
        return self.recording(BatchKind("decode", 1, int(with_logits))).program

    def close(self) -> None:
        """Free what is held. Must hold: no submit is in flight."""
        self._cleanup.close()

    def _let_go(self) -> None:
        """Drop mapped memory, which stays while its views live, and fences."""
        del self._views, self._read, self._candidates, self._submissions


@dataclass(frozen=True)
class Recorder:
    """Makes the recordings of one decoder, timed where the device can. Methods raise GpuErrors."""

    backend: Backend
    decoder: Decoder
    io: TokenIo
    executor: Executor
    bytes_per_second: float | None  # at which misses are read; None: not known, or of no interest

    def bounds(self, n_rows: int) -> Bounded:
        """Choose the layers that begin a submit where rows are decoded; n_layers means the head.

        At worst every row reads experts of its own, and all of its cache.
        """
        if self.bytes_per_second is None:
            return Bounded((), ())
        decoder, shared = self.decoder, self.backend.device.info.is_uma
        caches = [n_rows * n_bytes for n_bytes in decoder.cache_bytes] if shared else None
        n_used = n_rows * decoder.workspace.routing_log(1).n_used
        parts = part_bytes(decoder.weights, n_used, caches)
        return bound_submits([n_bytes / self.bytes_per_second for n_bytes in parts])

    def record(self, kind: BatchKind, known: Sequence[Segment] = ()) -> Recorded:
        """Record the program of a kind. `known` segments of the same commands are used again."""
        body = self.decoder.program(kind)
        whole = partial(self._dressed, body.name, body.commands, kind, outputs=self.outputs(kind))
        parts, alone = self._parts(kind, body), kind.phase == "prompt"
        segments: list[Segment] = []
        begins = True  # a submit
        for index, part in enumerate(parts):
            is_last = index + 1 == len(parts)
            ends = isinstance(part.then, Bring) or is_last
            outputs = self.outputs(kind if is_last else kind._replace(n_logits=0)) if ends else ()
            if alone and not ends:
                outputs = (self.decoder.workspace.log.part(0, PROOF_WORDS),)
            name = f"{body.name} {index}" if len(parts) > 1 else body.name
            program = self._dressed(name, part.commands, kind, begins or alone, outputs)
            segments.append(self.segment(program, part.then, part.waits, known))
            begins = ends
        return Recorded(whole, tuple(segments), alone)

    def _parts(self, kind: BatchKind, body: Program) -> list[Part]:
        stepped = self.executor == "stepped"
        if any(layer.feed_forward.block.on_cpu for layer in self.decoder.weights.layers):
            parts = cut_at_handovers(body.commands, before_head=kind.phase == "prompt")
            return cut_within(parts, self._is_border(kind))
        if kind.phase == "prompt":
            return (cut_prompt_at_routers if stepped else cut_at_marks)(body.commands)
        if stepped:
            return cut_at_routers(body.commands)
        return cut_at_layers(body.commands, self.bounds(kind.n_rows).borders)

    def _is_border(self, kind: BatchKind) -> Callable[[Command, Command], bool]:
        """Return what says whether a long part of a chain is cut between two commands."""
        if kind.phase == "prompt":
            return lambda one, more: one.mark != more.mark
        borders, n_layers = self.bounds(kind.n_rows).borders, self.decoder.spec.n_layers

        def begins_a_submit(one: Command, more: Command) -> bool:
            layer = n_layers if more.mark.layer is None else more.mark.layer
            return one.mark.layer != more.mark.layer and layer in borders

        return begins_a_submit

    def outputs(self, kind: BatchKind) -> tuple[Bound, ...]:
        """Return what the last part of a program puts out."""
        space = self.decoder.workspace
        log = space.log.part(0, space.routing_log(kind.n_rows).n_words)
        return (log, space.candidates.rows(kind.n_logits)) if kind.n_logits else (log,)

    def _dressed(
        self,
        name: str,
        commands: Sequence[Command],
        kind: BatchKind,
        begins: bool = True,
        outputs: Sequence[Bound] = (),
    ) -> Program:
        """Build the program of a part: parameters in, the proof that it ran, reports out.

        Segments of one submit share the parameters of the one that `begins` it, and what the last
        one puts out.
        """
        program = Program(name)
        if begins:
            self.io.copy_in(program, kind.n_rows)
        program.commands.extend(commands)
        self.decoder.close_program(program)
        self.io.copy_out(program, outputs)
        return program

    def segment(
        self,
        program: Program,
        then: Bring | Compute | None = None,
        waits: bool = False,
        known: Sequence[Segment] = (),
    ) -> Segment:
        """Record the program of a part, or take the known segment that has the same commands."""
        for segment in known:
            if segment.then == then and segment.program.commands == program.commands:
                return segment
        return Segment(program, self.backend.record(program, timed=True), then, waits)
