"""Reads single experts from the model file, for a host pool that does not hold all of them.

Owns descriptors of the file's parts. Reads by position, never through the mapping, and leaves
nothing in the page cache. Does not decide what is read, nor where to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from traceback import clear_frames
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.closing import Closing
from vkmoe.experts.store.copies import Copy, Upload, Uploader
from vkmoe.gguf_file import GgufFile, TensorInfo
from vkmoe.gpu.arena import Placement
from vkmoe.kernels.experts.operations import SpanMatrix
from vkmoe.models.tensors import ExpertMatrix, ModelTensors
from vkmoe.quants import TYPES, lay_out, to_device
from vkmoe.weights.sizes import N_THREADS, expert_shape, span_parts

Bytes = NDArray[np.uint8]
STAGING_BYTES = 1 << 20  # of each thread that reads: rows that are not kept as the file has them
READING_BYTES = N_THREADS * STAGING_BYTES
N_AHEAD = 4  # experts that the disk is asked for at a time


class _Source(NamedTuple):
    """Says where one matrix of a layer's experts lies in the file, and where in a span it goes."""

    stack: ExpertMatrix
    matrix: SpanMatrix
    scales: NDArray[np.float32]  # [n_experts]

    @property
    def n_bytes(self) -> int:
        """Count the bytes of one expert, in the file."""
        return self.matrix.n_rows * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Count the bytes of a row in the file; on the device it may have another type."""
        return TYPES[self.stack.type].row_bytes(self.matrix.n_columns)

    @property
    def is_kept(self) -> bool:
        """Say whether rows lie on the device as in the file: they come back as they are then."""
        rows, kind = np.empty((0, self.row_bytes), np.uint8), self.matrix.type
        return kind == self.stack.type and to_device(kind, rows, self.matrix.n_columns) is rows

    def place(self, expert: int) -> tuple[TensorInfo, int]:
        """Find the tensor an expert's rows lie in, and where in its part of the file they begin."""
        part, first = self.stack.of_expert(expert)
        tensor = self.stack.parts[part]
        return tensor, tensor.offset + first * self.row_bytes


