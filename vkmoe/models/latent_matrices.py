"""The matrices of latent attention that lead from the compressed keys and values to the heads.

Newer files hold them in the form that kernels read. Older ones hold both in one tensor, with the
keys' part transposed: it is turned while the model loads, and kept as floats.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vkmoe.gguf_file import GgufFile, TensorInfo
from vkmoe.models.tensors import LatentTensors
from vkmoe.quants import decode, loaded_type

__all__ = ["HeadMatrices", "latent_matrices"]

Bytes = NDArray[np.uint8]
# What keys become when they are turned: a type with blocks would round them once more, so F16.
TURNED_TYPES = {"F32": "F32", "BF16": "F32"}


@dataclass(frozen=True)
class HeadMatrices:
    """One matrix for each head, behind one another: [n_heads * rows, n_columns].

    With `part` (first, end) they are a part of the rows that each head has in `tensor`.
    """

    tensor: TensorInfo
    n_heads: int
    rows: int  # of a head
    n_columns: int
    part: tuple[int, int] | None = None
    turned: bool = False

    @property
    def n_rows(self) -> int:
        return self.n_heads * self.rows

    @property
    def data_type(self) -> str:
        """The type of what `data` returns."""
        return TURNED_TYPES.get(self.tensor.type, "F16") if self.turned else self.tensor.type

    @property
    def type(self) -> str:
        """The type on the device."""
        return loaded_type(self.data_type)

    def data(self, file: GgufFile) -> Bytes:
        """Read all rows in a file's form: uint8 [n_rows, row_bytes]; a view where possible."""
        data = file.data(self.tensor.name)
        if self.part is None:
            return data.reshape(self.n_rows, -1)
        heads = data.reshape(self.n_heads, self.tensor.shape[0] // self.n_heads, -1)
        heads = heads[:, slice(*self.part)]
        if not self.turned:
            return np.ascontiguousarray(heads).reshape(self.n_rows, -1)
        kind = np.float32 if self.data_type == "F32" else np.float16
        floats = np.empty((self.n_heads, self.rows, self.n_columns), kind)
        for head, turned in zip(heads, floats, strict=True):
            values = decode(self.tensor.type, head, turned.size)
            with np.errstate(over="ignore"):
                turned[...] = values.reshape(self.n_columns, self.rows).T
        return floats.view(np.uint8).reshape(self.n_rows, -1)


def latent_matrices(tensors: LatentTensors) -> tuple[HeadMatrices, HeadMatrices]:
    """Find those of keys [n_heads * kv_rank, nope_dim], values [n_heads * value_dim, kv_rank]."""
    shape, n_heads, whole = tensors.shape, tensors.n_heads, tensors.kv_up
    rank, nope_dim, value_dim = shape.kv_rank, shape.nope_dim, shape.value_dim
    if whole is None:
        keys, values = tensors.k_up, tensors.v_up
        assert keys is not None and values is not None, tensors
        return (
            HeadMatrices(keys, n_heads, rank, nope_dim),
            HeadMatrices(values, n_heads, value_dim, rank),
        )
    values_part = (nope_dim, nope_dim + value_dim)
    return (
        HeadMatrices(whole, n_heads, rank, nope_dim, (0, nope_dim), turned=True),
        HeadMatrices(whole, n_heads, value_dim, rank, values_part),
    )
