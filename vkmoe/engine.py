"""Runs batches of tokens through a loaded model, replaying what was recorded for their kind.

Owns the device, the weights, the KV cache and the recorded programs. Does not own text, sampling or
options.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import MAX_LATER, RunResult, TextForm, TokenBatch, TopLogits
from vkmoe.canary.check import passing
from vkmoe.closing import Closing
from vkmoe.config import EngineConfig
from vkmoe.cpu.device import CpuDevice
from vkmoe.cpu.host_memory import available_bytes
from vkmoe.devices import open_device
from vkmoe.errors import OutOfMemoryError
from vkmoe.execute.ahead import AheadPrograms
from vkmoe.execute.context_memory import ContextMemory
from vkmoe.execute.cpu_worker import CpuWorker
from vkmoe.execute.expert_memory import ExpertMemory
from vkmoe.execute.kept_texts import KeptText, KeptTexts
from vkmoe.execute.recorder import TokenPrograms
from vkmoe.execute.region_rows import Bytes, RegionRows
from vkmoe.execute.segments import submit_speed
from vkmoe.experts.decide.settings import copies_overlap
from vkmoe.experts.decide.token_table import History, TokenTable, Upcoming
from vkmoe.experts.records.profiler import ExpertProfiler, Overlap
from vkmoe.experts.records.timing import Computing, RunTimes
from vkmoe.experts.store.cache import ExpertCache
from vkmoe.experts.store.memory_watch import watches
from vkmoe.experts.store.tracker import ExpertTracker
from vkmoe.facts import ModelSpec
from vkmoe.gpu.backend import Backend
from vkmoe.gpu.program import Program
from vkmoe.interrupts import at_checkpoints, checkpoint, works_at_checkpoints
from vkmoe.kernels.tuning import Tuning
from vkmoe.models import ModelFile, open_model
from vkmoe.models.ahead import AheadDecoder, DraftDecoder
from vkmoe.models.decoder import Decoder
from vkmoe.models.fingerprint import fingerprint
from vkmoe.models.kept import Kept
from vkmoe.models.kv_caches import KvCaches
from vkmoe.placement.decide import Choosing, Decision, decide, with_less
from vkmoe.placement.forecast.measured import link_of_misses, recall_speeds
from vkmoe.placement.mode_choice import ModeChoice, decide_with
from vkmoe.placement.remembered import tuning_for
from vkmoe.weights.loader import LoadedWeights, load_weights
from vkmoe.weights.placer import Progress

log = logging.getLogger("vkmoe")


class Engine(Closing):
    """Runs a model on a device. Use it as a context manager.

    Raises ModelFileError, UnsupportedModelError, GpuErrors. After a DeviceLostError it can only be
    closed.
    """

    def __init__(
        self,
        model: Path | ModelFile,
        config: EngineConfig,
        progress: Progress | None = None,
        tuning: Tuning | None = None,
        *,
        choice: ModeChoice | None = None,
        seed: History | None = None,
        checks: bool = False,
    ) -> None:
        """Load `model`. The file is closed with the engine, or when loading fails.

        `choice` says where experts are computed if `config` leaves that open; without one they are
        on the device, or in a cache where not all fit.

        `seed` is what an earlier run left, as `history()` gave it: a warm start.

        `checks` makes a wrong read of an expert visible, and looks for contradictions after every
        token (slow; for tests).
        """
        with ExitStack() as kept:
            opened = model if isinstance(model, ModelFile) else open_model(model)
            self._opened = self.model = kept.enter_context(opened)
            self.spec: ModelSpec = opened.spec
            self._choice = choice
            asked, refusals = config, list[OutOfMemoryError]()
            with at_checkpoints():
                while True:
                    try:
                        kept.push(self._open(asked, progress, tuning, seed, checks))
                        break
                    except OutOfMemoryError as error:
                        refusals.append(error)
                        asked = self._with_less(config, refusals)
            self._cleanup = kept.pop_all()

    def _with_less(self, config: EngineConfig, refusals: list[OutOfMemoryError]) -> EngineConfig:
        """Ask for less where the device refused memory while loading; else raises the first error.

        Where even the plan finds no room, nothing was refused in loading.
        """
        less: EngineConfig | None = None
        if (refused := self._refused) is not None:
            info, free = self.device.info, available_bytes()
            less = with_less(config, refused, info, free, refusals[-1], len(refusals))
        if less is None:
            raise refusals[0]
        log.warning(
            "%s; loading again with less on the device: close other programs for more",
            str(refusals[-1]),
        )
        refusals[-1].__traceback__ = None  # its frames hold memory
        return less

    def _open(
        self,
        config: EngineConfig,
        progress: Progress | None,
        tuning: Tuning | None,
        seed: History | None,
        checks: bool,
    ) -> ExitStack:
        """Open the device, decide, and load; returns what frees all of it."""
        self._refused: Decision | None = None  # what is being loaded
        with ExitStack() as self._cleanup:
            opening = open_device(config.device, config.validation, config.threads)
            self.device = self._cleanup.enter_context(opening)
            overlaps = copies_overlap(config, self.device.native.has_upload_queue)
            info, path = self.device.info, Path(self.model.file.path)
            known = recall_speeds(info, path, config.tuning)
            choosing = Choosing(  # the link is measured anew, where there is one
                lambda: known.speeds.over_link(link_of_misses(self.device)),
                known=info.is_uma,
                corrections=known.corrections,
            )
            decision = self._decide(
                config, tuning or tuning_for(info, config.tuning), choosing, overlaps
            )
            self.tuning, self.workspace = decision.tuning, decision.workspace
            self.link, self.plan = decision.link, decision.plan
            self.prediction = decision.candidates[0].prediction
            self._refused = decision
            self.model = self._opened.guessing() if self.plan.n_guesses else self._opened
            self.spec = self.model.spec
            self._longest = config.ctx_size or self.spec.context_length
            self.cpu: CpuDevice | None = None  # beside the device
            if decision.cpu is not None:
                self.cpu = self._cleanup.enter_context(CpuDevice(config.threads))
            self._load(decision, progress, seed, checks)
            return self._cleanup.pop_all()

    def _decide(
        self, config: EngineConfig, tuning: Tuning, choosing: Choosing, overlaps: bool
    ) -> Decision:
        """Decide, with the tuning or with a plainer one where the device computes it wrongly."""

        def decided(by: Tuning) -> Decision:
            def of_mode(asked: EngineConfig) -> Decision:
                return decide(asked, self._opened, self.device.info, by, choosing, overlaps)

            return decide_with(self._choice, config, of_mode)

        if config.canary is False:
            return decided(tuning)
        return passing(self.device, self._opened, tuning, decided)

    def _load(
        self,
        decision: Decision,
        progress: Progress | None,
        seed: History | None,
        checks: bool,
    ) -> None:
        """Take the memory that was decided, fill it, and record the programs."""
        self._seed = seed
        # ----- memory -----
        plan, enter = self.plan, self._cleanup.enter_context
        kernels = self.workspace.mixers
        self._caches = enter(KvCaches(self.device, self.spec, kernels, plan, self._longest))
        memory = enter(ExpertMemory(self.device, decision, checks))
        too_large = plan.total("file") > available_bytes()
        loading = load_weights(self.device, self.model, plan, progress, self.cpu, too_large)
        loaded = enter(loading)
        self._stop_before_freeing(memory)
        self._table = loaded.table
        self._experts = memory.follow(loaded, seed)
        # ----- texts -----
        self._rows = enter(RegionRows(self.device, self.spec, self._caches, plan))
        self.texts = enter(KeptTexts(self.device, self._rows, plan.kept_bytes))
        self._watches = watches(self.device, self._experts, plan.mode, self.texts)
        lent = self.texts if self.device.info.is_uma else None
        self._context = ContextMemory(self._caches, self._experts, plan, lent)
        # ----- programs -----
        self._decoder = partial(self._decoder_of, memory, loaded)
        self._backend = Backend(self.device)
        self.times = RunTimes()  # of the last runs
        speed = submit_speed(self.device.info, self.link, plan.mode)
        worker = None
        if decision.cpu is not None and loaded.cpu is not None and self.cpu is not None:
            worker = enter(CpuWorker(self._backend, self.cpu, decision.cpu, loaded.cpu))
        programs = TokenPrograms(self._backend, self._decoder(), plan.executor, speed, worker)
        self._programs = enter(programs)
        self._ahead_weights = loaded.ahead
        self._ahead = self._make_ahead()
        self._stop_before_freeing(memory)

    def _decoder_of(self, memory: ExpertMemory, loaded: LoadedWeights) -> Decoder:
        """Make what builds programs for memory as it is now."""
        weights, caches = memory.extend(loaded), self._caches.addresses[: self.spec.n_layers]
        return Decoder(self.spec, self.tuning, weights, self.workspace, caches, self.plan.mode)

    def _make_ahead(self) -> AheadPrograms | None:
        """Make the programs of guesses for memory as it is now; None: nothing guesses."""
        weights = self._ahead_weights
        if weights is None:
            return None
        kind = AheadDecoder if self.spec.drafter is None else DraftDecoder
        caches, spec = self._caches.addresses[self.spec.n_layers :], self.spec.of_ahead
        decoder = kind(spec, self.tuning, weights.model, self.workspace, caches, ahead=weights)
        return AheadPrograms(self._backend, self._programs, decoder)

    def _renew(self) -> None:
        """Record all programs anew, as the caches have moved."""
        self._programs.renew(self._decoder())
        self._ahead = self._make_ahead()

    def _stop_before_freeing(self, memory: ExpertMemory) -> None:
        """Stop submits and threads before the memory that they may use is freed."""
        self._cleanup.callback(self.device.finish)
        self._cleanup.callback(memory.stop)

    # ----- running -----

    @property
    def ctx_size(self) -> int:
        """Return how many positions a sequence can have, if there is memory when it needs them."""
        return self.plan.ctx_size

    @works_at_checkpoints
    def make_room(self, n_positions: int) -> None:
        """Give each region of the KV caches room for so many positions, if it has less.

        Between runs. Raises OutOfMemoryError where too little memory is left, with all kept.
        """
        moved = True
        try:
            moved = self._context.grow(n_positions, self._rows.ends)
        finally:  # where memory ends, caches of some layers may have moved
            if moved:
                self._renew()

    @property
    def n_vocab(self) -> int:
        return self.spec.n_vocab

    @property
    def n_regions(self) -> int:
        """Return how many sequences the KV caches hold at once."""
        return self.plan.n_regions

    @property
    def max_decode_rows(self) -> int:
        """Return the most rows of a batch to decode.

        All experts that they may use in a layer must be in memory together, where not all are.
        """
        most, experts = self.workspace.row_sizes["decode"][-1], self.spec.experts
        if experts is None or self._experts.n_at_once >= experts.n_experts:
            return most
        return max(1, min(most, self._experts.n_at_once // experts.n_used))

    @property
    def max_drafted(self) -> int:
        """Return the most guesses of a batch that can be taken back."""
        return (self.plan.n_versions if self.spec.is_recurrent else self.max_decode_rows) - 1

    @property
    def max_logit_rows(self) -> int:
        """Return for how many rows of a prompt batch the head runs at once."""
        return self.workspace.logits.n_rows

    @property
    def prompt_rows(self) -> int:
        """Return how many rows of a prompt a batch takes now; it follows the measured time."""
        return self._programs.prompt_rows

    @works_at_checkpoints
    def run(self, batch: TokenBatch) -> RunResult:
        """Process a batch; its result has the largest logits of each row that wants any.

        Where more rows of a prompt want some than `max_logit_rows`, it has those of the first.
        Rows of a region must stand together, in order of their positions; `rewind` goes back to an
        earlier one. After Ctrl-C it may be called as before.
        """
        checkpoint()
        self.make_room(1 + max(batch.positions))
        for region, first, last in _spans(batch):
            assert 0 <= first <= last < self.ctx_size, (batch, self.ctx_size)
            if first != self._rows.ends[region]:
                found = self.rewind(region, first)
                assert found == first, f"region {region} goes on at {found}, not at {first}"
            self._rows.append(region, last)
        self.watch_memory()
        executor = "stepped" if self._experts.regain() else self.plan.executor
        if executor != self._programs.executor:
            self._programs.renew(self._decoder(), executor)
        self._programs.make_ready(batch)
        self._experts.before_run(Upcoming(batch.tokens, batch.later), batch.phase == "decode")
        began = perf_counter_ns()
        result = self._programs.run(batch, self._experts)
        host, computing = (began, perf_counter_ns()), self.computing()
        if self._experts.overlap is not None:
            self._experts.timed(computing.intervals, host)
        decodes = batch.phase == "decode"
        landed = result.landed if self.plan.mode.promotes and decodes else None
        n_decoded = len(set(batch.sequences)) if decodes else 0
        self._experts.after_run(result.routing, landed, n_decoded, batch.tokens)
        self.times.note(len(batch.tokens) * decodes, host, computing, self._experts.totals)
        if not decodes:
            ends = [wants and not batch.wants_states for wants in batch.wants_logits]
            wants = dict(zip(batch.sequences, ends, strict=True))  # of the last rows
            self._rows.copy_states(_spans(batch), wants)
        return result

    def watch_memory(self) -> None:
        """Give memory back that other programs need, and take it back: between runs.

        Raises DeviceLostError.
        """
        for watch in self._watches:
            watch.look()

    def computing(self) -> Computing:
        """Say how long the last run computed."""
        return self._programs.computing()

    @works_at_checkpoints
    def run_head(self, first: int) -> tuple[TopLogits, ...]:
        """Return the largest logits of further rows of the last batch, which was a prompt.

        Of those it is the `first`, counted from 0, and others behind it, `max_logit_rows` at most.
        """
        return self._programs.run_head(first, self._experts)

    @property
    def n_guesses(self) -> int:
        """Return how many tokens a layer guesses ahead at a time; 0: there is none."""
        return self.plan.n_guesses

    @works_at_checkpoints
    def guess(
        self, following: Sequence[int], wanted: Sequence[bool], n_tokens: int
    ) -> list[list[int]]:
        """Guess up to `n_tokens` behind rows of the last batch, for each that is `wanted`.

        `following` has the token behind each row, and any where a row was a wrong guess. Raises
        DeviceLostError. Must hold: `n_guesses`; no other batch, and no other head, ran since.
        """
        assert self._ahead is not None
        batch = self._programs.batch._replace(
            tokens=tuple(following), wants_logits=tuple(wanted), later=()
        )
        return self._ahead.guess(batch, n_tokens, self._caches.n_positions)

    def run_token(self, token: int, position: int, with_logits: bool = True) -> TopLogits | None:
        """Process one token. Returns the largest logits, or None without logits."""
        return self.run(TokenBatch.one(token, position, with_logits)).top

    def rewind(self, region: int, position: int) -> int:
        """Forget what came from `position` on in a region; return where tokens go on.

        Full attention keeps every earlier position, so it is the one asked for, or the end of what
        was processed. Windows and recurrent states are there for the last positions; else it is
        that of the last copy before them, or the beginning. Where more goes than guesses that were
        wrong, another text begins, and what predicts experts from token to token begins anew.
        """
        if not 0 <= self._rows.ends[region] - position < self.max_decode_rows:
            self._experts.residency.reset_predictions()
        return self._rows.go_back(region, position)

    @works_at_checkpoints
    def copy_region(self, source: int, target: int, n_positions: int, n_least: int = 0) -> int:
        """Copy the first positions of a region to another one, which then has only these.

        Returns how many: fewer where the state cannot stop there. Nothing is copied, and 0
        returned, if they are fewer than `n_least`.
        """
        ends = self._rows.ends
        assert source != target and n_positions <= ends[source], (source, target, n_positions)
        return self._rows.copy(source, target, n_positions, n_least)

    def keep_text(self, region: int, n_positions: int) -> KeptText | None:
        """Copy the first positions of a region to host memory, which `texts` owns.

        They are fewer where the state cannot stop just there. Returns None where memory has no room
        for them. Raises DeviceLostError.
        """
        assert n_positions <= self._rows.ends[region], (region, n_positions)
        return self.texts.keep(region, n_positions)

    def text_form(self, region: int) -> TextForm:
        """Say what a file of all that is in a region holds."""
        return self._rows.form(region, self._rows.ends[region])

    def text_bytes(self, form: TextForm) -> int | None:
        """Count the bytes of rows and states in a form; None: no text of the model has this form.

        Nothing need be there of it.
        """
        return self._rows.n_bytes(form) if self._rows.is_sound(form) else None

    @works_at_checkpoints
    def write_text(self, region: int, form: TextForm, write: Callable[[Bytes], object]) -> None:
        """Pass the rows and states of a region, `text_form` of it, to `write`, block by block.

        Raises GpuErrors, and what `write` raises.
        """
        self._rows.write(region, form, write)

    @works_at_checkpoints
    def read_text(self, region: int, form: TextForm, read: Callable[[Bytes], object]) -> None:
        """Fill a region with rows and states, of which `read` fills one block after the other.

        Must hold: `text_bytes` knows the form, and it has `ctx_size` positions at most. Raises
        OutOfMemoryError where too little memory is left, with all kept; other GpuErrors, and what
        `read` raises, which leave the region empty.
        """
        self.make_room(form.n_positions)
        self._experts.residency.reset_predictions()
        self._rows.read(region, form, read)

    @cached_property
    def text_fingerprint(self) -> bytes:
        """Return a hash of what the rows of a text depend on: the model, and what is kept of it.

        Raises ModelFileError where the model's file cannot be read any more.
        """
        return fingerprint(self.model, Kept.by(self.plan, self.ctx_size), self._longest)

    def full_logits(self, index: int = 0) -> NDArray[np.float32]:
        """Return all logits of the index-th row for which the head ran last: [n_vocab]."""
        return self._programs.full_logits(index)

    @works_at_checkpoints
    def states(self, first: int, n_rows: int) -> NDArray[np.float32]:
        """Return the states of rows of the last batch, as the output matrix would read them.

        They are [n_rows, width], those from the `first` row on, behind the last norm. That is
        computed on the host, in float64. Must hold: it `wants_states`, and these rows any.
        """
        rows = self._programs.states(first, n_rows).astype(np.float64)
        scales = 1 / np.sqrt(np.mean(rows**2, axis=1, keepdims=True) + self.spec.norm_eps)
        normed: NDArray[np.float32] = (rows * scales * self._output_gain).astype(np.float32)
        return normed

    @cached_property
    def _output_gain(self) -> NDArray[np.float32]:
        return self.model.tensors.output_gain.data(self.model.file).view(np.float32)

    def routing(self) -> NDArray[np.uint32]:
        """Return the last token's experts: uint32 [n MoE layers, n_used]; empty without experts."""
        routing: NDArray[np.uint32] = self._programs.routing()[-1]
        return routing

    @property
    def cache(self) -> ExpertCache | None:
        """Return the expert cache; None where all experts are resident, or none is."""
        return self._experts.cache

    @property
    def experts(self) -> ExpertTracker:
        """Return what counts the experts used, and moves them."""
        return self._experts

    @property
    def profiler(self) -> ExpertProfiler | None:
        """Return the record of experts used and found on the device; None without experts."""
        return self._experts.profiler if self.spec.experts else None

    @property
    def overlap(self) -> Overlap | None:
        """Return how much of the copying is hidden; None where nothing is copied beside tokens."""
        return self._experts.overlap

    @works_at_checkpoints
    def settle(self) -> None:
        """Wait until no copy of an expert is under way, and give slots what no text needs any more.

        Raises DeviceLostError.
        """
        if self.cache is not None:
            self.cache.settle()
        if self._context.shrink(self._rows.ends):
            self._renew()

    def history(self) -> History:
        """Return the uses of experts so far, those of earlier runs included."""
        self._experts.residency.learn()
        table = self._experts.residency.token_table
        tokens = self._seed.tokens if self._seed is not None else None
        counts = self._experts.residency.counts.values()
        return History(counts, table.rows() if isinstance(table, TokenTable) else tokens)

    def program(self, with_logits: bool = True) -> Program:
        """Return the program a token replays."""
        return self._programs.program(with_logits)

    def run_tokens(self, tokens: Sequence[int], position: int) -> TopLogits:
        """Process tokens from `position` on; return the last one's largest logits."""
        for offset, token in enumerate(tokens[:-1]):
            later = tuple(tokens[offset + 1 : offset + 1 + MAX_LATER])
            self.run(TokenBatch.one(token, position + offset, False)._replace(later=later))
        top = self.run_token(tokens[-1], position + len(tokens) - 1)
        assert top is not None
        return top

    def run_prompt(self, tokens: Sequence[int]) -> TopLogits:
        """Process the tokens of a prompt from position 0 on, in chunks of a length that suits.

        Returns the last one's largest logits.
        """
        top, first = None, 0
        while first < len(tokens):
            chunk = tuple(tokens[first : first + self.prompt_rows])
            n_rows, end = len(chunk), first + len(chunk)
            wants = (*(False for _ in chunk[1:]), end == len(tokens))
            positions = tuple(range(first, end))
            later = tuple(tokens[end : end + MAX_LATER])
            batch = TokenBatch(chunk, positions, (0,) * n_rows, wants, "prompt", later)
            top = self.run(batch).top
            first = end
        assert top is not None
        return top

    @works_at_checkpoints
    def close(self) -> None:
        """Free everything. May be called twice."""
        self._cleanup.close()


def _spans(batch: TokenBatch) -> Iterator[tuple[int, int, int]]:
    """Yield each region of a batch with its first and last position."""
    rows = zip(batch.sequences, batch.positions, strict=True)
    for region, found in groupby(rows, key=lambda row: row[0]):
        positions = [position for _, position in found]
        assert positions == list(range(positions[0], positions[0] + len(positions))), batch
        yield region, positions[0], positions[-1]
