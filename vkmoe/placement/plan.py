"""Plans what lies where before memory is allocated: every line of memory that a model takes.

`plans` makes a plan of each way in which experts can be placed. It is pure: tests call it with
invented devices. A plan's lines are what is allocated: arenas are made of the layouts in them, and
tests/engine/test_memory_plan.py holds every buffer the device is asked for against the line of its
name. Where experts go is the subject of experts.py, what programs need besides that of
models/program_sizes.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial

from vkmoe.choices import BufferName
from vkmoe.config import EngineConfig
from vkmoe.errors import OutOfMemoryError, UsageError
from vkmoe.experts.store.table import N_VERSIONS, table_shape
from vkmoe.experts.study.hit_curve import MEAN_CURVE, HitCurve
from vkmoe.facts import (
    Allocation,
    ArenaLayout,
    DeviceInfo,
    MemoryPlan,
    ModelSpec,
    WeightBytes,
)
from vkmoe.gpu.arena import chunk_cap, lay_out_spans, round_up
from vkmoe.gpu.device import Intent
from vkmoe.gpu.transfer import N_LANES, STAGING_BYTES
from vkmoe.kernels.handover.operations import HANDED, JOINED
from vkmoe.models.kept import Kept, copied_bytes, largest_cache
from vkmoe.models.kv_caches import cache_layouts, growth_bytes
from vkmoe.models.program_sizes import (
    CONTEXT_STEP,
    FIRST_POSITIONS,
    TokenBuffers,
    kept,
    kv_types,
    largest_context,
    n_state_copies,
    sure_context,
)
from vkmoe.modes import RESIDENT, Hybrid
from vkmoe.option_fields import in_mib
from vkmoe.placement.experts import ExpertRoom, Way, given_by_slots, place_experts, ways
from vkmoe.placement.memory import (
    allocation,
    device_budget,
    host_budget,
    is_mapped,
    layout_bytes,
    option_of,
)
from vkmoe.placement.pools import PoolRoom


def plans(
    config: EngineConfig,
    spec: ModelSpec,
    device: DeviceInfo,
    weights: WeightBytes,
    scratch: TokenBuffers,
    available_host_bytes: int,
    curve: HitCurve = MEAN_CURVE,
) -> list[MemoryPlan]:
    """Make every plan that options leave: with experts of the CPU if `weights` count those. Pure.

    [] where options rule the CPU out. Slots are split by `curve`, if that is one of single layers.
    Lines are upper bounds of what will be allocated, rounding included. Raises UsageError for a
    context the model cannot have and options that exclude each other here, OutOfMemoryError when
    it cannot fit.
    """
    found, error = list[MemoryPlan](), None
    planner = _Planner(config, spec, device, weights, scratch, available_host_bytes)
    given = planner.expert_room(curve)
    for way in ways(given):
        try:
            made = planner.complete(given, way)
        except (OutOfMemoryError, UsageError) as refusal:
            error = refusal
            continue
        # Unasked, hybrid without a slot is what another way is.
        if config.mode == "hybrid" or not isinstance(way.mode, Hybrid) or made.mode.has_slots:
            found.append(made)
    if error is not None and not found:
        raise error
    return found


@dataclass(frozen=True)
class _Planner:
    """Plans all but experts, and finds the room that is left to these."""

    config: EngineConfig
    spec: ModelSpec
    device: DeviceInfo
    weights: WeightBytes
    scratch: TokenBuffers
    host_bytes: int  # that are free

    def expert_room(self, curve: HitCurve) -> ExpertRoom:
        """Find the room of experts. Raises OutOfMemoryError where there is none."""
        config, device, experts = self.config, self.device, self.spec.experts
        sure, budget = self._base(sure_context(config, self.spec)), self._budget
        needed = self._taken(sure)
        if needed > budget:
            largest = _largest(sure, ("device",))
            less = _hint(config, largest[0].name)
            less = "lower --vram-margin" if config.vram_margin_bytes else less
            memory = f"{device.name}'s memory without its experts"
            raise self._too_large(needed, memory, largest, budget, less)
        n_experts, n_used = (experts.n_experts, experts.n_used) if experts else (0, 0)
        free, brings = budget - needed, self.scratch.brings
        pool = self._pool_room(sure, free)
        return ExpertRoom(
            config, n_experts, n_used, self.weights, device, free, pool, sure, brings, curve
        )

    @property
    def _budget(self) -> int:
        return device_budget(self.device, self.host_bytes, self.config.vram_margin_bytes)

    def _taken(self, made: MemoryPlan) -> int:
        """Count the bytes that a plan takes of the device's budget."""
        return made.total("device") + made.total("host") * self.device.is_uma

    def _with_context(self, made: MemoryPlan) -> MemoryPlan:
        """Say how far its KV cache can grow. Raises OutOfMemoryError where that is too little."""
        self._check_host(made)
        config, spec = self.config, self.spec
        growth = partial(growth_bytes, self.device, spec, made)
        spare = max(0, self._budget - self._taken(made))
        n_used = spec.experts.n_used if spec.experts else 0
        room = spare + given_by_slots(made, self.weights, n_used)
        least = sure_context(config, spec)
        if growth(least) > room:
            raise OutOfMemoryError(
                f"a context of {least} tokens needs {in_mib(growth(least))} more, "
                f"{in_mib(room)} can be freed for it",
                _hint(config, "KV cache"),
            )
        most = max(least, largest_context(config, spec, chunk_cap(self.device)))
        sizes = [least, *range(round_up(least + 1, CONTEXT_STEP), most, CONTEXT_STEP), most]
        n_fitting = bisect_right(sizes, room, key=growth)
        return replace(made, ctx_size=sizes[n_fitting - 1], spare_bytes=spare)

    @cached_property
    def _short(self) -> MemoryPlan:
        """Plan all but experts, with a KV cache that has yet to grow."""
        return self._base(min(sure_context(self.config, self.spec), FIRST_POSITIONS))

    def _base(self, n_positions: int) -> MemoryPlan:
        """Plan all but experts, with so many positions in the KV cache."""
        config, kept = self.config, self._kept(n_positions)
        lines = (*self._trunk_lines(), *self._cache_lines(n_positions), *self._other_lines())
        return MemoryPlan(
            sure_context(config, self.spec),
            kv_types(config, self.spec),
            RESIDENT,
            tuple(line for line in lines if line.n_bytes),
            chunk_rows=self.scratch.rows,
            n_regions=config.parallel,
            n_versions=kept.n_versions,
            margin=kept.margin,
            n_guesses=config.n_guesses,
            n_state_copies=n_state_copies(self._copied_bytes),
            first_positions=n_positions,
            host_layers=self._host_layers,
        )

    def _pool_room(self, base: MemoryPlan, free: int) -> PoolRoom:
        """Find what is left of host memory; where it is shared, what is `free` on the device."""
        on_host, unasked = base.total("host"), host_budget(self.host_bytes)
        if self.device.is_uma:
            return PoolRoom(min(free, unasked - base.total("device") - on_host), free)
        heaps = [heap.size for heap in self.device.heaps if not heap.device_local]
        heap = max(heaps, default=self.host_bytes)
        return PoolRoom(min(unasked, heap) - on_host, min(self.host_bytes, heap) - on_host)

    def complete(self, given: ExpertRoom, way: Way) -> MemoryPlan:
        """Complete the plan in a way.

        Slots that may be given back have most of the memory of the KV cache until that grows,
        unless the file must be read for that alone. Raises OutOfMemoryError, UsageError.
        """
        lending = None
        if way.gives and not self.device.is_uma and not self.config.slots_option:
            short = self._short
            free = given.free + self._taken(given.base) - self._taken(short)
            lent = growth_bytes(self.device, self.spec, short, given.base.first_positions)
            with suppress(OutOfMemoryError):
                made = place_experts(replace(given, free=free, base=short, lent=lent), way)
                lending = self._with_context(replace(made, gives_slots=True))
            if lending and (lending.exchanges or not lending.host_slots):
                return lending
        made = place_experts(given, way)
        return lending if lending and not made.exchanges else self._with_context(made)

    def _check_host(self, made: MemoryPlan) -> None:
        """Refuse a plan for which the host would have to swap. Raises OutOfMemoryError."""
        shared = self.device.is_uma
        needed = made.total("host") + made.total("device") * shared
        if needed <= self.host_bytes:
            return
        largest = _largest(made, ("host", "device") if shared else ("host",))
        option = option_of(largest[0])
        change = f"change {option}, " if option else ""
        hint = f"close other programs, {change}or choose a smaller model"
        raise self._too_large(needed, "host memory", largest, self.host_bytes, hint)

    def _too_large(
        self, needed: int, memory: str, largest: Sequence[Allocation], most: int, hint: str
    ) -> OutOfMemoryError:
        parts = (f"{line.item.split(',')[0]} {in_mib(line.n_bytes)}" for line in largest)
        return OutOfMemoryError(
            f"{self.spec.name} needs {in_mib(needed)} of {memory} ({', '.join(parts)}); "
            f"{in_mib(most)} can be used",
            hint,
        )

    # ----- the lines of what is not experts; those of no bytes are left out -----

    @property
    def _host_layers(self) -> int:
        """Count the layers whose trunk is to be in host memory."""
        n_layers, asked = len(self.weights.layer_pieces), self.config.gpu_layers
        return 0 if asked is None else max(0, n_layers - asked)

    def _trunk_lines(self) -> Iterator[Allocation]:
        line, weights, n_host = partial(allocation, self.device), self.weights, self._host_layers
        on_device, on_host = weights.trunk_pieces(n_host)
        trunk = lay_out_spans(self.device, on_device)
        item, reason = "weights used by every token", "read for each token"
        if weights.mapped:
            yield Allocation("weights", "file", weights.mapped, "read where the file is mapped")
            item, reason = "addresses of blocks", "where weights are in the file"
        yield line(item, "device", reason, "weights", [trunk])
        yield from self._host_lines(on_host)
        reason = "kernels cannot read them as they are in the file"
        yield line("other weights", "host", reason, n_bytes=weights.copied)

    def _host_lines(self, pieces: tuple[int, ...]) -> Iterator[Allocation]:
        """Yield what is in host memory: rows of tokens, and the trunk of the last layers."""
        line, n_tables = partial(allocation, self.device), self.weights.table_pieces
        layouts = [lay_out_spans(self.device, pieces)]
        of_layers = sum(pieces[n_tables:])
        item, table = "embeddings for each layer", layout_bytes(layouts) - of_layers
        if n_tables:
            reason = "a token reads a row of them"
            yield line(item, "host", reason, "host weights", layouts, table)
            layouts = []
        item = f"weights of the last {self._host_layers} of {self.spec.n_layers} layers"
        n_bytes = of_layers if n_tables else None
        yield line(item, "host", "as --gpu-layers", "host weights", layouts, n_bytes)

    def _cache_lines(self, n_tokens: int) -> Iterator[Allocation]:
        config, spec, device = self.config, self.spec, self.device
        room = self._kept(n_tokens)
        largest = config.parallel * largest_cache(spec, room)
        if largest > chunk_cap(device):
            raise OutOfMemoryError(
                f"the KV cache of a layer needs {in_mib(largest)} in one piece, {device.name} "
                f"allocates at most {in_mib(chunk_cap(device))}",
                _hint(config, "KV cache"),
            )
        of_each = f" for each of {config.parallel}" if config.parallel > 1 else ""
        item = f"KV cache, {n_tokens} tokens{of_each}, {room.kv_types}"
        reason = "as --ctx-size" if config.ctx_size else "the model's context"
        if n_tokens < (config.ctx_size or spec.context_length):
            reason = "it grows with the longest text"
        kinds = cache_layouts(device, spec, room, config.parallel)
        layouts = [layout for layout, n_alike in kinds for _ in range(n_alike)]
        ropes, caches = layouts[: len(spec.ropes)], layouts[len(spec.ropes) :]
        yield allocation(device, item, "device", reason, "KV cache", caches)
        reason = "one entry per position"
        yield allocation(device, "rotary table", "device", reason, "KV cache", ropes)

    def _other_lines(self) -> Iterator[Allocation]:
        device, scratch = self.device, self.scratch

        def line(
            item: str, intent: Intent, reason: str, name: BufferName, *buffers: int
        ) -> Allocation:
            return allocation(device, item, intent, reason, name, [ArenaLayout(buffers)])

        table_bytes = table_shape(self.spec).n_bytes
        lanes = [] if is_mapped(device, "device") else [STAGING_BYTES] * N_LANES  # of the loader
        lanes += [] if is_mapped(device, "bar") else [table_bytes] * N_LANES
        asked = "as --ubatch-size" if self.config.ubatch_size else "--ubatch-size changes it"
        chunks = f"prompts in chunks of up to {scratch.rows} tokens; {asked}"
        # One more: the placeholder of kernels without tensors.
        yield line("activations", "device", chunks, "tensors", *scratch.tensors, 4)
        yield line("expert table", "bar", "two versions", "expert table", N_VERSIONS * table_bytes)
        yield line("parameters", "host", "written for each token", "params", scratch.params)
        yield line("results", "readback", "read back after each token", "readback", scratch.results)
        yield line("logits", "readback", "read back when asked for", "readback", *scratch.logits)
        yield line("staging", "host", "device memory is not mapped", "staging", *lanes)
        reason = "what the CPU computes experts from"
        states = [self._copied_bytes] * n_state_copies(self._copied_bytes)
        reason = "texts go back to them"
        yield line("copies of states", "readback", reason, "copied states", *states)
        yield line(HANDED, "readback", reason, HANDED, scratch.handed)
        yield line(JOINED, "host", "what the CPU adds to them", JOINED, scratch.joined)
        item, reason = "activations of the CPU", "for the experts that it computes"
        yield allocation(device, item, "host", reason, n_bytes=scratch.of_cpu)

    @property
    def _copied_bytes(self) -> int:
        """Count the bytes of a copy with which a text goes back, where it needs one."""
        n_positions = self.config.ctx_size or self.spec.context_length
        return copied_bytes(self.spec, self._kept(n_positions))

    def _kept(self, n_positions: int) -> Kept:
        return kept(self.config, self.spec, n_positions, self.scratch.rows)


def _largest(made: MemoryPlan, places: Collection[str]) -> list[Allocation]:
    """List the three largest lines of a plan in some places."""
    found = (line for line in made.lines if line.place in places)
    return sorted(found, key=lambda line: -line.n_bytes)[:3]


def _hint(config: EngineConfig, largest: BufferName | None) -> str:
    """Say what makes a plan smaller that has no room for any expert, by its largest part."""
    if largest != "KV cache":
        return "lower --ubatch-size" if largest == "tensors" else "choose a smaller model"
    less = "lower --ctx-size or --parallel" if config.parallel > 1 else "lower --ctx-size"
    smaller = {"f32": "q8_0", "f16": "q8_0", "q8_0": "q4_0"}.get(config.cache_type_k)
    return f"{less}, or try --cache-type-k {smaller}" if smaller else less
