"""Puts a model's weights into GPU memory and says where they lie.

Owns the arenas of the weights; how large they are is the subject of sizes.py. Copies the file's
bytes into their device layout (several threads; NumPy copies without the GIL) and drops the file's
pages behind itself, so that host memory is never held twice. Does not touch experts where the host
pool is too small for all of them (loaded.py).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.table import ExpertTable
from vkmoe.facts import MemoryPlan, ModelSpec
from vkmoe.gguf_file import GgufFile, TensorInfo
from vkmoe.gpu.arena import Arena, Placement, round_up
from vkmoe.gpu.device import Device
from vkmoe.gpu.memory_types import Intent
from vkmoe.gpu.program import Range, memory_range
from vkmoe.gpu.transfer import Transfer
from vkmoe.models.rope import rope_table
from vkmoe.models.tensors import LayerTensors, ModelTensors
from vkmoe.models.weights import LayerWeights, ModelWeights
from vkmoe.ops.experts import ExpertShape
from vkmoe.ops.matvec import Matrix
from vkmoe.placement.loaded import N_THREADS, LoadedWeights, Progress, Progressing
from vkmoe.placement.pool_places import host_pools
from vkmoe.placement.sizes import expert_shape, weight_bytes
from vkmoe.placement.span_reader import SpanReader
from vkmoe.quants import decode, device_row_bytes, to_device

__all__ = ["LoadedWeights", "Progress", "load_weights"]

Bytes = NDArray[np.uint8]
PIECE_BYTES = 16 << 20  # rows are laid out in pieces of about this size


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
    ModelFileError if the file was replaced meanwhile, with all freed.
    """
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
    loader = _Loader(file, device, arenas, table, progressing, in_file=bool(pools))
    try:
        weights = loader.load(tensors, rope)
    except BaseException:
        loader.abandon()
        for arena in arenas:
            arena.close()
        table.close()
        if reader is not None:
            reader.close()
        raise
    loader.finish()
    if reader is not None:
        reader.drop_pages()
    return LoadedWeights(weights, table, loader.homes, arenas, progressing, reader)


