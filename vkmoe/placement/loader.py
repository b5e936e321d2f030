"""Puts a model's weights into GPU memory, in the layout kernels read, and says where they lie.

Owns the arenas of the weights, the order in which they are filled, and how a file's rows get there:
several threads lay them out or convert them (NumPy does both without the GIL), and the file's pages
are dropped behind them. How large the weights are is the subject of sizes.py. Where the host pool
does not hold all experts, these are not loaded with the other weights: whatever manages the pool
owns their places, and fills them with `LoadedWeights.fill`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.store.copies import Copy
from vkmoe.experts.store.table import ExpertTable
from vkmoe.gguf_file import GgufFile, TensorInfo
from vkmoe.gpu.arena import Arena, Placement
from vkmoe.gpu.device import Device
from vkmoe.gpu.memory_types import Intent
from vkmoe.gpu.program import Range, memory_range
from vkmoe.gpu.transfer import Transfer
from vkmoe.models.latent_matrices import HeadMatrices, latent_matrices
from vkmoe.models.model_file import ModelFile
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
from vkmoe.ops.matvec import Matrix
from vkmoe.placement.conversions import N_THREADS, conversion_line
from vkmoe.placement.plan import Decision
from vkmoe.placement.sizes import expert_shape, span_parts
from vkmoe.placement.span_reader import FileReads, SpanReader
from vkmoe.quants import decode, device_row_bytes, lay_out, loaded_type

__all__ = ["LoadedWeights", "Placer", "Progress", "Progressing", "load_weights"]

Progress = Callable[[int, int], None]  # bytes done, bytes in all
Bytes = NDArray[np.uint8]
PIECE_BYTES = 4 << 20  # rows are laid out in pieces of about this size
CONVERTED_PIECE_BYTES = 2 << 20  # and converted, which takes longer: progress is to be seen
N_AHEAD = N_THREADS + 1  # pieces that threads have begun, or finished, and that are not taken yet

log = logging.getLogger("vkmoe")


class Progressing:
    """Counts bytes up to a total and calls whatever shows progress."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress = total, progress
        self._done = 0

    def add(self, n_bytes: int) -> None:
        self._done += n_bytes
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)


