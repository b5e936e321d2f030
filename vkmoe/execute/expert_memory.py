"""Makes the memory that experts come and go in, and the cache over it, as the plan has them.

Owns slots, those of a small host pool, scratch to gather in and to bring experts of prompts to, and
the threads that move bytes. Does not own the weights that stay where they are.
"""

from __future__ import annotations

from contextlib import ExitStack, closing

import numpy as np
from numpy.typing import NDArray

from vkmoe.choices import BufferName
from vkmoe.closing import Closing
from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.residency import PoolResidency, Residency
from vkmoe.experts.decide.token_table import History, TokenTable
from vkmoe.experts.records.profiler import Overlap
from vkmoe.experts.store.cache import CacheMemory, CacheWays, ExpertCache
from vkmoe.experts.store.copies import (
    CopyBudget,
    Prefetcher,
    Uploader,
    Uploads,
    come_in_order,
)
from vkmoe.experts.store.slots import POISON, SlotManager
from vkmoe.experts.store.tier import HostPool
from vkmoe.experts.store.tracker import ExpertTracker
from vkmoe.gpu.arena import Arena, Placement
from vkmoe.gpu.device import Device, Intent
from vkmoe.gpu.program import Range, memory_range
from vkmoe.kernels.prompt_experts.operations import N_HALVES, BroughtPlaces
from vkmoe.models.weights import ModelWeights, with_slots
from vkmoe.placement.decide import Decision
from vkmoe.weights.loader import LoadedWeights
from vkmoe.weights.span_reader import FileReads, StagedUploads

MOVED_SHARE = 8  # of the layers, each of which moves one expert with a token


