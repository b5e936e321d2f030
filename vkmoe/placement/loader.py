"""Puts a model's weights into GPU memory, in the layout kernels read, and says where they lie.

Owns the arenas of the weights, the order in which they are filled, and how a file's rows get there:
several threads lay them out or convert them (NumPy does both without the GIL), and the file's pages
are dropped behind them. How large the weights are is the subject of sizes.py. Where the host pool
does not hold all experts, these are not loaded with the other weights: whatever manages the pool
owns their slots, and fills them with `LoadedWeights.fill`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from vkmoe.choices import BufferName
from vkmoe.closing import Closing
from vkmoe.cpu.device import CpuDevice
from vkmoe.cpu.host_memory import available_bytes
from vkmoe.experts.store.copies import Copy
from vkmoe.experts.store.table import ExpertTable, TableShape
from vkmoe.facts import ModelSpec
from vkmoe.gpu.arena import Arena, Placement, lay_out_spans
from vkmoe.gpu.device import Device, Intent
from vkmoe.gpu.program import Range, memory_range
from vkmoe.models import ModelFile
from vkmoe.models.rope import rope_table
from vkmoe.models.tensors import FeedForwardTensors, LayerTensors, ModelTensors, TrunkTensor
from vkmoe.models.weights import (
    AttentionWeights,
    Block,
    CpuWeights,
    FeedForwardWeights,
    LatentWeights,
    LayerWeights,
    ModelWeights,
)
from vkmoe.modes import Hybrid
from vkmoe.ops.experts import DESCRIPTOR_BYTES
from vkmoe.placement.decide import Decision
from vkmoe.placement.plan import table_shape
from vkmoe.weights.placer import MappedPlacer, Placer, Progress, Progressing
from vkmoe.weights.sizes import N_THREADS, conversion_line
from vkmoe.weights.span_reader import FileReads, SpanReader

__all__ = ["LoadedWeights", "load_weights"]

log = logging.getLogger("vkmoe")


@dataclass(frozen=True)
class LoadedWeights(Closing):
    """Holds the weights and what owns their memory.

    With a `reader`, not all experts are in memory of the device's or the host's own: no address is
    in the table (all are 0), no `expert_ranges` are in the weights, and there are no homes.
    """

    weights: ModelWeights
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
            done = threads.map(lambda read: files.start([read]), in_order)
            for read, _ in zip(in_order, done, strict=True):
                self.progress.add(read[2])
        finally:
            threads.shutdown(cancel_futures=True)

    def close(self) -> None:
        """Free all; may be called twice."""
        self.memory.close()


def load_weights(
    device: Device,
    model: ModelFile,
    decision: Decision,
    progress: Progress | None = None,
    cpu: CpuDevice | None = None,
) -> LoadedWeights:
    """Place and copy all weights; the table leads to the experts' homes, and is not published.

    With a host pool smaller than the model, all but the experts. Where the plan has the CPU compute
    some, `cpu` reads these where the file is mapped, and the table has none of them. Raises
    GpuErrors such as OutOfMemoryError, and ModelFileError if the file was replaced meanwhile, with
    all freed. Logs what will be converted.
    """
    file, spec, tensors, plan = model.file, model.spec, model.tensors, decision.plan
    if line := conversion_line(decision.weights.conversions, plan):
        log.info("%s", line)
    sizes, pools = decision.weights, decision.host_pools
    in_pools = sum(pool.capacity * pool.slot_bytes for pool in pools)
    of_experts = in_pools if pools else sizes.experts
    in_file = sum(sum(span) for span in sizes.file_spans[: plan.cpu_layers])
    if in_file and spec.experts is not None:
        of_experts = in_file + sum(sizes.spans[plan.cpu_layers :]) * spec.experts.n_experts
    n_bytes = sizes.mapped + sizes.copied or sizes.trunk + of_experts
    progressing = Progressing(n_bytes, progress)
    too_large = (sizes.mapped or in_file) > available_bytes()

    def placer(trunk: Arena) -> Placer:
        if device.info.layout == "planes":
            return Placer(file, device, trunk, progressing)
        return MappedPlacer(file, device, trunk, progressing, too_large)

    with ExitStack() as memory:  # kept unless something fails

        def arena(intent: Intent, name: BufferName) -> Arena:
            return memory.enter_context(closing(Arena(device, intent, name, plan.layout(name))))

        trunk, mode = arena("device", "weights"), plan.mode
        reads = bool(pools) or isinstance(mode, Hybrid)
        reader = memory.enter_context(SpanReader(file, tensors)) if reads else None
        experts = arena("host" if mode.can_miss else "device", "experts")
        shape = table_shape(spec, sizes)
        table = memory.enter_context(
            ExpertTable(device, shape.n_layers, shape.n_experts, shape.n_landing)
        )
        with placer(trunk) as placing, ExitStack() as reading:
            beside = None
            if cpu is not None:
                beside = memory.enter_context(_BesideGpu(cpu, shape, plan.cpu_layers))
                mapping = MappedPlacer(file, cpu, beside.arena, progressing, too_large)
                beside.placer = reading.enter_context(mapping)
            first_in_host = len(tensors.layers) - plan.host_layers
            parts = _TrunkArenas(trunk, arena("host", "host weights"), first_in_host)
            loader = _Loader(placing, parts, None if pools else experts, table, beside)
            weights = loader.load(spec, tensors, plan.ctx_size)
        if reader is not None and pools:
            reader.drop_pages()
        kept = memory.pop_all()
    on_cpu = beside.weights() if beside is not None else None
    return LoadedWeights(weights, table, loader.homes, progressing, reader, on_cpu, kept)


class _BesideGpu(Closing):
    """Finds the experts of the first layers where a CPU reads them; owns the table of these."""

    placer: MappedPlacer  # while weights are loaded

    def __init__(self, cpu: CpuDevice, shape: TableShape, n_layers: int) -> None:
        """Take memory for the addresses of all their parts. Raises OutOfMemoryError."""
        spans = [DESCRIPTOR_BYTES] * (n_layers * shape.n_experts)
        self._n_layers, self._blocks = n_layers, dict[int, Block]()
        with ExitStack() as cleanup:
            self.arena = Arena(cpu, "host", "experts", lay_out_spans(cpu.info, spans))
            cleanup.callback(self.arena.close)
            self._table = cleanup.enter_context(ExpertTable(cpu, shape.n_layers, shape.n_experts))
            self._cleanup = cleanup.pop_all()

    def takes(self, layer: int) -> bool:
        """Say whether the CPU computes the experts of a MoE layer."""
        return layer < self._n_layers

    def place(self, layer: int, experts: FeedForwardTensors) -> None:
        """Find the experts of a layer."""
        spans = self.placer.spans(experts, self.arena)
        for expert, span in enumerate(spans):
            self._table.set(layer, expert, span.address)
        ranges = _merged(spans, DESCRIPTOR_BYTES)
        self._blocks[layer] = Block(self.placer.shape(experts), ranges=ranges, on_cpu=True)

    def weights(self) -> CpuWeights:
        """Return what was placed."""
        self._table.publish()
        return CpuWeights(self._blocks, self._table)

    def close(self) -> None:
        """Free the memory. May be called twice."""
        self._cleanup.close()


class _TrunkArenas(NamedTuple):
    """Holds the memory of what every token reads: of the layers from one on, the host's."""

    device: Arena
    host: Arena
    first_in_host: int

    def of_layer(self, layer: int) -> Arena:
        return self.host if layer >= self.first_in_host else self.device