class _Loader:
    """Copies tensors one after another; mapped memory is written by several threads."""

    def __init__(
        self,
        file: GgufFile,
        device: Device,
        arenas: list[Arena],
        table: ExpertTable,
        progressing: Progressing,
        in_file: bool,
    ) -> None:
        """`in_file`: routed experts stay there."""
        self._file = file
        self._trunk, self._experts = arenas
        self._table = table
        self._transfer = Transfer(device)
        self._pool = ThreadPoolExecutor(N_THREADS, "load")
        self._progressing, self._in_file = progressing, in_file
        self.homes: list[list[Placement]] = []

    def load(self, tensors: ModelTensors, rope: NDArray[np.float32]) -> ModelWeights:
        embeddings = self._matrix(tensors.embeddings)
        tied = tensors.output is tensors.embeddings
        layers = [self._layer(layer) for layer in tensors.layers]
        return ModelWeights(
            embeddings=embeddings,
            output_gain=self._gain(tensors.output_gain),
            output=embeddings if tied else self._matrix(tensors.output),
            layers=tuple(layers),
            rope_table=self._place(rope.view(np.uint8).reshape(-1)),
            expert_table=self._table.range,
        )

    def finish(self) -> None:
        self._pool.shutdown()
        self._transfer.close()

    def abandon(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._transfer.close()

    def _layer(self, layer: LayerTensors) -> LayerWeights:
        shape = expert_shape(layer)
        in_file = self._in_file and layer.router is not None
        spans = [] if in_file else self._spans(layer, shape)
        if layer.router is not None and not in_file:
            for expert, span in enumerate(spans):
                self._table.set(len(self.homes), expert, span.address)
            self.homes.append(spans)
        return LayerWeights(
            attention_gain=self._gain(layer.attention_gain),
            q=self._matrix(layer.q),
            k=self._matrix(layer.k),
            v=self._matrix(layer.v),
            output=self._matrix(layer.output),
            q_gain=self._gain(layer.q_gain),
            k_gain=self._gain(layer.k_gain),
            feed_forward_gain=self._gain(layer.feed_forward_gain),
            router=self._matrix(layer.router) if layer.router is not None else None,
            expert_shape=shape,
            expert_ranges=_merged(spans, shape.span_bytes) if layer.router is not None else (),
            dense_span=0 if layer.router is not None else spans[0].address,
        )

    def _spans(self, layer: LayerTensors, shape: ExpertShape) -> list[Placement]:
        """Place every expert's span and fill it from the three stacked tensors."""
        n_spans = 1 if layer.router is None else layer.router.shape[0]
        arena = self._trunk if layer.router is None else self._experts
        spans = [arena.place(shape.span_bytes) for _ in range(n_spans)]
        for tensor, matrix in (
            (layer.gate, shape.gate),
            (layer.up, shape.up),
            (layer.down, shape.down),
        ):
            rows = self._rows(tensor)
            pieces = []
            for index, span in enumerate(spans):
                part = rows[index * matrix.n_rows : (index + 1) * matrix.n_rows]
                pieces += self._pieces(tensor, part, span, matrix.offset)
            self._copy(tensor, pieces)
        return spans

    def _matrix(self, tensor: TensorInfo) -> Matrix:
        rows = self._rows(tensor)
        n_columns = tensor.shape[-1]
        row_bytes = device_row_bytes(tensor.type, n_columns)
        place = self._trunk.place(len(rows) * row_bytes)
        self._copy(tensor, self._pieces(tensor, rows, place, 0))
        return Matrix(tensor.type, place.address, len(rows), n_columns, row_bytes)

    def _gain(self, tensor: TensorInfo) -> int:
        values = decode(tensor.type, self._file.data(tensor.name), tensor.shape[0])
        return self._place(values.astype(np.float32).view(np.uint8))

    def _place(self, data: Bytes) -> int:
        place = self._trunk.place(data.size)
        self._transfer.write(place.buffer, place.offset, data)
        return place.address

    def _rows(self, tensor: TensorInfo) -> Bytes:
        """The file's bytes as [rows, row bytes]."""
        n_rows = int(np.prod(tensor.shape[:-1]))
        return self._file.data(tensor.name).reshape(n_rows, -1)

    def _pieces(
        self,
        tensor: TensorInfo,
        rows: Bytes,
        place: Placement,
        offset: int,
    ) -> list[tuple[Bytes, Placement, int]]:
        """Cut rows into pieces of about PIECE_BYTES: (rows, placement, offset behind it)."""
        row_bytes = device_row_bytes(tensor.type, tensor.shape[-1])
        step = max(1, PIECE_BYTES // row_bytes)
        return [
            (rows[start : start + step], place, offset + start * row_bytes)
            for start in range(0, len(rows), step)
        ]

    def _copy(self, tensor: TensorInfo, pieces: list[tuple[Bytes, Placement, int]]) -> None:
        n_columns = tensor.shape[-1]
        row_bytes = device_row_bytes(tensor.type, n_columns)

        def copy(piece: tuple[Bytes, Placement, int]) -> None:
            rows, place, offset = piece
            start = place.offset + offset
            n_bytes = len(rows) * row_bytes
            if place.buffer.mapped:
                out = place.buffer.view()[start : start + n_bytes].reshape(len(rows), row_bytes)
                to_device(tensor.type, rows, n_columns, out=out)
            else:
                laid_out = to_device(tensor.type, rows, n_columns)
                self._transfer.write(place.buffer, start, laid_out.reshape(-1))

        mapped = all(place.buffer.mapped for _, place, _ in pieces)
        for piece, _ in zip(
            pieces, self._pool.map(copy, pieces) if mapped else map(copy, pieces), strict=True
        ):
            self._progressing.add(len(piece[0]) * row_bytes)
        self._file.drop_pages(tensor.name)


def _merged(spans: list[Placement], span_bytes: int) -> tuple[Range, ...]:
    """Neighbouring spans as one range each."""
    merged: list[Range] = []
    for span in sorted(spans, key=lambda item: item.address):
        if merged and merged[-1].end == span.address:
            merged[-1] = Range(merged[-1].resource, merged[-1].start, span.address + span_bytes)
        else:
            merged.append(memory_range(span.address, span_bytes))
    return tuple(merged)