class ExpertMemory(Closing):
    """Holds the memory of experts besides their homes.

    `checks` fills what nothing may read with NaN (tests). Raises OutOfMemoryError when made, with
    all freed.
    """

    def __init__(self, device: Device, decision: Decision, checks: bool = False) -> None:
        self._device, self._decision, self._checks = device, decision, checks
        plan = decision.plan
        with ExitStack() as cleanup:
            enter, pools = cleanup.enter_context, decision.host_pools

            def places(intent: Intent, name: BufferName) -> list[Placement]:
                layout = plan.layout(name)
                arena = enter(closing(Arena(device, intent, name, layout)))
                return [
                    arena.place(run.span_bytes) for run in layout.runs for _ in range(run.n_spans)
                ]

            self.slots = enter(SlotManager(device, decision.pools, checks, plan.landing_slots))
            self._host_slots = enter(SlotManager(device, pools, checks, intent="host"))
            self._scratch = places("device", "gathered experts")
            self._staging = places("host", "staged experts")
            self._brought = places("device", "brought experts")
            self._poison_brought()
            self._threads = enter(ExitStack())
            self._cleanup = cleanup.pop_all()

    def extend(self, loaded: LoadedWeights) -> ModelWeights:
        """Extend the weights by all memory their experts may lie in."""
        n_landing = loaded.table.landing.shape[1]
        places = self._brought_places(loaded)
        return with_slots(loaded.weights, self._ranges, self._landing_ranges, n_landing, places)

    def follow(self, loaded: LoadedWeights, seed: History | None) -> ExpertTracker:
        """Make the tracker that counts and moves the experts used; experts begin where they belong.

        `seed` is what an earlier run left. Where copies overlap tokens a thread copies, as
        many bytes as the link allows. Raises GpuErrors, ModelFileError.
        """
        decision, weights, table = self._decision, loaded.weights, loaded.table
        spans, numbers = np.array(weights.span_bytes, np.int64), weights.moe_layers
        space = KeySpace(len(numbers), table.entries.shape[1])
        counts, tokens = seed if seed is not None else (None, None)
        known = TokenTable.of(space, tokens) if tokens is not None else None
        residency = Residency(space, decision.pools, decision.cache_settings, counts, known)
        cache = None
        if decision.pools or decision.host_pools:
            memory = CacheMemory(table, self.slots, loaded.homes, weights.span_bytes, self._scratch)
            uploads = self._uploads(loaded)
            # Places of a host pool are written by the host, which has to know what was read.
            in_order = come_in_order(uploads) and not decision.host_pools
            ways = self._ways(spans, in_order)
            on_cpu = loaded.cpu.table if loaded.cpu is not None else None
            pool = self._pool(loaded, residency)
            cache = ExpertCache(residency, memory, uploads, ways, pool, on_cpu)
            cache.start(loaded.fill)
        table.publish()
        resident = np.full(len(numbers), not decision.plan.mode.can_miss)
        resident[: decision.plan.cpu_layers] = False
        absent = np.where(resident, 0, spans)
        return ExpertTracker(numbers, table, residency, cache, resident, self._checks, absent)

    def _ways(self, spans: NDArray[np.int64], in_order: bool) -> CacheWays:
        """Say how copies are made; `in_order` if submits find those before them without a wait.

        Where the CPU computes what has no slot nothing waits for them, and what a token moves may
        not depend on how long any took.
        """
        decision, by_cpu = self._decision, self._decision.plan.mode.by_cpu
        budget = overlap = None
        if decision.overlaps and decision.pools:
            budget = CopyBudget(decision.link, max(pool.slot_bytes for pool in decision.pools))
            overlap = Overlap(by_cpu or self._device.native.has_common_clock)
        if not by_cpu:
            return CacheWays(not decision.overlaps, in_order, budget, overlap)
        n_bytes = max(1, len(spans) // MOVED_SHARE) * int(spans.max())
        wait = not decision.overlaps
        return CacheWays(wait, overlap=overlap, punctual=True, fixed_bytes=n_bytes)

    def stop(self) -> None:
        """End the threads. To be called before the device finishes; may be called twice."""
        self._threads.close()

    def close(self) -> None:
        """Free all. Must hold: nothing is in flight."""
        self._cleanup.close()

    def _ranges(self, layer: int) -> tuple[Range, ...]:
        """List the memory in which experts of a MoE layer can lie besides their homes."""
        return (*self._landing_ranges(layer), *self._host_slots.ranges(layer))

    def _landing_ranges(self, layer: int) -> tuple[Range, ...]:
        """List the memory into which experts of a MoE layer can be stored by its kernels."""
        scratch = (memory_range(x.buffer.address, x.buffer.size) for x in self._scratch)
        return (*self.slots.ranges(layer), *dict.fromkeys(scratch))

    def _brought_places(self, loaded: LoadedWeights) -> BroughtPlaces | None:
        """Describe where experts of prompts are brought to; None: they are read where they are."""
        if not self._brought:
            return None
        plan, n_experts = self._decision.plan, loaded.table.entries.shape[1]
        (place,), (run,) = self._brought, plan.layout("brought experts").runs
        place_bytes = run.span_bytes // (N_HALVES * plan.brought_places)
        assert place_bytes >= max(loaded.weights.span_bytes), (run, plan.brought_places)
        return BroughtPlaces(place.address, place_bytes, plan.brought_places, n_experts)

    def _poison_brought(self) -> None:
        """Fill the places that experts will be brought to, with `checks`."""
        if not self._checks or not self._brought:
            return
        (run,) = self._decision.plan.layout("brought experts").runs
        with self._device.recorded("clearing the places of brought experts") as recorder:
            for place in self._brought:
                recorder.fill(place.buffer, place.offset, run.span_bytes, POISON)

    def _uploads(self, loaded: LoadedWeights) -> Uploader:
        uploads: Uploader = Uploads(self._device)
        if self._staging and loaded.reader is not None:
            uploads = StagedUploads(FileReads(loaded.reader), uploads, self._staging)
        if not self._decision.overlaps:
            return uploads
        return self._threads.enter_context(Prefetcher(uploads, "copies to the GPU"))

    def _pool(self, loaded: LoadedWeights, residency: Residency) -> HostPool | None:
        """Make the host pool, if it does not hold all experts."""
        if not self._decision.host_pools or loaded.reader is None:
            return None
        policy = self._decision.cache_settings.policy
        pools = self._decision.host_pools
        order = PoolResidency(residency.space, pools, policy, residency.counts)
        reads = Prefetcher(FileReads(loaded.reader), "reads from the file")
        return HostPool(
            order,
            self._host_slots,
            self._threads.enter_context(reads),
            loaded.table,
            loaded.weights.span_bytes,
            residency.locations,
            loaded.reader.will_read,
        )