class _Loader:
    """Places the tensors of a model in the order of `ModelTensors.trunk`."""

    def __init__(
        self,
        placer: Placer,
        trunk: _TrunkArenas,
        experts: Arena | None,
        table: ExpertTable,
        beside: _BesideGpu | None = None,
    ) -> None:
        """Begin with nothing placed; without an arena routed experts stay in the file.

        Those that the CPU computes are placed by what is `beside`.
        """
        self._placer, self._experts, self._table = placer, experts, table
        self._trunk = trunk
        self._beside = beside
        self.homes: list[list[Placement]] = []

    def load(self, spec: ModelSpec, tensors: ModelTensors, ctx_size: int) -> ModelWeights:
        placer = self._placer
        embeddings = placer.matrix(tensors.embeddings)
        tied = tensors.output is tensors.embeddings
        parts = []
        for index, layer in enumerate(tensors.layers):
            placer.trunk = self._trunk.of_layer(index)
            parts.append(self._parts(layer))
        placer.trunk = self._trunk.device
        output_gain = placer.vector(tensors.output_gain)
        output = embeddings if tied else placer.matrix(tensors.output)
        ropes = {
            rope: placer.place(rope_table(rope, ctx_size).view(np.uint8).reshape(-1))
            for rope in spec.ropes
        }
        layers = [
            LayerWeights(*pair, ropes[layer.mixer.rope], in_host=index >= self._trunk.first_in_host)
            for index, (pair, layer) in enumerate(zip(parts, spec.layers, strict=True))
        ]
        return ModelWeights(embeddings, output_gain, output, tuple(layers), self._table.range)

    def _parts(
        self, layer: LayerTensors
    ) -> tuple[AttentionWeights | LatentWeights, FeedForwardWeights]:
        place = self._expert_block if layer.has_experts else self._placer.block
        block = place(layer.block)
        mixer = layer.mixer_weights(**self._placed(layer.mixer))
        return mixer, FeedForwardWeights(block=block, **self._placed(layer.feed_forward))

    def _expert_block(self, experts: FeedForwardTensors) -> Block:
        """Place the homes of a layer's experts, unless they stay in the file."""
        shape, layer = self._placer.shape(experts), len(self.homes)
        if self._beside is not None and self._beside.takes(layer):
            self._beside.place(layer, experts)
            self.homes.append([])
            return Block(shape, on_cpu=True)
        if self._experts is None:
            return Block(shape)
        spans = self._placer.spans(experts, self._experts)
        for expert, span in enumerate(spans):
            self._table.set(layer, expert, span.address)
        self.homes.append(spans)
        return Block(shape, ranges=_merged(spans, shape.span_bytes))

    def _placed(self, tensors: Mapping[str, TrunkTensor]) -> dict[str, Any]:
        """Place what a table declares; each kind of tensor becomes its kind of weights."""
        return {field: self._placer.weights(tensor) for field, tensor in tensors.items()}


def _merged(spans: list[Placement], span_bytes: int) -> tuple[Range, ...]:
    """Merge neighbouring spans to one range each."""
    merged: list[Range] = []
    for span in sorted(spans, key=lambda item: item.address):
        if merged and merged[-1].end == span.address:
            merged[-1] = Range(merged[-1].resource, merged[-1].start, span.address + span_bytes)
        else:
            merged.append(memory_range(span.address, span_bytes))
    return tuple(merged)
