"""Puts a model's weights into GPU memory and says where they lie.

Owns the arenas of the weights, and in which order they are filled; how large they are is the
subject of sizes.py, how bytes get there that of placing.py. Does not touch experts where the host
pool is too small for all of them (loaded.py).
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.table import ExpertTable
from vkmoe.facts import MemoryPlan, ModelSpec
from vkmoe.gguf_file import GgufFile, TensorInfo
from vkmoe.gpu.arena import Arena, Placement, round_up
from vkmoe.gpu.device import Device
from vkmoe.gpu.memory_types import Intent
from vkmoe.gpu.program import Range, memory_range
from vkmoe.models.latent_matrices import latent_matrices
from vkmoe.models.rope import rope_table
from vkmoe.models.tensors import (
    AttentionTensors,
    FeedForwardTensors,
    LatentTensors,
    LayerTensors,
    ModelTensors,
)
from vkmoe.models.weights import (
    AttentionWeights,
    LatentWeights,
    LayerWeights,
    ModelWeights,
    SharedExpert,
)
from vkmoe.placement.conversion_time import conversion_line
from vkmoe.placement.loaded import LoadedWeights, Progress, Progressing
from vkmoe.placement.placing import Placer
from vkmoe.placement.pool_places import host_pools
from vkmoe.placement.sizes import expert_shape, weight_bytes
from vkmoe.placement.span_reader import SpanReader

__all__ = ["LoadedWeights", "Progress", "load_weights"]

log = logging.getLogger("vkmoe")


def load_weights(
    device: Device,
    file: GgufFile,
    spec: ModelSpec,
    tensors: ModelTensors,
    plan: MemoryPlan,
    progress: Progress | None = None,
) -> LoadedWeights:
    """Place and copy all weights; the table leads to the experts' homes, and is not published.

    With `plan.host_places`, all but the experts. Raises GpuErrors such as OutOfMemoryError, and
    ModelFileError if the file was replaced meanwhile, with all freed. Logs what will be converted.
    """
    if line := conversion_line(plan):
        log.info("%s", line)
    sizes = weight_bytes(tensors)
    n_used = spec.experts.n_used if spec.experts else 0
    pools = host_pools(plan.host_places, sizes.spans, n_used)
    in_pools = sum(pool.capacity * pool.slot_bytes for pool in pools)
    progressing = Progressing(sizes.trunk + (in_pools if pools else sizes.experts), progress)
    reader = SpanReader(file, tensors) if pools else None
    rope = rope_table(spec.rope, plan.ctx_size)
    expert_intent: Intent = "device" if plan.experts_in == "device" else "host"
    arenas = [
        Arena(device, "device", "weights", sizes.trunk + round_up(rope.nbytes)),
        Arena(device, expert_intent, "experts", sizes.experts),
    ]
    n_moe_layers = sum(layer.router is not None for layer in tensors.layers)
    n_experts = spec.experts.n_experts if spec.experts else 1
    table = ExpertTable(device, max(1, n_moe_layers), n_experts, n_used)
    placer = Placer(file, device, arenas[0], progressing)
    loader = _Loader(placer, arenas, table, in_file=bool(pools))
    try:
        weights = loader.load(tensors, rope)
    except BaseException:
        placer.abandon()
        for arena in arenas:
            arena.close()
        table.close()
        if reader is not None:
            reader.close()
        raise
    placer.finish()
    if reader is not None:
        reader.drop_pages()
    return LoadedWeights(weights, table, loader.homes, arenas, progressing, reader)


class _Loader:
    """Places the tensors of a model in the order that `weight_bytes` tells."""

    def __init__(
        self, placer: Placer, arenas: list[Arena], table: ExpertTable, in_file: bool
    ) -> None:
        """`in_file`: routed experts stay there."""
        self._placer, self._table, self._in_file = placer, table, in_file
        self._trunk, self._experts = arenas
        self.homes: list[list[Placement]] = []

    def load(self, tensors: ModelTensors, rope: NDArray[np.float32]) -> ModelWeights:
        placer = self._placer
        embeddings = placer.matrix(tensors.embeddings)
        tied = tensors.output is tensors.embeddings
        layers = [self._layer(layer) for layer in tensors.layers]
        return ModelWeights(
            embeddings=embeddings,
            output_gain=placer.vector(tensors.output_gain),
            output=embeddings if tied else placer.matrix(tensors.output),
            layers=tuple(layers),
            rope_table=placer.place(rope.view(np.uint8).reshape(-1)),
            expert_table=self._table.range,
        )

    def _layer(self, layer: LayerTensors) -> LayerWeights:
        shape = expert_shape(layer.feed_forward)
        in_file = self._in_file and layer.router is not None
        spans = (
            []
            if in_file
            else self._placer.spans(
                layer.feed_forward, self._trunk if layer.router is None else self._experts
            )
        )
        if layer.router is not None and not in_file:
            for expert, span in enumerate(spans):
                self._table.set(len(self.homes), expert, span.address)
            self.homes.append(spans)
        return LayerWeights(
            attention_gain=self._placer.vector(layer.attention_gain),
            attention=self._latent(layer.attention)
            if isinstance(layer.attention, LatentTensors)
            else self._attention(layer.attention),
            feed_forward_gain=self._placer.vector(layer.feed_forward_gain),
            router=self._placer.matrix(layer.router) if layer.router is not None else None,
            router_bias=self._placer.vector(layer.router_bias),
            selection_bias=self._placer.vector(layer.selection_bias),
            shared=self._shared(layer.shared, layer.shared_gate),
            expert_shape=shape,
            expert_ranges=_merged(spans, shape.span_bytes) if layer.router is not None else (),
            dense_span=0 if layer.router is not None else spans[0].address,
        )

    def _attention(self, tensors: AttentionTensors) -> AttentionWeights:
        return AttentionWeights(
            q=self._placer.matrix(tensors.q),
            k=self._placer.matrix(tensors.k),
            v=self._placer.matrix(tensors.v),
            output=self._placer.matrix(tensors.output),
            q_gain=self._placer.vector(tensors.q_gain),
            k_gain=self._placer.vector(tensors.k_gain),
            qkv_bias=self._placer.vector(*tensors.qkv_bias),
            output_bias=self._placer.vector(tensors.output_bias),
            sinks=self._placer.vector(tensors.sinks),
        )

    def _latent(self, tensors: LatentTensors) -> LatentWeights:
        q_down = self._placer.matrix(tensors.q_down) if tensors.q_down is not None else None
        q, kv = self._placer.matrix(tensors.q), self._placer.matrix(tensors.kv)
        k_up, v_up = (self._placer.head_matrices(heads) for heads in latent_matrices(tensors))
        return LatentWeights(
            q=q,
            kv=kv,
            k_up=k_up,
            v_up=v_up,
            output=self._placer.matrix(tensors.output),
            q_down=q_down,
            q_gain=self._placer.vector(tensors.q_gain),
            kv_gain=self._placer.vector(tensors.kv_gain),
        )

    def _shared(
        self, block: FeedForwardTensors | None, gate: TensorInfo | None
    ) -> SharedExpert | None:
        if block is None:
            return None
        span = self._placer.block(block)
        weighed = self._placer.matrix(gate) if gate is not None else None
        return SharedExpert(expert_shape(block), span, weighed)


def _merged(spans: list[Placement], span_bytes: int) -> tuple[Range, ...]:
    """Neighbouring spans as one range each."""
    merged: list[Range] = []
    for span in sorted(spans, key=lambda item: item.address):
        if merged and merged[-1].end == span.address:
            merged[-1] = Range(merged[-1].resource, merged[-1].start, span.address + span_bytes)
        else:
            merged.append(memory_range(span.address, span_bytes))
    return tuple(merged)
