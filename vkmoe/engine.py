"""Runs a loaded model token by token: one submit per token, replayed.

Owns the device, the weights, the KV cache, the recorded programs and the token's serial number.
Does not own text, sampling or options.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vkmoe.closing import Closing
from vkmoe.config import EngineConfig
from vkmoe.experts.cache import ExpertCache, ExpertMemory
from vkmoe.experts.keys import KeySpace
from vkmoe.experts.profiler import ExpertProfiler
from vkmoe.experts.residency import Residency
from vkmoe.experts.slots import SlotManager
from vkmoe.experts.tracker import ExpertTracker
from vkmoe.experts.uploads import Uploads
from vkmoe.facts import MemoryPlan, ModelSpec
from vkmoe.generate.loop import TopLogits
from vkmoe.gguf_file import GgufFile, open_gguf
from vkmoe.gpu.backend import Backend, Recording
from vkmoe.gpu.device import Device
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.token_io import TokenIo
from vkmoe.gpu.transfer import Readback, Transfer
from vkmoe.models import read_spec
from vkmoe.models.decoder import Decoder
from vkmoe.models.kv_cache import KvCaches
from vkmoe.models.tensors import read_tensors
from vkmoe.models.weights import with_slots
from vkmoe.ops.candidates import read_candidates
from vkmoe.ops.router import LOG_HEADER_WORDS
from vkmoe.ops.tuning import Tuning
from vkmoe.placement.decide import Decision, decide
from vkmoe.placement.link import link_of_misses
from vkmoe.placement.loader import LoadedWeights, Progress, load_weights

__all__ = ["Engine"]

LOG, CANDIDATES = 0, 1  # the outputs of a token, in the order of its readback buffer
_TIME_WEIGHT = 0.25  # of the newest token in the running estimate of the token time


@dataclass(frozen=True)
class _Recorded:
    """A program, its recording and a running estimate of its time."""

    program: Program
    recording: Recording


class Engine(Closing):
    """A model on a device. Use it as a context manager.

    Raises ModelFileError, UnsupportedModelError, GpuErrors. After a DeviceLostError it can only be
    closed.
    """

    def __init__(
        self,
        path: Path,
        config: EngineConfig,
        progress: Progress | None = None,
        tuning: Tuning | None = None,
        *,
        seed: NDArray[np.float64] | None = None,
        checks: bool = False,
    ) -> None:
        """`seed` are the counts of an earlier run, as `expert_counts()` gave them: a warm start.

        `checks` makes a wrong read of an expert visible, and looks for contradictions after every
        token (slow; for tests).
        """
        self._cleanup = ExitStack()
        try:
            self._open(path, config, progress, tuning, seed, checks)
        except BaseException:
            self._cleanup.close()
            raise

    def _open(
        self,
        path: Path,
        config: EngineConfig,
        progress: Progress | None,
        tuning: Tuning | None,
        seed: NDArray[np.float64] | None,
        checks: bool,
    ) -> None:
        # ----- what the file says -----
        self.file: GgufFile = self._cleanup.enter_context(open_gguf(path))
        self.spec: ModelSpec = read_spec(self.file)
        tensors = read_tensors(self.file, self.spec)
        # ----- what the device says, and what is decided -----
        self.device = self._cleanup.enter_context(Device(config.device, config.validation))
        decision = decide(config, self.spec, tensors, self.device.info, tuning)
        self.tuning, self.workspace = decision.tuning, decision.workspace
        self.plan: MemoryPlan = decision.plan
        self.link = link_of_misses(self.device, self.plan)
        # ----- memory -----
        n_layers, cache_bytes = self.spec.n_layers, decision.attention_shape.cache_bytes
        caches = self._cleanup.enter_context(KvCaches(self.device, n_layers, cache_bytes))
        slots = SlotManager(self.device, decision.pools, poison=checks)
        self._cleanup.callback(slots.close)
        loaded = load_weights(self.device, self.file, self.spec, tensors, self.plan, progress)
        self._cleanup.callback(loaded.close)
        weights = with_slots(loaded.weights, slots.ranges)
        self._table = loaded.table
        self._experts = self._follow_experts(decision, loaded, slots, seed, checks)
        # ----- programs -----
        self._backend = Backend(self.device)
        self._decoder = Decoder(
            self.spec,
            self.tuning,
            weights,
            self.workspace,
            decision.attention_shape,
            decision.attention_split,
            caches.addresses,
        )
        self._transfer = self._cleanup.enter_context(Transfer(self.device))
        self._io = self._make_io()
        logits = self.workspace.logits
        self._logits = self._cleanup.enter_context(
            Readback(self.device, self._backend.tensor(logits), 0, logits.n_bytes)
        )
        self._recorded = {flag: self._record(flag) for flag in (False, True)}
        self._token_ns = {False: 0, True: 0}
        # Runs before anything above is freed: an interrupted or failed submit may still read it.
        self._cleanup.callback(self.device.finish)

    # ----- running -----

    @property
    def ctx_size(self) -> int:
        return self.plan.ctx_size

    @property
    def n_vocab(self) -> int:
        return self.spec.n_vocab

    def run_token(self, token: int, position: int, with_logits: bool = True) -> TopLogits | None:
        """Process one token. Returns the largest logits, or None without logits.

        Tokens of a sequence must come in order of their positions; going back to an earlier
        position forgets what came after it.
        """
        assert 0 <= position < self.ctx_size, (position, self.ctx_size)
        expected = 0 if self.device.info.is_cpu else self._token_ns[with_logits]
        reader = self._experts.begin_token()
        self._io.send(token, position, self._table.address)
        started = time.perf_counter_ns()
        self._backend.run(self._recorded[with_logits].recording, expected)
        self._note_time(with_logits, time.perf_counter_ns() - started)
        self._io.receive()
        self._experts.end_token(reader, self.routing())
        return self._top_logits() if with_logits else None

    def full_logits(self) -> NDArray[np.float32]:
        """All logits of the last token run with logits: float32 [n_vocab]."""
        return self._logits.read().view(np.float32)

    def routing(self) -> NDArray[np.uint32]:
        """The experts the last token used: uint32 [n MoE layers, n_used]; empty for dense
        models.
        """
        n_used = self.spec.experts.n_used if self.spec.experts else 1
        rows = self._io.words(LOG)[LOG_HEADER_WORDS:].reshape(-1, n_used)
        return rows[: self._experts.residency.space.n_layers]

    @property
    def cache(self) -> ExpertCache | None:
        """The expert cache; None where all experts are resident, or none."""
        return self._experts.cache

    @property
    def profiler(self) -> ExpertProfiler | None:
        """What was used and found on the device; None for a model without experts."""
        return self._experts.profiler if self.spec.experts else None

    def settle(self) -> None:
        """Wait until no copy of an expert is under way. Raises DeviceLostError."""
        if self.cache is not None:
            self.cache.settle()

    def expert_counts(self) -> NDArray[np.float64]:
        """How often each expert was used lately: decayed counts [n MoE layers * n_experts]."""
        return self._experts.residency.counts.values()

    def memory(self) -> dict[str, int]:
        """Bytes planned by place ("device", "host")."""
        return {place: self.plan.total(place) for place in ("device", "host")}

    def program(self, with_logits: bool = True) -> Program:
        """The program a token replays."""
        return self._recorded[with_logits].program

    def tensor_values(self, ref: TensorRef) -> NDArray[np.uint32]:
        """The words of a workspace tensor after the last token (for tests and debugging)."""
        source = self._backend.tensor(ref)
        return self._transfer.read(source, 0, ref.n_bytes).view(np.uint32)

    def run_tokens(self, tokens: Sequence[int], position: int) -> TopLogits:
        """Process tokens from `position` on; the last one's largest logits."""
        for offset, token in enumerate(tokens[:-1]):
            self.run_token(token, position + offset, with_logits=False)
        top = self.run_token(tokens[-1], position + len(tokens) - 1)
        assert top is not None
        return top

    def close(self) -> None:
        """Free everything. May be called twice."""
        self._cleanup.close()

    # ----- making -----

    def _follow_experts(
        self,
        decision: Decision,
        loaded: LoadedWeights,
        slots: SlotManager,
        seed: NDArray[np.float64] | None,
        checks: bool,
    ) -> ExpertTracker:
        """Who counts the experts' uses, and moves them where not all have a slot."""
        weights = loaded.weights
        n_experts = self.spec.experts.n_experts if self.spec.experts else 1
        space = KeySpace(len(loaded.homes), n_experts)
        residency = Residency(space, decision.pools, decision.cache_settings, seed)
        memory = ExpertMemory(loaded.table, slots, loaded.homes, weights.span_bytes)
        cache = ExpertCache(residency, memory, Uploads(self.device)) if decision.pools else None
        loaded.table.publish()
        on_device = decision.plan.experts_in == "device"
        numbers = weights.moe_layers
        return ExpertTracker(numbers, loaded.table, residency, cache, on_device, checks)

    def _make_io(self) -> TokenIo:
        """The buffers the host writes and reads, and the tensors behind the workspace's names."""
        space = self.workspace
        for tensor in space.tensors:
            self._backend.tensor(tensor)
        io = TokenIo(self._backend, space.params, (space.log, space.candidates))
        self._cleanup.callback(io.close)
        return io

    def _record(self, with_logits: bool) -> _Recorded:
        """The decoder's program between the copy in and the copies out."""
        body = self._decoder.token_program(with_logits)
        program = Program(body.name)
        self._io.copy_in(program)
        program.commands.extend(body.commands)
        self._decoder.close_program(program)
        self._io.copy_out(program, 2 if with_logits else 1)
        return _Recorded(program, self._backend.record(program))

    # ----- reading -----

    def _top_logits(self) -> TopLogits:
        return TopLogits(*read_candidates(self._io.words(CANDIDATES)))

    def _note_time(self, with_logits: bool, elapsed_ns: int) -> None:
        known = self._token_ns[with_logits]
        self._token_ns[with_logits] = (
            elapsed_ns if not known else int(known + _TIME_WEIGHT * (elapsed_ns - known))
        )