@dataclass
class LoadedWeights:
    """The weights and what owns their memory.

    With a `reader`, not all experts are in host memory: no address is in the table (all are 0), no
    `expert_ranges` are in the weights, and there are no homes.
    """

    weights: ModelWeights
    table: ExpertTable
    homes: list[list[Placement]]  # of the routed experts [n MoE layers][n_experts]; [] with reader
    arenas: list[Arena]
    progress: Progressing
    reader: SpanReader | None = None

    def fill(self, reads: Sequence[Copy]) -> None:
        """Read experts (by number) into places of the host pool, by several threads.

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
        if self.reader is not None:
            self.reader.close()
        self.table.close()
        for arena in self.arenas:
            arena.close()


def load_weights(
    device: Device,
    model: ModelFile,
    decision: Decision,
    progress: Progress | None = None,
) -> LoadedWeights:
    """Place and copy all weights; the table leads to the experts' homes, and is not published.

    With a host pool smaller than the model, all but the experts. Raises GpuErrors such as
    OutOfMemoryError, and ModelFileError if the file was replaced meanwhile, with all freed. Logs
    what will be converted.
    """
    file, spec, tensors, plan = model.file, model.spec, model.tensors, decision.plan
    if line := conversion_line(plan):
        log.info("%s", line)
    sizes, pools = decision.weights, decision.host_pools
    in_pools = sum(pool.capacity * pool.slot_bytes for pool in pools)
    progressing = Progressing(sizes.trunk + (in_pools if pools else sizes.experts), progress)
    reader = SpanReader(file, tensors) if pools else None
    rope = rope_table(spec.rope, plan.ctx_size)
    expert_intent: Intent = "device" if plan.mode.on_device else "host"
    with ExitStack() as unless_loaded:
        if reader is not None:
            unless_loaded.callback(reader.close)
        trunk = Arena(device, "device", "weights", plan.layout("weights"))
        unless_loaded.callback(trunk.close)
        experts = Arena(device, expert_intent, "experts", plan.layout("experts"))
        unless_loaded.callback(experts.close)
        arenas, shape = [trunk, experts], decision.table
        table = ExpertTable(device, shape.n_layers, shape.n_experts, shape.n_landing)
        unless_loaded.callback(table.close)
        placer = Placer(file, device, trunk, progressing)
        unless_loaded.callback(placer.abandon)
        loader = _Loader(placer, arenas, table, in_file=bool(pools))
        weights = loader.load(tensors, rope)
        unless_loaded.pop_all()
    placer.finish()
    if reader is not None:
        reader.drop_pages()
    return LoadedWeights(weights, table, loader.homes, arenas, progressing, reader)


class _Loader:
    """Places the tensors of a model in the order that `weight_bytes` has."""

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
    """Merge neighbouring spans to one range each."""
    merged: list[Range] = []
    for span in sorted(spans, key=lambda item: item.address):
        if merged and merged[-1].end == span.address:
            merged[-1] = Range(merged[-1].resource, merged[-1].start, span.address + span_bytes)
        else:
            merged.append(memory_range(span.address, span_bytes))
    return tuple(merged)


class _Rows(NamedTuple):
    """Some rows of the file, uint8 [n, row_bytes], and where they go."""

    data: Bytes
    place: Placement
    start: int  # of the first, in the place's buffer


class _Kind(NamedTuple):
    """What rows are in the file and on the device."""

    file_type: str
    type: str
    n_columns: int

    @property
    def row_bytes(self) -> int:
        """Bytes on the device."""
        return device_row_bytes(self.type, self.n_columns)

    @property
    def piece_rows(self) -> int:
        is_converted = self.type != self.file_type
        n_bytes = CONVERTED_PIECE_BYTES if is_converted else PIECE_BYTES
        return max(1, n_bytes // self.row_bytes)


class Placer:
    """Copies tensors one after another; several threads lay rows out, mapped memory in place."""

    def __init__(
        self, file: GgufFile, device: Device, trunk: Arena, progressing: Progressing
    ) -> None:
        """`trunk` is for all but the routed experts."""
        self._file, self._trunk, self._progressing = file, trunk, progressing
        self._transfer = Transfer(device)
        self._pool = ThreadPoolExecutor(N_THREADS, "load")

    def finish(self) -> None:
        """Wait for all copies."""
        self._pool.shutdown()
        self._transfer.close()

    def abandon(self) -> None:
        """Leave out all copies that have not begun."""
        self._pool.shutdown(cancel_futures=True)
        self._transfer.close()

    def matrix(self, tensor: TensorInfo) -> Matrix:
        """Place the rows of a tensor of any number of dimensions, of which the last is the row."""
        kind = _Kind(tensor.type, loaded_type(tensor.type), tensor.shape[-1])
        matrix = self._placed(kind, self._rows(tensor, kind.n_columns))
        self._file.drop_pages(tensor.name)
        return matrix

    def head_matrices(self, heads: HeadMatrices) -> Matrix:
        """Place all heads' matrices as one."""
        kind = _Kind(heads.data_type, heads.type, heads.n_columns)
        matrix = self._placed(kind, heads.data(self._file))
        self._file.drop_pages(heads.tensor.name)
        return matrix

    def vector(self, *tensors: TensorInfo | None) -> int:
        """Place gains or biases as f32 behind one another, and return their address; 0 for none."""
        found = [tensor for tensor in tensors if tensor is not None]
        if not found:
            return 0
        values = [decode(x.type, self._file.data(x.name), x.n_weights) for x in found]
        return self.place(np.concatenate(values).view(np.uint8))

    def place(self, data: Bytes) -> int:
        """Place any bytes, uint8 [n_bytes], and return their address."""
        place = self._trunk.place(data.size)
        self._transfer.write(place.buffer, place.offset, data)
        return place.address

    def block(self, block: FeedForwardTensors) -> int:
        """Place the span of a block that every token uses, and return its address."""
        (span,) = self.spans(block, self._trunk)
        return span.address

    def spans(self, block: FeedForwardTensors, arena: Arena) -> list[Placement]:
        """Place the span of every expert of a block and fill it."""
        span_bytes = expert_shape(block).span_bytes
        spans = [arena.place(span_bytes) for _ in range(block.n_experts)]
        for source, matrix in span_parts(block):
            kind = _Kind(source.type, matrix.type, source.n_columns)
            parts = [self._rows(part, source.n_columns) for part in source.parts]
            pieces: list[_Rows] = []
            for expert, span in enumerate(spans):
                part, first = source.of_expert(expert)
                rows = parts[part][first : first + source.n_rows]
                pieces += self._pieces(kind, rows, span, matrix.offset)
            self._copy(kind, pieces)
            for tensor in source.parts:
                self._file.drop_pages(tensor.name)
        return spans

    def _placed(self, kind: _Kind, rows: Bytes) -> Matrix:
        place = self._trunk.place(len(rows) * kind.row_bytes)
        self._copy(kind, self._pieces(kind, rows, place, 0))
        return Matrix(kind.type, place.address, len(rows), kind.n_columns, kind.row_bytes)

    def _rows(self, tensor: TensorInfo, n_columns: int) -> Bytes:
        """View the file's bytes as [rows, row bytes]."""
        return self._file.data(tensor.name).reshape(tensor.n_weights // n_columns, -1)

    def _pieces(self, kind: _Kind, rows: Bytes, place: Placement, offset: int) -> list[_Rows]:
        """Cut rows that go behind one another, from `offset` in `place` on, into pieces."""
        start, step = place.offset + offset, kind.piece_rows
        return [
            _Rows(rows[first : first + step], place, start + first * kind.row_bytes)
            for first in range(0, len(rows), step)
        ]

    def _copy(self, kind: _Kind, pieces: Sequence[_Rows]) -> None:
        """Lay rows out where they go, or, where that is not mapped, on their way."""
        for piece, laid_out in self._laid_out(kind, pieces):
            if laid_out is not None:
                self._transfer.write(piece.place.buffer, piece.start, laid_out.reshape(-1))
            self._progressing.add(len(piece.data) * kind.row_bytes)

    def _laid_out(
        self, kind: _Kind, pieces: Sequence[_Rows]
    ) -> Iterator[tuple[_Rows, Bytes | None]]:
        """Yield each piece, in order, when a thread is done with it.

        With it come its bytes if they are not where they belong. The threads are few pieces ahead,
        so that these take little memory.
        """

        def work(piece: _Rows) -> Bytes | None:
            rows, n_bytes = piece.data, len(piece.data) * kind.row_bytes
            if not piece.place.buffer.mapped:
                return lay_out(kind.file_type, kind.type, rows, kind.n_columns)
            out = piece.place.buffer.view()[piece.start : piece.start + n_bytes]
            lay_out(*kind[:2], rows, kind.n_columns, out.reshape(len(rows), -1))
            return None

        ahead: deque[tuple[_Rows, Future[Bytes | None]]] = deque()
        for piece in pieces:
            if len(ahead) == N_AHEAD:
                done, future = ahead.popleft()
                yield done, future.result()
            ahead.append((piece, self._pool.submit(work, piece)))
        for done, future in ahead:
            yield done, future.result()
