"""Puts tensors where kernels read them, and says where that is.

For GPUs they are copied in the layout of their kernels: several threads lay rows out
(NumPy does that without the GIL), and the file's pages are dropped behind them. A CPU reads
them where the file is mapped. Which tensors there are, and in which order, is known to loader.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from vkmoe.closing import Closing
from vkmoe.cpu.device import CpuDevice
from vkmoe.gguf_file import GgufFile, TensorInfo
from vkmoe.gpu.arena import Arena, Placement
from vkmoe.gpu.device import Device
from vkmoe.gpu.transfer import Transfer
from vkmoe.interrupts import checkpoint, result_of
from vkmoe.kernels.experts.operations import DESCRIPTOR_BYTES, Descriptors, ExpertShape
from vkmoe.kernels.matvec.operations import Matrix
from vkmoe.models.tensors import ExpertMatrix, FeedForwardTensors, TrunkTensor
from vkmoe.models.trunk_tensors import FileMatrix, FileVector
from vkmoe.models.weights import BlockWeights
from vkmoe.quants import TYPES, decode, device_row_bytes, lay_out
from vkmoe.quants.types import Bytes
from vkmoe.weights.mapped import mapped_shape
from vkmoe.weights.sizes import N_THREADS, expert_shape, span_parts

Progress = Callable[[int, int], None]  # bytes done, bytes in all
PIECE_BYTES = 4 << 20  # rows are laid out in pieces of about this size
TOUCHED_BYTES = 16 << 20  # of a mapped file, by a thread at a time
PAGE_BYTES = 4096  # the smallest there is
N_AHEAD = N_THREADS + 1  # pieces that threads have begun, or finished, and that are not taken yet


class Progressing:
    """Counts bytes up to a total and calls whatever shows progress; loading may end there."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress = total, progress
        self._done = 0

    def add(self, n_bytes: int) -> None:
        self._done += n_bytes
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)
        checkpoint()


class _FileRows(NamedTuple):
    """Describes rows of the file, uint8 [n, row_bytes], and where they go."""

    data: Bytes
    place: Placement
    start: int  # of the first, in the place's buffer
    scale: float


