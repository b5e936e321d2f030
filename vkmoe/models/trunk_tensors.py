"""This module has what every token reads, as a file has it: matrices, vectors, matrices of heads.

Each says what it is on the device, so that bytes are counted and copied without knowing its name.
Of latent attention's matrices newer files have those that kernels read. Older ones have both in one
tensor, with the keys' part transposed: it is turned while the model loads, and kept as floats.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vkmoe.facts import LatentSpec
from vkmoe.gguf_file import GgufFile, TensorInfo
from vkmoe.quants import TYPES, decode, device_row_bytes

Bytes = NDArray[np.uint8]
# What keys become when they are turned: a type with blocks would round them once more, so F16.
TURNED_TYPES = {"F32": "F32", "BF16": "F32"}


@dataclass(frozen=True)
class FileVector:
    """Holds gains or biases of one tensor, or of several behind one another; f32 on the device.

    There they are `factor` times what they are in the file.
    """

    tensors: tuple[TensorInfo, ...]
    factor: float = 1.0

    @property
    def n_bytes(self) -> int:
        """Count the bytes on the device."""
        return 4 * sum(tensor.n_weights for tensor in self.tensors)

    def data(self, file: GgufFile) -> Bytes:
        """Read all as float32: uint8 [n_bytes]."""
        values = [decode(x.type, file.data(x.name), x.n_weights) for x in self.tensors]
        whole = np.concatenate(values)
        if self.factor != 1.0:
            whole = whole * np.float32(self.factor)
        return whole.view(np.uint8)

    @property
    def is_in_file(self) -> bool:
        """Say whether a file has them as they are on the device."""
        return len(self.tensors) == 1 and self.tensors[0].type == "F32" and self.factor == 1.0


def read_scales(file: GgufFile, tensor: TensorInfo | None, n: int) -> NDArray[np.float32]:
    """Read what the weights of `n` matrices are multiplied by; without a tensor that is 1."""
    if tensor is None:
        return np.ones(n, np.float32)
    return decode(tensor.type, file.data(tensor.name), n)


@dataclass(frozen=True)
class FileMatrix:
    """Takes a tensor of any number of dimensions as one matrix; the last dimension is the row."""

    tensor: TensorInfo
    scale_tensor: TensorInfo | None = field(default=None, kw_only=True)  # of all weights

    @property
    def n_columns(self) -> int:
        return self.tensor.shape[-1]

    @property
    def n_rows(self) -> int:
        return self.tensor.n_weights // self.n_columns

    @property
    def type(self) -> str:
        """Name the type of what `data` returns, which is that on the device."""
        return self.tensor.type

    @property
    def n_bytes(self) -> int:
        """Count the bytes on the device."""
        return self.n_rows * device_row_bytes(self.type, self.n_columns)

    def scale(self, file: GgufFile) -> float:
        """Read what all weights are multiplied by."""
        return float(read_scales(file, self.scale_tensor, 1)[0])

    def data(self, file: GgufFile) -> Bytes:
        """Read all rows in a file's form: uint8 [n_rows, row_bytes]; a view where possible."""
        return file.data(self.tensor.name).reshape(self.n_rows, -1)


@dataclass(frozen=True)
class HeadMatrices(FileMatrix):
    """Takes a part of the rows of each head as one matrix: [n_heads * rows, n_columns].

    The part is rows `first` to `end` of each head; `turned`: they are columns on the device.
    """

    n_heads: int
    first: int
    end: int
    turned: bool = False

    @property
    def rows(self) -> int:
        """Count the rows of a head."""
        return self.tensor.shape[-1] if self.turned else self.end - self.first

    @property
    def n_columns(self) -> int:
        return self.end - self.first if self.turned else self.tensor.shape[-1]

    @property
    def n_rows(self) -> int:
        return self.n_heads * self.rows

    @property
    def type(self) -> str:
        return TURNED_TYPES.get(self.tensor.type, "F16") if self.turned else self.tensor.type

    def scale(self, file: GgufFile) -> float:
        return 1.0 if self.turned else super().scale(file)

    def data(self, file: GgufFile) -> Bytes:
        data = file.data(self.tensor.name)
        heads = data.reshape(self.n_heads, self.tensor.shape[0] // self.n_heads, -1)
        heads = heads[:, self.first : self.end]
        if not self.turned:
            return np.ascontiguousarray(heads).reshape(self.n_rows, -1)
        scale = super().scale(file)
        kind = np.float32 if self.type == "F32" else np.float16
        floats = np.empty((self.n_heads, self.rows, self.n_columns), kind)
        for head, turned in zip(heads, floats, strict=True):
            values = decode(self.tensor.type, head, turned.size) * np.float32(scale)
            with np.errstate(over="ignore"):
                turned[...] = values.reshape(self.n_columns, self.rows).T
        return floats.view(np.uint8).reshape(self.n_rows, -1)


@dataclass(frozen=True)
class Columns(FileMatrix):
    """Takes columns `first` to `end` of a matrix as one: whole blocks of their rows."""

    first: int
    end: int

    @property
    def n_columns(self) -> int:
        return self.end - self.first

    @property
    def n_rows(self) -> int:
        return self.tensor.shape[0]

    def data(self, file: GgufFile) -> Bytes:
        kind, rows = TYPES[self.tensor.type], file.data(self.tensor.name)
        first, end = kind.row_bytes(self.first), kind.row_bytes(self.end)
        return np.ascontiguousarray(rows.reshape(self.n_rows, -1)[:, first:end])


def heads_of(
    whole: FileMatrix, n_heads: int, first: int, end: int, turned: bool = False
) -> HeadMatrices:
    """Take a part of the rows of each head of a matrix (`HeadMatrices`)."""
    scale = whole.scale_tensor
    return HeadMatrices(whole.tensor, n_heads, first, end, turned, scale_tensor=scale)


def split_heads(whole: FileMatrix, spec: LatentSpec) -> tuple[HeadMatrices, HeadMatrices]:
    """Take keys and values of all heads out of the one tensor in which older files have them.

    `whole` is [n_heads * (nope_dim + value_dim), kv_rank]. Returns matrices of keys [n_heads *
    kv_rank, nope_dim] and of values [n_heads * value_dim, kv_rank].
    """
    border = spec.nope_dim
    return (
        heads_of(whole, spec.n_heads, 0, border, turned=True),
        heads_of(whole, spec.n_heads, border, border + spec.value_dim),
    )
