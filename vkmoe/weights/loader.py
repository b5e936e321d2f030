"""Puts a model's weights into GPU memory, in the layout kernels read, and says where they lie.

Owns the arenas of the weights, the order in which they are filled, and how a file's rows get there:
several threads lay them out (NumPy does that without the GIL), and the file's pages
are dropped behind them. How large the weights are is the subject of sizes.py. Where the host pool
does not hold all experts, these are not loaded with the other weights: whatever manages the pool
owns their slots, and fills them with `LoadedWeights.fill`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from vkmoe.choices import BufferName
from vkmoe.closing import Closing
from vkmoe.cpu.device import CpuDevice
from vkmoe.experts.store.copies import Copy
from vkmoe.experts.store.table import ExpertTable, TableShape, table_shape
from vkmoe.facts import DeviceInfo, MemoryPlan, ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.gpu.arena import Arena, Placement, lay_out_spans
from vkmoe.gpu.device import Device, Intent
from vkmoe.gpu.program import Range, memory_range
from vkmoe.interrupts import result_of
from vkmoe.kernels.experts.operations import DESCRIPTOR_BYTES
from vkmoe.models import ModelFile
from vkmoe.models.tensors import (
    AheadTensors,
    FeedForwardTensors,
    LayerTensors,
    ModelTensors,
    TrunkTensor,
)
from vkmoe.models.weights import (
    AheadWeights,
    BlockWeights,
    CpuWeights,
    FeedForwardWeights,
    InputWeights,
    LayerWeights,
    ModelWeights,
    TokenInputs,
)
from vkmoe.modes import Hybrid
from vkmoe.weights.mapped import mapped_bytes, spans_in_file
from vkmoe.weights.placer import MappedPlacer, Placer, Progress, Progressing, WeightPlaces
from vkmoe.weights.sizes import N_THREADS, weight_bytes
from vkmoe.weights.span_reader import FileReads, SpanReader

log = logging.getLogger("vkmoe")


@dataclass(frozen=True)
class LoadedWeights(Closing):
    """Holds the weights and what owns their memory.

    With a `reader`, not all experts are in memory of the device's or the host's own: no address is
    in the table (all are 0), no `expert_ranges` are in the weights, and there are no homes.
    """

    weights: ModelWeights
    ahead: AheadWeights | None  # of the layer that guesses tokens
    table: ExpertTable
    homes: list[list[Placement]]  # of the routed experts [n MoE layers][n_experts]; [] with reader
    progress: Progressing
    reader: SpanReader | None
    cpu: CpuWeights | None  # of the experts that the CPU computes; None: none
    memory: ExitStack

    def fill(self, reads: Sequence[Copy]) -> None:
        """Read experts (by number) into slots of the host pool, by several threads.

        A part of loading: the progress goes on. Must hold: there is a reader. Raises
        ModelFileError.
        """
        assert self.reader is not None, "all experts are in host memory"
        files = FileReads(self.reader)
        threads = ThreadPoolExecutor(N_THREADS, "load")
        try:
            in_order = sorted(reads, key=itemgetter(0))
            done = [threads.submit(files.start, [read]) for read in in_order]
            for read, future in zip(in_order, done, strict=True):
                result_of(future)
                self.progress.add(read[2])
        finally:
            threads.shutdown(cancel_futures=True)

    def close(self) -> None:
        """Free all; may be called twice."""
        self.memory.close()


def load_weights(
    device: Device,
    model: ModelFile,
    plan: MemoryPlan,
    progress: Progress | None = None,
    cpu: CpuDevice | None = None,
    too_large: bool = False,
) -> LoadedWeights:
    """Place and copy all weights; with a host pool smaller than the model, all but the experts.

    The table leads to the experts' homes, and is not published. What the plan has the CPU compute,
    `cpu` reads where the file is mapped, and the table has none of it. What is mapped is read
    ahead, unless it is `too_large` for the memory there is. Raises GpuErrors, and ModelFileError if
    the file was replaced meanwhile, with all freed.
    """
    file, few = model.file, plan.host_slots != ()
    progressing = Progressing(_bytes_to_place(device.info, model, plan), progress)
    with ExitStack() as memory:  # kept unless something fails
        enter, shape = memory.enter_context, table_shape(model.spec)
        arena = partial(_arena, memory, device, plan)
        trunk, on_host = arena("device", "weights"), arena("host", "host weights")
        homes = arena("host" if plan.mode.can_miss else "device", "experts")
        table = enter(ExpertTable(device, shape.n_layers, shape.n_experts, shape.n_landing))
        reads = few or isinstance(plan.mode, Hybrid)
        reader = enter(SpanReader(file, model.tensors)) if reads else None
        with ExitStack() as placers:
            placing = partial(_placing, placers, file, progressing, too_large)
            main = placing(device, trunk)
            by_cpu = _homes_beside(cpu, plan, shape, memory, placing) if cpu else None
            loader = _Loader(on_host, plan, _ExpertHomes(main, homes, table), by_cpu)
            guessing = (model.ahead or model).file
            ahead = _placing(placers, guessing, progressing, False, device, trunk)
            weights = loader.load(model.spec, model.tensors, table.range, ahead)
        if reader is not None and few:
            reader.drop_pages()
        of_cpu, kept, spans = loader.cpu_weights(), memory.pop_all(), loader.homes
    return LoadedWeights(weights, loader.ahead, table, spans, progressing, reader, of_cpu, kept)


def _arena(
    memory: ExitStack, device: Device, plan: MemoryPlan, intent: Intent, name: BufferName
) -> Arena:
    """Allocate what a plan has of a name."""
    return memory.enter_context(closing(Arena(device, intent, name, plan.layout(name))))


def _placing(
    placers: ExitStack,
    file: GgufFile,
    progressing: Progressing,
    too_large: bool,
    on: Device,
    trunk: Arena,
) -> Placer:
    """Enter what places weights as the kernels of a device read them."""
    if on.info.layout == "planes":
        return placers.enter_context(Placer(file, on, trunk, progressing))
    return placers.enter_context(MappedPlacer(file, on, trunk, progressing, too_large))


def _homes_beside(
    cpu: CpuDevice,
    plan: MemoryPlan,
    shape: TableShape,
    memory: ExitStack,
    placing: Callable[[Device, Arena], Placer],
) -> _ExpertHomes:
    """Take the memory for the addresses of the experts that the CPU computes, and their table."""
    layout = lay_out_spans(cpu.info, [DESCRIPTOR_BYTES] * (plan.cpu_layers * shape.n_experts))
    parts = memory.enter_context(closing(Arena(cpu, "host", "experts", layout)))
    table = memory.enter_context(ExpertTable(cpu, shape.n_layers, shape.n_experts))
    return _ExpertHomes(placing(cpu, parts), parts, table)


def _bytes_to_place(device: DeviceInfo, model: ModelFile, plan: MemoryPlan) -> int:
    """Count the bytes of all that is placed on a device, or found in the file."""
    tensors, n_cpu = model.tensors, plan.cpu_layers
    if device.layout == "file":
        sizes = mapped_bytes(tensors)
        return sizes.mapped + sizes.copied
    sizes = weight_bytes(tensors)
    if plan.host_slots:
        pools = zip(plan.host_slots, dict.fromkeys(sizes.spans), strict=True)
        return sizes.trunk + sum(n_slots * size for n_slots, size in pools)
    by_cpu = sum(sum(span) for span in spans_in_file(tensors)[:n_cpu])
    others = zip(tensors.expert_layers, sizes.spans, strict=True)
    on_device = [block.n_experts * size for block, size in others][n_cpu:]
    return sizes.trunk + by_cpu + sum(on_device)


class _ExpertHomes(NamedTuple):
    """Says by what experts are placed, where, and which table leads to them."""

    placer: Placer
    arena: Arena
    table: ExpertTable

    def place(
        self, layer: int, experts: FeedForwardTensors
    ) -> tuple[BlockWeights, list[Placement]]:
        """Place the experts of a MoE layer."""
        spans, shape = self.placer.spans(experts, self.arena), self.placer.shape(experts)
        for expert, span in enumerate(spans):
            self.table.set(layer, expert, span.address)
        return BlockWeights(shape, ranges=_merged(spans, shape.span_bytes)), spans


class _Loader:
    """Places the tensors of a model in the order of `ModelTensors.trunk`."""

    def __init__(
        self, on_host: Arena, plan: MemoryPlan, experts: _ExpertHomes, by_cpu: _ExpertHomes | None
    ) -> None:
        """Begin with nothing placed; with a small host pool experts stay in the file."""
        self._placer, self._on_host, self._plan = experts.placer, on_host, plan
        self._experts, self._by_cpu = experts, by_cpu
        self.homes: list[list[Placement]] = []
        self.ahead: AheadWeights | None = None
        self._cpu_blocks: dict[int, BlockWeights] = {}

    def load(
        self, spec: ModelSpec, tensors: ModelTensors, table: Range, by_ahead: Placer
    ) -> ModelWeights:
        """Place all that the plan has no other place for.

        `by_ahead` places the layer that guesses tokens, which may be in another file.
        """
        placer, on_device = self._placer, self._placer.trunk
        embeddings, rows = placer.matrix(tensors.embeddings), tensors.inputs
        tied = tensors.output is tensors.embeddings
        placer.trunk = self._on_host
        rows_of_tokens = placer.matrix(rows.table) if rows else None
        layers = []
        for index, layer in enumerate(tensors.layers):
            in_host = index >= spec.n_layers - self._plan.host_layers
            placer.trunk = self._on_host if in_host else on_device
            layers.append(replace(self._layer(layer), in_host=in_host))
        placer.trunk = on_device
        inputs = None
        if rows and rows_of_tokens:
            projection, gain = placer.matrix(rows.projection), placer.vector(rows.gain)
            inputs = TokenInputs(rows_of_tokens, projection, gain)
        output_gain = placer.vector(tensors.output_gain)
        output = embeddings if tied else placer.matrix(tensors.output)
        parts = embeddings, output_gain, output, tuple(layers)
        weights = ModelWeights(*parts, table, inputs=inputs)
        if tensors.ahead is not None:
            self.ahead = place_ahead(by_ahead, tensors.ahead, weights)
        return weights

    def cpu_weights(self) -> CpuWeights | None:
        """Return the experts that the CPU computes, if it computes any."""
        if self._by_cpu is None:
            return None
        self._by_cpu.table.publish()
        return CpuWeights(self._cpu_blocks, self._by_cpu.table)

    def _layer(self, layer: LayerTensors) -> LayerWeights:
        place = self._expert_block if layer.has_experts else self._placer.block
        return place_layer(self._placer, layer, place(layer.block))

    def _expert_block(self, experts: FeedForwardTensors) -> BlockWeights:
        """Place the homes of a layer's experts, or find them for the CPU; or leave them."""
        shape, layer = self._placer.shape(experts), len(self.homes)
        if self._by_cpu is not None and layer < self._plan.cpu_layers:
            block, _ = self._by_cpu.place(layer, experts)
            self._cpu_blocks[layer] = replace(block, on_cpu=True)
            self.homes.append([])
            return BlockWeights(shape, on_cpu=True)
        if self._plan.host_slots:
            return BlockWeights(shape)
        block, spans = self._experts.place(layer, experts)
        self.homes.append(spans)
        return block