class _RowKind(NamedTuple):
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
        return max(1, PIECE_BYTES // self.row_bytes)


class WeightPlaces(ABC):
    """Says of tensors, one after another, where kernels find them."""

    def weights(self, tensor: TrunkTensor) -> Matrix | BlockWeights | int:
        """Place what every token reads."""
        if isinstance(tensor, FileMatrix):
            return self.matrix(tensor)
        return self.vector(tensor) if isinstance(tensor, FileVector) else self.block(tensor)

    @abstractmethod
    def matrix(self, tensor: FileMatrix) -> Matrix:
        """Place all rows of a matrix."""

    @abstractmethod
    def vector(self, tensor: FileVector) -> int:
        """Place gains or biases as f32, and return their address."""

    @abstractmethod
    def place(self, data: Bytes) -> int:
        """Place any bytes, uint8 [n_bytes], and return their address."""

    def block(self, block: FeedForwardTensors) -> BlockWeights:
        """Place the span of a block that every token uses."""
        (span,) = self.spans(block)
        return BlockWeights(self.shape(block), span.address)

    def shape(self, block: FeedForwardTensors) -> ExpertShape:
        """Say how kernels find the parts of a span."""
        return expert_shape(block)

    @abstractmethod
    def spans(self, block: FeedForwardTensors, arena: Arena | None = None) -> list[Placement]:
        """Place the span of every expert of a block, in an arena or where other weights are."""


class Placer(WeightPlaces, Closing):
    """Copies tensors one after another; several threads lay rows out, mapped memory in place."""

    def __init__(
        self, file: GgufFile, device: Device, trunk: Arena, progressing: Progressing
    ) -> None:
        """Begin with nothing placed; `trunk` is for all but routed experts, and may be changed."""
        self._file, self._progressing = file, progressing
        self.trunk = trunk  # where the next tensors go
        self._transfer = Transfer(device)
        self._pool = ThreadPoolExecutor(N_THREADS, "load")

    def close(self) -> None:
        """Wait for the copies that have begun; after an error, leave out the others."""
        self._pool.shutdown(cancel_futures=True)
        self._transfer.close()

    def matrix(self, tensor: FileMatrix) -> Matrix:
        kind = _RowKind(tensor.type, tensor.type, tensor.n_columns)
        rows = tensor.data(self._file)
        place = self.trunk.place(len(rows) * kind.row_bytes)
        self._copy(kind, self._pieces(kind, rows, place, 0, tensor.scale(self._file)))
        self._file.drop_pages(tensor.tensor.name)
        return Matrix(kind.type, place.address, len(rows), kind.n_columns, kind.row_bytes)

    def vector(self, tensor: FileVector) -> int:
        return self.place(tensor.data(self._file))

    def place(self, data: Bytes) -> int:
        place = self.trunk.place(data.size)
        self._transfer.write(place.buffer, place.offset, data)
        return place.address

    def spans(self, block: FeedForwardTensors, arena: Arena | None = None) -> list[Placement]:
        """Place the span of every expert of a block and fill it."""
        span_bytes, arena = expert_shape(block).span_bytes, arena or self.trunk
        spans = [arena.place(span_bytes) for _ in range(block.n_experts)]
        for source, matrix in span_parts(block):
            kind = _RowKind(source.type, matrix.type, source.n_columns)
            parts = [self._rows(part, source.n_columns) for part in source.parts]
            scales = source.scales(self._file)
            pieces: list[_FileRows] = []
            for expert, span in enumerate(spans):
                part, first = source.of_expert(expert)
                rows = parts[part][first : first + source.n_rows]
                pieces += self._pieces(kind, rows, span, matrix.offset, float(scales[expert]))
            self._copy(kind, pieces)
            for tensor in source.parts:
                self._file.drop_pages(tensor.name)
        return spans

    def _rows(self, tensor: TensorInfo, n_columns: int) -> Bytes:
        """View the file's bytes as [rows, row bytes]."""
        return self._file.data(tensor.name).reshape(tensor.n_weights // n_columns, -1)

    def _pieces(
        self, kind: _RowKind, rows: Bytes, place: Placement, offset: int, scale: float
    ) -> list[_FileRows]:
        """Cut rows that go behind one another, from `offset` in `place` on, into pieces."""
        start, step = place.offset + offset, kind.piece_rows
        return [
            _FileRows(rows[first : first + step], place, start + first * kind.row_bytes, scale)
            for first in range(0, len(rows), step)
        ]

    def _copy(self, kind: _RowKind, pieces: Sequence[_FileRows]) -> None:
        """Lay rows out where they go, or, where that is not mapped, on their way."""
        for piece, laid_out in self._laid_out(kind, pieces):
            if laid_out is not None:
                self._transfer.write(piece.place.buffer, piece.start, laid_out.reshape(-1))
            self._progressing.add(len(piece.data) * kind.row_bytes)

    def _laid_out(
        self, kind: _RowKind, pieces: Sequence[_FileRows]
    ) -> Iterator[tuple[_FileRows, Bytes | None]]:
        """Yield each piece, in order, when a thread is done with it.

        With it come its bytes if they are not where they belong. The threads are few pieces ahead,
        so that these take little memory.
        """

        def work(piece: _FileRows) -> Bytes | None:
            rows, place, out = piece.data, piece.place.buffer, None
            if place.mapped:
                out = place.view()[piece.start : piece.start + len(rows) * kind.row_bytes]
                out = out.reshape(len(rows), -1)
            laid_out = lay_out(kind.file_type, kind.type, rows, kind.n_columns, out, piece.scale)
            return laid_out if out is None else None

        ahead: deque[tuple[_FileRows, Future[Bytes | None]]] = deque()
        for piece in pieces:
            if len(ahead) == N_AHEAD:
                done, future = ahead.popleft()
                yield done, result_of(future)
            ahead.append((piece, self._pool.submit(work, piece)))
        for done, future in ahead:
            yield done, result_of(future)


class MappedPlacer(Placer):
    """Finds tensors one after another, and has the system read them from the disk ahead of time.

    Where they are `too_large` for the memory there is, experts are read when they are used.
    """

    def __init__(
        self,
        file: GgufFile,
        device: Device,
        trunk: Arena,
        progressing: Progressing,
        too_large: bool = False,
    ) -> None:
        super().__init__(file, device, trunk, progressing)
        assert isinstance(device, CpuDevice), device
        self._device, self._too_large = device, too_large

    def matrix(self, tensor: FileMatrix) -> Matrix:
        """Find all rows of a matrix."""
        address = self._reach(tensor.type, tensor.type, tensor.data(self._file))
        self._device.scale(address, tensor.scale(self._file))
        row_bytes = TYPES[tensor.type].row_bytes(tensor.n_columns)
        return Matrix(tensor.type, address, tensor.n_rows, tensor.n_columns, row_bytes)

    def vector(self, tensor: FileVector) -> int:
        """Find gains or biases as f32, and return their address."""
        if not tensor.is_in_file:
            return self._reach("F32", "F32", tensor.data(self._file))
        return self._reach("F32", "F32", self._file.data(tensor.tensors[0].name))

    def block(self, block: FeedForwardTensors) -> BlockWeights:
        """Find the parts of a block that every token uses."""
        (span,) = self.spans(block)
        addresses = span.buffer.view()[span.offset : span.offset + DESCRIPTOR_BYTES]
        parts = tuple(addresses.view(np.uint64).tolist())
        return BlockWeights(self.shape(block), span.address, parts=parts)

    def shape(self, block: FeedForwardTensors) -> ExpertShape:
        return mapped_shape(block)

    def spans(self, block: FeedForwardTensors, arena: Arena | None = None) -> list[Placement]:
        """Find the parts of every expert of a block, and place their addresses."""
        arena, made = arena or self.trunk, Descriptors.of(block.n_experts)
        n_matrices, later = len(block.matrices), self._too_large and block.n_experts > 1
        for index, source in enumerate((*block.matrices, *block.biases)):
            kind = "F32" if index >= n_matrices else source.type
            made.addresses[:, index] = self._of_experts(source, kind, later)
            if index < n_matrices:
                made.scales[:, index] = source.scales(self._file)
            if later and index < n_matrices:
                n_bytes = source.n_rows * TYPES[kind].row_bytes(source.n_columns)
                made.sizes[:, index] = n_bytes
        spans = [arena.place(DESCRIPTOR_BYTES) for _ in range(block.n_experts)]
        for span, words in zip(spans, made.words, strict=True):
            view = span.buffer.view()[span.offset : span.offset + DESCRIPTOR_BYTES]
            view[:] = words.view(np.uint8)
        return spans

    def _of_experts(self, source: ExpertMatrix, kind: str, later: bool) -> list[int]:
        """Find a matrix, or a vector of biases, of each expert: its address."""
        firsts = [
            self._reach(tensor.type, kind, self._file.data(tensor.name), later)
            for tensor in source.parts
        ]
        row_bytes = TYPES[kind].row_bytes(source.n_columns)
        places = (source.of_expert(expert) for expert in range(source.n_experts))
        return [firsts[part] + first * row_bytes for part, first in places]

    def _reach(self, file_type: str, kind: str, data: Bytes, later: bool = False) -> int:
        """Return the address of weights in a type that kernels read: that of the file, or F32.

        They are read at once, or `later`.
        """
        flat = data.reshape(-1)
        if kind != file_type:
            block = TYPES[file_type]
            n_weights = flat.size // block.block_bytes * block.block_weights
            flat = decode(file_type, flat, n_weights).view(np.uint8)
        n_bytes = flat.size
        if later:
            self._progressing.add(n_bytes)
        else:
            ends = [*range(0, n_bytes, TOUCHED_BYTES), n_bytes]
            touched: list[tuple[int, Future[None]]] = [
                (end - start, self._pool.submit(_touch, flat[start:end]))
                for start, end in pairwise(ends)
            ]
            for size, future in touched:
                result_of(future)
                self._progressing.add(size)
        return self._device.reach(flat)


def _touch(data: Bytes) -> None:
    """Read a byte of every page, so that all of them are in memory."""
    data[::PAGE_BYTES].max(initial=0)