class SpanReader(Closing):
    """Reads the experts of a model file. Several threads may read at the same time.

    Raises ModelFileError when made if the file is not the one that was opened.
    """

    def __init__(self, file: GgufFile, tensors: ModelTensors) -> None:
        self._layers: list[tuple[_Source, ...]] = []
        self.span_bytes: list[int] = []  # of an expert [n MoE layers]
        self.n_experts = 1  # of a layer
        for block in tensors.expert_layers:
            self.n_experts = block.n_experts
            parts = span_parts(block)
            sources = (_Source(stack, matrix, stack.scales(file)) for stack, matrix in parts)
            self._layers.append(tuple(sources))
            self.span_bytes.append(expert_shape(block).span_bytes)
        self._staging = threading.local()
        self._files = file.reopen()

    def read(self, number: int, out: Bytes) -> None:
        """Bring the span of an expert (keys.py) into `out`: uint8 [span_bytes].

        `out` is written in full and never read, so it may be GPU memory. Raises ModelFileError if
        the file was cut off, written to, or cannot be read; `out` is undefined then.
        """
        layer, expert = divmod(number, self.n_experts)
        sources, end = self._layers[layer], 0
        assert out.size == self.span_bytes[layer], (number, out.size)
        for source in sources:
            matrix = source.matrix
            out[end : matrix.offset] = 0
            end = matrix.offset + matrix.n_bytes
            self._read_matrix(source, expert, out[matrix.offset : end])
            tensor, offset = source.place(expert)
            self._files[tensor.part].drop(offset, source.n_bytes)
        out[end:] = 0

    def will_read(self, number: int) -> None:
        """Have the system begin to fetch an expert. Only a hint: nothing follows from it."""
        layer, expert = divmod(number, self.n_experts)
        for source in self._layers[layer]:
            tensor, offset = source.place(expert)
            self._files[tensor.part].will_read(offset, source.n_bytes)

    def drop_pages(self) -> None:
        """Take all of the file that is not mapped out of the page cache."""
        for file in self._files:
            file.drop(0, 0)

    def close(self) -> None:
        """Close the files. May be called twice, and while a thread reads: its read is the last."""
        for file in self._files:
            file.close()

    def _read_matrix(self, source: _Source, expert: int, out: Bytes) -> None:
        """Read in one go where rows are kept as the file has them, else piece by piece."""
        matrix, (tensor, offset) = source.matrix, source.place(expert)
        file = self._files[tensor.part]
        what = f"expert {expert} of {tensor.name}"
        if source.is_kept:
            file.read_into(out, offset, what)
            return
        rows_out = out.reshape(matrix.n_rows, matrix.row_bytes)
        row_bytes = source.row_bytes
        n_rows = max(1, STAGING_BYTES // row_bytes)
        staging = self._staged(n_rows * row_bytes)
        for start in range(0, matrix.n_rows, n_rows):
            target = rows_out[start : start + n_rows]
            piece = staging[: len(target) * row_bytes]
            file.read_into(piece, offset + start * row_bytes, what)
            rows = piece.reshape(len(target), row_bytes)
            scale = float(source.scales[expert])
            lay_out(source.stack.type, matrix.type, rows, matrix.n_columns, target, scale)

    def _staged(self, n_bytes: int) -> Bytes:
        """Return this thread's staging, made at first use."""
        staging: Bytes | None = getattr(self._staging, "bytes", None)
        if staging is None or staging.size < n_bytes:
            staging = self._staging.bytes = np.empty(max(n_bytes, STAGING_BYTES), np.uint8)
        return staging


class FileReads:
    """Is the uploader of the host pool: brings experts from the file into slots of mapped memory.

    The source of a copy is the number of an expert (keys.py). Reads in the caller's thread: a
    Prefetcher gives it one of its own.
    """

    def __init__(self, reader: SpanReader) -> None:
        self._reader = reader

    def start(self, copies: Sequence[Copy], urgent: bool = False) -> Upload:
        """Read these experts, one after another. Returns when all are there.

        Raises ModelFileError; the bytes of all the slots are undefined then. Must hold: the slots
        are mapped, and nothing reads them.
        """
        began = time.perf_counter_ns()
        numbers = [number for number, _, _ in copies]
        for number in numbers[:N_AHEAD]:
            self._reader.will_read(number)
        for index, (number, place, n_bytes) in enumerate(copies, N_AHEAD):
            if index < len(numbers):
                self._reader.will_read(numbers[index])
            assert place.buffer.mapped, "the host pool is always mapped"
            view = place.buffer.view()[place.offset : place.offset + n_bytes]
            try:
                self._reader.read(number, view)
            except BaseException as error:
                del view
                _forget_views(error)
                raise
        return _Arrived((began, time.perf_counter_ns()))


class StagedUploads:
    """Is the uploader of slots whose experts come from the file: through staging that is mapped.

    The source of a copy is the number of an expert (keys.py). Works in the caller's thread: a
    Prefetcher gives it one of its own.
    """

    def __init__(self, reads: FileReads, uploads: Uploader, staging: Sequence[Placement]) -> None:
        """`staging` has places for the largest expert: so many are read, and then copied."""
        self._reads, self._uploads, self._staging = reads, uploads, staging

    def start(self, copies: Sequence[Copy], urgent: bool = False) -> Upload:
        """Bring these experts, some at a time. Returns when all are there.

        Raises ModelFileError and GpuErrors; the bytes of all the slots are undefined then. Must
        hold: nothing reads the slots.
        """
        began, n = time.perf_counter_ns(), len(self._staging)
        for first in range(0, len(copies), n):
            batch = list(zip(self._staging, copies[first : first + n], strict=False))
            self._reads.start([(number, place, n_bytes) for place, (number, _, n_bytes) in batch])
            staged = [(place, target, n_bytes) for place, (_, target, n_bytes) in batch]
            self._uploads.start(staged).wait()
        return _Arrived((began, time.perf_counter_ns()))


def _forget_views(error: BaseException | None) -> None:
    """Clear the frames an error went through: a kept error would keep the pool's memory by them."""
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__context__


class _Arrived:
    """Stands for reads that are over."""

    def __init__(self, interval: tuple[int, int]) -> None:
        self._interval = interval

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Do nothing: the reads are over."""

    def cancel(self) -> bool:
        return False

    def interval(self) -> tuple[int, int] | None:
        return self._interval