def place_ahead(placer: WeightPlaces, tensors: AheadTensors, model: ModelWeights) -> AheadWeights:
    """Place what guesses tokens, in the order of `AheadTensors.trunk`.

    All its experts are beside its other parts: of one layer at most. What it has no matrix for is
    the model's.
    """
    table, blocks = model.expert_table, list[BlockWeights]()
    for experts in tensors.experts:
        spans, shape = placer.spans(experts), placer.shape(experts)
        addresses = np.array([span.address for span in spans], np.uint64)
        table = memory_range(placer.place(addresses.view(np.uint8)), addresses.nbytes)
        blocks.append(BlockWeights(shape, ranges=_merged(spans, shape.span_bytes)))
    layers = tuple(
        place_layer(placer, layer, blocks[0] if layer.has_experts else placer.block(layer.block))
        for layer in tensors.layers
    )
    token, state = placer.matrix(tensors.token), placer.matrix(tensors.state)
    token_gain = placer.vector(tensors.token_gain) if tensors.token_gain else 0
    state_gain = placer.vector(tensors.state_gain) if tensors.state_gain else 0
    gain = model.output_gain
    own_gain = placer.vector(tensors.output_gain) if tensors.output_gain else gain
    embeddings = placer.matrix(tensors.embeddings) if tensors.embeddings else model.embeddings
    output = placer.matrix(tensors.output) if tensors.output else model.output
    next_state = placer.matrix(tensors.next_state) if tensors.next_state else None
    guessing = ModelWeights(embeddings, own_gain, output, layers, table)
    return AheadWeights(guessing, token, state, gain, token_gain, state_gain, next_state)


def place_layer(placer: WeightPlaces, layer: LayerTensors, block: BlockWeights) -> LayerWeights:
    """Place what a layer has besides its block or experts, in the order of `LayerTensors.trunk`."""
    mixer = layer.mixer_weights(**_placed(placer, layer.mixer))
    feed_forward = FeedForwardWeights(block=block, **_placed(placer, layer.feed_forward))
    inputs = InputWeights(**_placed(placer, layer.input)) if layer.input else None
    return LayerWeights(mixer, feed_forward, input=inputs)


def _placed(placer: WeightPlaces, tensors: Mapping[str, TrunkTensor]) -> dict[str, Any]:
    """Place what a table declares; each kind of tensor becomes its kind of weights."""
    return {field: placer.weights(tensor) for field, tensor in tensors.items()}


def _merged(spans: list[Placement], span_bytes: int) -> tuple[Range, ...]:
    """Merge neighbouring spans to one range each."""
    merged: list[Range] = []
    for span in sorted(spans, key=lambda item: item.address):
        if merged and merged[-1].end == span.address:
            merged[-1] = Range(merged[-1].resource, merged[-1].start, span.address + span_bytes)
        else:
            merged.append(memory_range(span.address, span_bytes))
    return tuple(merged)
