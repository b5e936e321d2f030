"""Makes the memory that experts come and go in, and the cache over it, as the plan has them.

Owns slots, those of a small host pool, scratch to gather in and to bring experts of prompts to, and
the threads that move bytes. Does not own the weights that stay where they are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack, closing
from time import monotonic

import numpy as np

from vkmoe.closing import Closing
from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.residency import PoolResidency, Residency
from vkmoe.experts.decide.token_table import History, TokenTable
from vkmoe.experts.records.profiler import Overlap
from vkmoe.experts.store.cache import CacheMemory, CacheWays, ExpertCache
from vkmoe.experts.store.copies import CopyBudget, Prefetcher, Uploader, Uploads
from vkmoe.experts.store.slots import POISON, SlotManager
from vkmoe.experts.store.tier import HostPool
from vkmoe.experts.store.tracker import ExpertTracker
from vkmoe.gpu.arena import Arena
from vkmoe.gpu.device import Device, memory_type_candidates, translate_errors
from vkmoe.gpu.program import Range, memory_range
from vkmoe.models.weights import ModelWeights, with_slots
from vkmoe.modes import Cache, ExpertMode
from vkmoe.ops.prompt_experts import N_HALVES, BroughtPlaces
from vkmoe.placement.decide import Decision
from vkmoe.placement.loader import LoadedWeights
from vkmoe.weights.span_reader import FileReads, StagedUploads

__all__ = ["BudgetWatch", "ExpertMemory"]

log = logging.getLogger("vkmoe")
MOVED_SHARE = 8  # of the layers, each of which moves one expert with a token
WATCH_SECONDS = 1.0  # between two looks at the budget, each of which asks the driver


def _hybrid_ways(wait: bool, overlap: Overlap | None, span_bytes: Sequence[int]) -> CacheWays:
    """Say how copies are made where the CPU computes what has no slot.

    Nothing waits for them, and what a token moves may not depend on how long any took.
    """
    n_bytes = max(1, len(span_bytes) // MOVED_SHARE) * max(span_bytes)
    return CacheWays(wait, overlap=overlap, punctual=True, fixed_bytes=n_bytes)


class BudgetWatch:
    """Gives slots back where other programs take so much of a GPU's memory that ours is too much.

    Beyond its budget (VK_EXT_memory_budget) a driver moves what it likes to host memory, or refuses
    more. Does nothing where the driver tells no budget, or where the memory is the host's.
    """

    def __init__(self, device: Device, tracker: ExpertTracker, mode: ExpertMode) -> None:
        self._device, self._tracker = device, tracker
        # Which experts are the CPU's may not depend on other programs.
        self._gives = isinstance(mode, Cache)
        info = device.info
        self._heap = info.memory_types[memory_type_candidates(info, "device")[0]].heap
        heap = info.heaps[self._heap]
        self._watches = info.is_vulkan and not info.is_uma and bool(heap.budget)
        self._next_look = monotonic()
        self._was_over = self._warned = False

    def look(self) -> None:
        """Look at the budget, if that was not done of late. To be called between runs."""
        if not self._watches or monotonic() < self._next_look:
            return
        self._next_look = monotonic() + WATCH_SECONDS
        heap = self._device.heaps()[self._heap]
        n_over = (heap.usage or 0) - (heap.budget or 0)
        was_over, self._was_over = self._was_over, n_over > 0 and bool(heap.usage and heap.budget)
        if not (was_over and self._was_over):  # once may be for a moment
            return
        n_slots = n_freed = 0
        if self._gives:
            n_slots, n_freed = self._tracker.give_back(n_over)
        if n_freed:
            log.log(
                logging.INFO if self._warned else logging.WARNING,
                "other programs need the GPU's memory: %.0f MiB were given back, %d experts fewer "
                "have a slot",
                n_freed / 2**20,
                n_slots,
            )
        elif not self._warned:
            log.warning(
                "other programs need the GPU's memory, of which %.0f MiB too much are in use: "
                "expect to be slowed down; close them, or start again",
                n_over / 2**20,
            )
        self._warned = True


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
            self.slots = enter(SlotManager(device, decision.pools, checks, plan.landing_slots))
            self._host_slots = enter(SlotManager(device, pools, checks, intent="host"))
            layout = plan.layout("gathered experts")
            arena = enter(closing(Arena(device, "device", "gathered experts", layout)))
            sizes = [run.span_bytes for run in layout.runs for _ in range(run.n_spans)]
            self._scratch = [arena.place(n_bytes) for n_bytes in sizes]
            self._scratch_ranges = tuple(memory_range(x.address, x.size) for x in arena.chunks)
            layout = plan.layout("staged experts")
            arena = enter(closing(Arena(device, "host", "staged experts", layout)))
            sizes = [run.span_bytes for run in layout.runs for _ in range(run.n_spans)]
            self._staging = [arena.place(n_bytes) for n_bytes in sizes]
            layout = plan.layout("brought experts")
            arena = enter(closing(Arena(device, "device", "brought experts", layout)))
            self._brought = [arena.place(run.span_bytes) for run in layout.runs]
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
        space = KeySpace(len(weights.moe_layers), table.entries.shape[1])
        counts, tokens = seed if seed is not None else (None, None)
        known = TokenTable.of(space, tokens) if tokens is not None else None
        residency = Residency(space, decision.pools, decision.cache_settings, counts, known)
        overlaps = decision.overlaps
        cache = budget = overlap = None
        if overlaps and decision.pools:
            budget = CopyBudget(decision.link, max(pool.slot_bytes for pool in decision.pools))
            by_host = decision.plan.mode.by_cpu
            overlap = Overlap(by_host or self._device.native.has_common_clock)
        if decision.pools or decision.host_pools:
            memory = CacheMemory(table, self.slots, loaded.homes, weights.span_bytes, self._scratch)
            ways = CacheWays(not overlaps, budget, overlap)
            if decision.plan.mode.by_cpu:
                ways = _hybrid_ways(not overlaps, overlap, weights.span_bytes)
            pool = self._pool(loaded, residency)
            uploads = self._uploads(overlaps, loaded)
            on_cpu = loaded.cpu.table if loaded.cpu is not None else None
            cache = ExpertCache(residency, memory, uploads, ways, pool, on_cpu)
            cache.start(loaded.fill)
        table.publish()
        numbers, mode = weights.moe_layers, decision.plan.mode
        resident = np.full(len(numbers), not mode.can_miss)
        resident[: decision.plan.cpu_layers] = False
        none = np.zeros(len(numbers), np.int64)
        absent = np.where(resident, 0, weights.span_bytes) if cache is None and numbers else none
        return ExpertTracker(numbers, table, residency, cache, resident, self._checks, absent)

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
        return (*self.slots.ranges(layer), *self._scratch_ranges)

    def _brought_places(self, loaded: LoadedWeights) -> BroughtPlaces | None:
        """Describe where experts of prompts are brought to; None: they are read where they are."""
        plan, n_experts = self._decision.plan, loaded.table.entries.shape[1]
        for place, run in zip(self._brought, plan.layout("brought experts").runs, strict=True):
            place_bytes = run.span_bytes // (N_HALVES * plan.brought_places)
            assert place_bytes >= max(loaded.weights.span_bytes), (run, plan.brought_places)
            return BroughtPlaces(place.address, place_bytes, plan.brought_places, n_experts)
        return None

    def _poison_brought(self) -> None:
        """Fill the places that experts will be brought to, with `checks`."""
        if not self._checks or not self._brought:
            return
        (run,) = self._decision.plan.layout("brought experts").runs
        recorder = self._device.native.recorder()
        for place in self._brought:
            recorder.fill(place.buffer, place.offset, run.span_bytes, POISON)
        with translate_errors("clearing the places of brought experts"):
            self._device.native.submit(recorder.finish()).wait()

    def _uploads(self, overlaps: bool, loaded: LoadedWeights) -> Uploader:
        uploads: Uploader = Uploads(self._device)
        if self._staging and loaded.reader is not None:
            uploads = StagedUploads(FileReads(loaded.reader), uploads, self._staging)
        if not overlaps:
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
        )
