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
from typing import Any

import numpy as np

from vkmoe.choices import BufferName
from vkmoe.closing import Closing
from vkmoe.experts.store.copies import Copy
from vkmoe.experts.store.table import ExpertTable
from vkmoe.facts import ModelSpec
from vkmoe.gpu.arena import Arena, Placement
from vkmoe.gpu.device import Device, Intent
from vkmoe.gpu.program import Range, memory_range
from vkmoe.models import ModelFile
from vkmoe.models.rope import rope_table
from vkmoe.models.tensors import FeedForwardTensors, LayerTensors, ModelTensors, TrunkTensor
from vkmoe.models.weights import (
    AttentionWeights,
    Block,
    FeedForwardWeights,
    LatentWeights,
    LayerWeights,
    ModelWeights,
)
from vkmoe.placement.memory import available_bytes
from vkmoe.placement.placer import MappedPlacer, Placer, Progress, Progressing
from vkmoe.placement.plan import Decision, table_shape
from vkmoe.placement.sizes import N_THREADS, conversion_line
from vkmoe.placement.span_reader import FileReads, SpanReader

__all__ = ["LoadedWeights", "load_weights"]

log = logging.getLogger("vkmoe")


@dataclass(frozen=True)
class LoadedWeights(Closing):
    """Holds the weights and what owns their memory.

    With a `reader`, not all experts are in host memory: no address is in the table (all are 0), no
    `expert_ranges` are in the weights, and there are no homes.
    """

    weights: ModelWeights
    table: ExpertTable
    homes: list[list[Placement]]  # of the routed experts [n MoE layers][n_experts]; [] with reader
    progress: Progressing
    reader: SpanReader | None
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
    device: Device, model: ModelFile, decision: Decision, progress: Progress | None = None
) -> LoadedWeights:
    """Place and copy all weights; the table leads to the experts' homes, and is not published.

    With a host pool smaller than the model, all but the experts. Raises GpuErrors such as
    OutOfMemoryError, and ModelFileError if the file was replaced meanwhile, with all freed. Logs
    what will be converted.
    """
    file, spec, tensors, plan = model.file, model.spec, model.tensors, decision.plan
    if line := conversion_line(decision.weights.conversions, plan):
        log.info("%s", line)
    sizes, pools = decision.weights, decision.host_pools
    in_pools = sum(pool.capacity * pool.slot_bytes for pool in pools)
    of_experts = in_pools if pools else sizes.experts
    n_bytes = sizes.mapped + sizes.copied or sizes.trunk + of_experts
    progressing = Progressing(n_bytes, progress)

    def placer(trunk: Arena) -> Placer:
        if device.info.layout == "planes":
            return Placer(file, device, trunk, progressing)
        too_large = sizes.mapped > available_bytes()
        return MappedPlacer(file, device, trunk, progressing, too_large)

    with ExitStack() as memory:  # kept unless something fails

        def arena(intent: Intent, name: BufferName) -> Arena:
            return memory.enter_context(closing(Arena(device, intent, name, plan.layout(name))))

        reader = memory.enter_context(SpanReader(file, tensors)) if pools else None
        trunk = arena("device", "weights")
        experts = arena("device" if plan.mode.on_device else "host", "experts")
        shape = table_shape(spec, sizes)
        table = memory.enter_context(
            ExpertTable(device, shape.n_layers, shape.n_experts, shape.n_landing)
        )
        with placer(trunk) as placing:
            loader = _Loader(placing, None if pools else experts, table)
            weights = loader.load(spec, tensors, plan.ctx_size)
        if reader is not None:
            reader.drop_pages()
        kept = memory.pop_all()
    return LoadedWeights(weights, table, loader.homes, progressing, reader, kept)


class _Loader:
    """Places the tensors of a model in the order of `ModelTensors.trunk`."""

    def __init__(self, placer: Placer, experts: Arena | None, table: ExpertTable) -> None:
        """Begin with nothing placed; without an arena routed experts stay in the file."""
        self._placer, self._experts, self._table = placer, experts, table
        self.homes: list[list[Placement]] = []

    def load(self, spec: ModelSpec, tensors: ModelTensors, ctx_size: int) -> ModelWeights:
        placer = self._placer
        embeddings = placer.matrix(tensors.embeddings)
        tied = tensors.output is tensors.embeddings
        parts = [self._parts(layer) for layer in tensors.layers]
        output_gain = placer.vector(tensors.output_gain)
        output = embeddings if tied else placer.matrix(tensors.output)
        ropes = {
            rope: placer.place(rope_table(rope, ctx_size).view(np.uint8).reshape(-1))
            for rope in spec.ropes
        }
        layers = [
            LayerWeights(*pair, rope_table=ropes[layer.mixer.rope])
            for pair, layer in zip(parts, spec.layers, strict=True)
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
        shape = self._placer.shape(experts)
        if self._experts is None:
            return Block(shape)
        spans = self._placer.spans(experts, self._experts)
        for expert, span in enumerate(spans):
            self._table.set(len(self.homes), expert, span.address)
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
