"""Runs a loaded model token by token, replaying what was recorded when it was loaded.

Owns the device, the weights, the KV cache and the recorded programs. Does not own text, sampling or
options.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import RunResult, TokenBatch, TopLogits
from vkmoe.closing import Closing
from vkmoe.config import EngineConfig
from vkmoe.execute.recorder import TokenPrograms
from vkmoe.experts.records.profiler import ExpertProfiler, Overlap
from vkmoe.experts.store.cache import ExpertCache
from vkmoe.facts import ModelSpec
from vkmoe.gpu.backend import Backend
from vkmoe.gpu.device import Device
from vkmoe.gpu.program import Program
from vkmoe.models import ModelFile, open_model
from vkmoe.models.decoder import Decoder
from vkmoe.models.workspace import KvCaches
from vkmoe.ops.tuning import Tuning
from vkmoe.placement.cache_choice import copies_overlap
from vkmoe.placement.expert_memory import ExpertMemory
from vkmoe.placement.link import link_of_misses, submit_speed
from vkmoe.placement.loader import Progress, load_weights
from vkmoe.placement.plan import Decision, decide
from vkmoe.placement.remembered import tuning_for

__all__ = ["Engine"]


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
        seed: NDArray[np.float64] | None = None,
        checks: bool = False,
    ) -> None:
        """Load `model`, which is closed with the engine, or when that cannot be made.

        `seed` are the counts of an earlier run, as `expert_counts()` gave them: a warm start.

        `checks` makes a wrong read of an expert visible, and looks for contradictions after every
        token (slow; for tests).
        """
        with ExitStack() as self._cleanup:
            opened = model if isinstance(model, ModelFile) else open_model(model)
            self.model = self._cleanup.enter_context(opened)
            self.spec: ModelSpec = opened.spec
            self.device = self._cleanup.enter_context(Device(config.device, config.validation))
            overlaps = copies_overlap(config, self.device.native.has_upload_queue)
            info, measure = self.device.info, lambda: link_of_misses(self.device)
            tuning = tuning or tuning_for(info, config.tuning)
            decision = decide(config, opened, info, tuning, measure, overlaps)
            self.tuning, self.workspace = decision.tuning, decision.workspace
            self.link, self.plan = decision.link, decision.plan
            self._load(decision, progress, seed, checks)
            self._cleanup = self._cleanup.pop_all()

    def _load(
        self,
        decision: Decision,
        progress: Progress | None,
        seed: NDArray[np.float64] | None,
        checks: bool,
    ) -> None:
        """Take the memory that was decided, fill it, and record the programs."""
        # ----- memory -----
        plan, enter = self.plan, self._cleanup.enter_context
        kinds = [self.workspace.attention[layer.mixer] for layer in self.spec.layers]
        states = [kind.state_bytes for kind in kinds]
        caches = enter(KvCaches(self.device, plan.layout("KV cache"), states))
        memory = enter(ExpertMemory(self.device, decision, checks))
        loaded = enter(load_weights(self.device, self.model, decision, progress))
        self._stop_before_freeing(memory)
        self._table = loaded.table
        self._experts = memory.follow(loaded, seed)
        # ----- programs -----
        weights, space = memory.extend(loaded), self.workspace
        decoder = Decoder(self.spec, self.tuning, weights, space, caches.addresses, plan.mode)
        self._backend = Backend(self.device)
        self._next_position = 0
        speed = submit_speed(self.device.info, self.link, plan.mode)
        self._programs = enter(TokenPrograms(self._backend, decoder, plan.executor, speed))
        self._stop_before_freeing(memory)

    def _stop_before_freeing(self, memory: ExpertMemory) -> None:
        """Stop submits and threads before what was entered so far is freed: they may use it."""
        self._cleanup.callback(self.device.finish)
        self._cleanup.callback(memory.stop)

    # ----- running -----

    @property
    def ctx_size(self) -> int:
        return self.plan.ctx_size

    @property
    def n_vocab(self) -> int:
        return self.spec.n_vocab

    def run(self, batch: TokenBatch) -> RunResult:
        """Process a batch; its result has the largest logits where it wants logits.

        Tokens of a sequence must come in order of their positions; `rewind` goes back to an
        earlier one.
        """
        first, last = batch.positions[0], batch.positions[-1]
        assert 0 <= first <= last < self.ctx_size, (batch, self.ctx_size)
        self._backend.settle()
        if first != self._next_position:
            self.rewind(first)
        self._next_position = last + 1
        began = perf_counter_ns()
        result = self._programs.run(batch, self._experts)
        if self._experts.overlap is not None:
            self._experts.timed(self._programs.intervals(), (began, perf_counter_ns()))
        landed = result.landed if self.plan.mode.promote else None
        self._experts.after_token(result.routing, landed)
        return result

    def run_token(self, token: int, position: int, with_logits: bool = True) -> TopLogits | None:
        """Process one token. Returns the largest logits, or None without logits."""
        return self.run(TokenBatch.one(token, position, with_logits)).top

    def rewind(self, position: int) -> int:
        """Forget what came from `position` on; tokens go on from the position returned.

        A KV cache holds every earlier position, so it is the one asked for, or the end of what was
        processed. What predicts experts from token to token begins anew.
        """
        if position != self._next_position:
            self._experts.residency.reset_predictions()
        self._next_position = min(position, self._next_position)
        return self._next_position

    def full_logits(self) -> NDArray[np.float32]:
        """Return all logits of the last token run with logits: float32 [n_vocab]."""
        return self._programs.full_logits()

    def routing(self) -> NDArray[np.uint32]:
        """Return the last token's experts: uint32 [n MoE layers, n_used]; empty without experts."""
        routing: NDArray[np.uint32] = self._programs.routing()[-1]
        return routing

    @property
    def cache(self) -> ExpertCache | None:
        """Return the expert cache; None where all experts are resident, or none is."""
        return self._experts.cache

    @property
    def profiler(self) -> ExpertProfiler | None:
        """Return the record of experts used and found on the device; None without experts."""
        return self._experts.profiler if self.spec.experts else None

    @property
    def overlap(self) -> Overlap | None:
        """Return how much of the copying is hidden; None where nothing is copied beside tokens."""
        return self._experts.overlap

    def settle(self) -> None:
        """Wait until no copy of an expert is under way. Raises DeviceLostError."""
        if self.cache is not None:
            self.cache.settle()

    def expert_counts(self) -> NDArray[np.float64]:
        """Return how often each expert was used lately, decayed: [n MoE layers * n_experts]."""
        return self._experts.residency.counts.values()

    def program(self, with_logits: bool = True) -> Program:
        """Return the program a token replays."""
        return self._programs.program(with_logits)

    def run_tokens(self, tokens: Sequence[int], position: int) -> TopLogits:
        """Process tokens from `position` on; return the last one's largest logits."""
        for offset, token in enumerate(tokens[:-1]):
            self.run_token(token, position + offset, with_logits=False)
        top = self.run_token(tokens[-1], position + len(tokens) - 1)
        assert top is not None
        return top

    def close(self) -> None:
        """Free everything. May be called twice."""
        self._cleanup.close()
