"""Puts single matrices, vectors and experts into GPU memory, in the layout kernels read.

Owns how a file's rows get there: several threads lay them out (NumPy copies without the GIL), and
the file's pages are dropped behind them. Which tensors a model has is the subject of loader.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from vkmoe.gguf_file import GgufFile, TensorInfo
from vkmoe.gpu.arena import Arena, Placement
from vkmoe.gpu.device import Device
from vkmoe.gpu.transfer import Transfer
from vkmoe.models.tensors import FeedForwardTensors
from vkmoe.ops.matvec import Matrix
from vkmoe.placement.latent_matrices import HeadMatrices
from vkmoe.placement.loaded import N_THREADS, Progressing
from vkmoe.placement.sizes import expert_shape, span_parts
from vkmoe.quants import decode, device_row_bytes, to_device

__all__ = ["Placer"]

Bytes = NDArray[np.uint8]
PIECE_BYTES = 16 << 20  # rows are laid out in pieces of about this size


class Placer:
    """Copies tensors one after another; mapped memory is written by several threads."""

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
        n_columns = tensor.shape[-1]
        matrix = self._placed(tensor.type, self._rows(tensor, tensor.type, n_columns), n_columns)
        self._file.drop_pages(tensor.name)
        return matrix

    def head_matrices(self, heads: HeadMatrices) -> Matrix:
        """All heads' matrices as one."""
        matrix = self._placed(heads.type, heads.data(self._file), heads.n_columns)
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
            parts = [self._rows(part, matrix.type, source.n_columns) for part in source.parts]
            pieces = []
            for expert, span in enumerate(spans):
                part, first = source.of_expert(expert)
                rows = parts[part][first : first + source.n_rows]
                pieces += self._pieces(matrix.row_bytes, rows, span, matrix.offset)
            self._copy(matrix.type, source.n_columns, pieces)
            for tensor in source.parts:
                self._file.drop_pages(tensor.name)
        return spans

    def _placed(self, kind: str, rows: Bytes, n_columns: int) -> Matrix:
        row_bytes = device_row_bytes(kind, n_columns)
        place = self._trunk.place(len(rows) * row_bytes)
        self._copy(kind, n_columns, self._pieces(row_bytes, rows, place, 0))
        return Matrix(kind, place.address, len(rows), n_columns, row_bytes)

    def _rows(self, tensor: TensorInfo, kind: str, n_columns: int) -> Bytes:
        """The file's bytes as [rows, row bytes]; of another kind: decoded to float32."""
        data = self._file.data(tensor.name)
        if kind != tensor.type:
            assert kind == "F32", (tensor, kind)
            data = decode(tensor.type, data, tensor.n_weights).view(np.uint8)
        return data.reshape(tensor.n_weights // n_columns, -1)

    def _pieces(
        self, row_bytes: int, rows: Bytes, place: Placement, offset: int
    ) -> list[tuple[Bytes, Placement, int]]:
        """Cut rows into pieces of about PIECE_BYTES: (rows, placement, offset behind it)."""
        step = max(1, PIECE_BYTES // row_bytes)
        return [
            (rows[start : start + step], place, offset + start * row_bytes)
            for start in range(0, len(rows), step)
        ]

    def _copy(self, kind: str, n_columns: int, pieces: list[tuple[Bytes, Placement, int]]) -> None:
        row_bytes = device_row_bytes(kind, n_columns)

        def copy(piece: tuple[Bytes, Placement, int]) -> None:
            rows, place, offset = piece
            start = place.offset + offset
            n_bytes = len(rows) * row_bytes
            if place.buffer.mapped:
                out = place.buffer.view()[start : start + n_bytes].reshape(len(rows), row_bytes)
                to_device(kind, rows, n_columns, out=out)
            else:
                laid_out = to_device(kind, rows, n_columns)
                self._transfer.write(place.buffer, start, laid_out.reshape(-1))

        mapped = all(place.buffer.mapped for _, place, _ in pieces)
        for piece, _ in zip(
            pieces, self._pool.map(copy, pieces) if mapped else map(copy, pieces), strict=True
        ):
            self._progressing.add(len(piece[0]) * row_bytes)
