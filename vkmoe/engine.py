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

from vkmoe.closing import Closing
from vkmoe.config import EngineConfig
from vkmoe.execute.recorder import TokenPrograms
from vkmoe.experts.records.overlap import Overlap
from vkmoe.experts.records.profiler import ExpertProfiler
from vkmoe.experts.store.cache import ExpertCache
from vkmoe.facts import MemoryPlan, ModelSpec
from vkmoe.generate.loop import TopLogits
from vkmoe.gguf_file import GgufFile, open_gguf
from vkmoe.gpu.backend import Backend
from vkmoe.gpu.device import Device
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.transfer import Transfer
from vkmoe.models import read_spec
from vkmoe.models.decoder import Decoder
from vkmoe.models.tensors import ModelTensors, read_tensors
from vkmoe.models.workspace import KvCaches
from vkmoe.ops.tuning import Tuning
from vkmoe.placement.cache_choice import copies_overlap
from vkmoe.placement.expert_memory import ExpertPlaces
from vkmoe.placement.link import link_of_misses, submit_speed
from vkmoe.placement.loader import Progress, load_weights
from vkmoe.placement.plan import Decision, decide

__all__ = ["Engine"]


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
        decision = self._decide(config, tensors, tuning)
        self.tuning, self.workspace = decision.tuning, decision.workspace
        self.plan: MemoryPlan = decision.plan
        # ----- memory -----
        n_layers, cache_bytes = self.spec.n_layers, decision.attention_shape.cache_bytes
        caches = self._cleanup.enter_context(
            KvCaches(self.device, n_layers, cache_bytes, self.spec.n_caches)
        )
        places = self._cleanup.enter_context(ExpertPlaces(self.device, decision, checks))
        loaded = load_weights(self.device, self.file, self.spec, tensors, self.plan, progress)
        self._cleanup.callback(loaded.close)
        self._stop_before_freeing(places)
        self._table = loaded.table
        self._experts = places.follow(loaded, seed, self.link)
        # ----- programs -----
        weights, misses = places.extend(loaded)
        self._keeps = misses is not None and decision.ways.promote
        decoder = Decoder(
            self.spec,
            self.tuning,
            weights,
            self.workspace,
            decision.attention_shape,
            decision.attention_split,
            caches.addresses,
            misses,
        )
        self._record(decoder, submit_speed(self.device.info, self.link, decision.ways.way))
        self._stop_before_freeing(places)

    def _stop_before_freeing(self, places: ExpertPlaces) -> None:
        """What was entered so far goes after this: a submit or a thread may still use it."""
        self._cleanup.callback(self.device.finish)
        self._cleanup.callback(places.stop)

    def _decide(
        self, config: EngineConfig, tensors: ModelTensors, tuning: Tuning | None
    ) -> Decision:
        """How the model will run; the link is measured where experts have to cross it."""
        overlaps = copies_overlap(config, self.device.native.has_upload_queue)
        asked = config, self.spec, tensors, self.device.info, tuning
        decision = decide(*asked, None, overlaps)
        self.link = link_of_misses(self.device, decision.plan)
        return decision if self.link is None else decide(*asked, self.link, overlaps)

    def _record(self, decoder: Decoder, bytes_per_second: float | None) -> None:
        self._backend = Backend(self.device)
        self._transfer = self._cleanup.enter_context(Transfer(self.device))
        self._next_position = 0
        programs = TokenPrograms(
            self._backend,
            decoder,
            self.workspace,
            len(decoder.weights.moe_layers),
            self.spec.experts.n_used if self.spec.experts else 1,
            self.plan.executor,
            bytes_per_second,
        )
        self._programs = self._cleanup.enter_context(programs)

    # ----- running -----

    @property
    def ctx_size(self) -> int:
        return self.plan.ctx_size

    @property
    def n_vocab(self) -> int:
        return self.spec.n_vocab

    def run_token(self, token: int, position: int, with_logits: bool = True) -> TopLogits | None:
        """Process one token. Returns the largest logits, or None without logits.

        Tokens of a sequence must come in order of their positions; `rewind` goes back to an
        earlier one.
        """
        assert 0 <= position < self.ctx_size, (position, self.ctx_size)
        self._backend.settle()
        if position != self._next_position:
            self.rewind(position)
        self._next_position = position + 1
        began = perf_counter_ns()
        if self.plan.executor == "stepped":
            self._run_steps(token, position, with_logits)
        else:
            reader = self._experts.begin()
            self._programs.run(token, position, self._table.address, with_logits)
            self._experts.end(reader)
        if self._experts.overlap is not None:
            self._experts.timed(self._programs.intervals(), (began, perf_counter_ns()))
        routing = self.routing()
        filled = self._filled(routing)[None] if self._keeps else None
        self._experts.after_token(routing[None], filled)
        return TopLogits(*self._programs.candidates()) if with_logits else None

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
        """All logits of the last token run with logits: float32 [n_vocab]."""
        return self._programs.full_logits()

    def routing(self) -> NDArray[np.uint32]:
        """The experts the last token used: uint32 [n MoE layers, n_used]; empty for dense
        models.
        """
        return self._programs.routing()

    @property
    def cache(self) -> ExpertCache | None:
        """The expert cache; None where all experts are resident, or none."""
        return self._experts.cache

    @property
    def profiler(self) -> ExpertProfiler | None:
        """What was used and found on the device; None for a model without experts."""
        return self._experts.profiler if self.spec.experts else None

    @property
    def overlap(self) -> Overlap | None:
        """How much of the copying is hidden; None where nothing is copied beside tokens."""
        return self._experts.overlap

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
        return self._programs.program(with_logits)

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

    # ----- inside -----

    def _run_steps(self, token: int, position: int, with_logits: bool) -> None:
        """One submit for each MoE layer's experts, which are made available before it."""
        for step in range(self._programs.n_steps):
            reader = self._experts.begin(first=step == 0)
            self._programs.run_step(step, token, position, self._table.address, with_logits)
            self._experts.end(reader)
            if step + 1 < self._programs.n_steps:
                self._experts.need(step, self._programs.step_routing(step)[None])

    def _filled(self, routing: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Which of them were stored whole in a landing place: bool [n MoE layers, n_used]."""
        filled, whole = self._programs.filled(), routing + 1
        stored: NDArray[np.bool_] = (filled[..., 0] == whole) & (filled[..., 1] == whole)
        return stored
