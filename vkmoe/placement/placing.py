"""Puts single matrices, vectors and experts into GPU memory, in the layout kernels read.

Owns how a file's rows get there: several threads lay them out or convert them (NumPy does both
without the GIL), and the file's pages are dropped behind them. Which tensors a model has is the
subject of loader.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.gguf_file import GgufFile, TensorInfo
from vkmoe.gpu.arena import Arena, Placement
from vkmoe.gpu.device import Device
from vkmoe.gpu.transfer import Transfer
from vkmoe.models.latent_matrices import HeadMatrices
from vkmoe.models.tensors import FeedForwardTensors
from vkmoe.ops.matvec import Matrix
from vkmoe.placement.loaded import N_THREADS, Progressing
from vkmoe.placement.sizes import expert_shape, span_parts
from vkmoe.quants import decode, device_row_bytes, lay_out, loaded_type

__all__ = ["Placer"]

Bytes = NDArray[np.uint8]
PIECE_BYTES = 4 << 20  # rows are laid out in pieces of about this size
CONVERTED_PIECE_BYTES = 2 << 20  # and converted, which takes longer: progress is to be seen
N_AHEAD = N_THREADS + 1  # pieces that threads have begun, or finished, and nobody has taken


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
        """On the device."""
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
        """Leave out what has not begun."""
        self._pool.shutdown(cancel_futures=True)
        self._transfer.close()

    def matrix(self, tensor: TensorInfo) -> Matrix:
        """Rows of a tensor with any number of dimensions, of which the last is the row."""
        kind = _Kind(tensor.type, loaded_type(tensor.type), tensor.shape[-1])
        matrix = self._placed(kind, self._rows(tensor, kind.n_columns))
        self._file.drop_pages(tensor.name)
        return matrix

    def head_matrices(self, heads: HeadMatrices) -> Matrix:
        """All heads' matrices as one."""
        kind = _Kind(heads.data_type, heads.type, heads.n_columns)
        matrix = self._placed(kind, heads.data(self._file))
        self._file.drop_pages(heads.tensor.name)
        return matrix

    def vector(self, *tensors: TensorInfo | None) -> int:
        """The address of gains or biases, as f32 behind one another; 0 for none."""
        found = [tensor for tensor in tensors if tensor is not None]
        if not found:
            return 0
        values = [decode(x.type, self._file.data(x.name), x.n_weights) for x in found]
        return self.place(np.concatenate(values).view(np.uint8))

    def place(self, data: Bytes) -> int:
        """The address of any bytes, uint8 [n_bytes]."""
        place = self._trunk.place(data.size)
        self._transfer.write(place.buffer, place.offset, data)
        return place.address

    def block(self, block: FeedForwardTensors) -> int:
        """The address of the span of a block that every token uses."""
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
        """The file's bytes as [rows, row bytes]."""
        return self._file.data(tensor.name).reshape(tensor.n_weights // n_columns, -1)

    def _pieces(self, kind: _Kind, rows: Bytes, place: Placement, offset: int) -> list[_Rows]:
        """Rows that go behind one another, from `offset` in `place` on, cut into pieces."""
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
        """Each piece, in order, when a thread is done with it, and its bytes if they are not where
        they belong. The threads are few pieces ahead, so that these take little memory.
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
