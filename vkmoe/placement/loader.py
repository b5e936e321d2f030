"""Puts a model's weights into GPU memory, in the layout kernels read, and says where they lie.

Owns the arenas of the weights, the order in which they are filled, and how a file's rows get there:
several threads lay them out or convert them (NumPy does both without the GIL), and the file's pages
are dropped behind them. How large the weights are is the subject of sizes.py. Where the host pool
does not hold all experts, these are not loaded with the other weights: whatever manages the pool
owns their slots, and fills them with `LoadedWeights.fill`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.choices import BufferName
from vkmoe.closing import Closing
from vkmoe.experts.store.copies import Copy
from vkmoe.experts.store.table import ExpertTable
from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import GgufFile, TensorInfo
from vkmoe.gpu.arena import Arena, Placement
from vkmoe.gpu.device import Device, Intent
from vkmoe.gpu.program import Range, memory_range
from vkmoe.gpu.transfer import Transfer
from vkmoe.models import ModelFile
from vkmoe.models.rope import rope_table
from vkmoe.models.tensors import FeedForwardTensors, LayerTensors, ModelTensors, TrunkTensor
from vkmoe.models.trunk_tensors import FileMatrix, FileVector
from vkmoe.models.weights import (
    AttentionWeights,
    Block,
    FeedForwardWeights,
    LatentWeights,
    LayerWeights,
    ModelWeights,
)
from vkmoe.ops.matvec import Matrix
from vkmoe.placement.plan import Decision, table_shape
from vkmoe.placement.sizes import N_THREADS, conversion_line, expert_shape, span_parts
from vkmoe.placement.span_reader import FileReads, SpanReader
from vkmoe.quants import device_row_bytes, lay_out

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
    progressing = Progressing(sizes.trunk + (in_pools if pools else sizes.experts), progress)
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
        with Placer(file, device, trunk, progressing) as placer:
            loader = _Loader(placer, None if pools else experts, table)
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
        shape = expert_shape(experts)
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


class _Rows(NamedTuple):
    """Describes rows of the file, uint8 [n, row_bytes], and where they go."""

    data: Bytes
    place: Placement
    start: int  # of the first, in the place's buffer


class _Kind(NamedTuple):
    """Says what rows are in the file and on the device."""

    file_type: str
    type: str
    n_columns: int

    @property
    def row_bytes(self) -> int:
        """Count the bytes on the device."""
        return device_row_bytes(self.type, self.n_columns)

    @property
    def piece_rows(self) -> int:
        is_converted = self.type != self.file_type
        n_bytes = CONVERTED_PIECE_BYTES if is_converted else PIECE_BYTES
        return max(1, n_bytes // self.row_bytes)


class Placer(Closing):
    """Copies tensors one after another; several threads lay rows out, mapped memory in place."""

    def __init__(
        self, file: GgufFile, device: Device, trunk: Arena, progressing: Progressing
    ) -> None:
        """Begin with nothing placed; `trunk` is for all but the routed experts."""
        self._file, self._trunk, self._progressing = file, trunk, progressing
        self._transfer = Transfer(device)
        self._pool = ThreadPoolExecutor(N_THREADS, "load")

    def close(self) -> None:
        """Wait for the copies that have begun; after an error, leave out the others."""
        self._pool.shutdown(cancel_futures=True)
        self._transfer.close()

    def weights(self, tensor: TrunkTensor) -> Matrix | Block | int:
        """Place what every token reads."""
        if isinstance(tensor, FileMatrix):
            return self.matrix(tensor)
        return self.vector(tensor) if isinstance(tensor, FileVector) else self.block(tensor)

    def matrix(self, tensor: FileMatrix) -> Matrix:
        """Place all rows of a matrix."""
        kind, rows = _Kind(tensor.data_type, tensor.type, tensor.n_columns), tensor.data(self._file)
        place = self._trunk.place(len(rows) * kind.row_bytes)
        self._copy(kind, self._pieces(kind, rows, place, 0))
        self._file.drop_pages(tensor.tensor.name)
        return Matrix(kind.type, place.address, len(rows), kind.n_columns, kind.row_bytes)

    def vector(self, tensor: FileVector) -> int:
        """Place gains or biases as f32, and return their address."""
        return self.place(tensor.data(self._file))

    def place(self, data: Bytes) -> int:
        """Place any bytes, uint8 [n_bytes], and return their address."""
        place = self._trunk.place(data.size)
        self._transfer.write(place.buffer, place.offset, data)
        return place.address

    def block(self, block: FeedForwardTensors) -> Block:
        """Place the span of a block that every token uses."""
        (span,) = self.spans(block, self._trunk)
        return Block(expert_shape(block), span.address)

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
            rows, place, out = piece.data, piece.place.buffer, None
            if place.mapped:
                out = place.view()[piece.start : piece.start + len(rows) * kind.row_bytes]
                out = out.reshape(len(rows), -1)
            laid_out = lay_out(kind.file_type, kind.type, rows, kind.n_columns, out)
            return laid_out if out is None else None

        ahead: deque[tuple[_Rows, Future[Bytes | None]]] = deque()
        for piece in pieces:
            if len(ahead) == N_AHEAD:
                done, future = ahead.popleft()
                yield done, future.result()
            ahead.append((piece, self._pool.submit(work, piece)))
        for done, future in ahead:
            yield done, future.result()
