"""This module writes GGUF files, one tensor at a time, through the `gguf` package.

It owns how Python values become metadata values. vkmoe itself only reads such files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast

import gguf
import numpy as np
import numpy.typing as npt

from vkmoe.gguf_file.header import TensorInfo
from vkmoe.quants.types import TYPES

MetadataValue: TypeAlias = "bool | int | float | str | Sequence[str] | Sequence[int]"
TensorData: TypeAlias = Callable[[TensorInfo], npt.NDArray[np.uint8]]


def raw_type(type_name: str) -> gguf.GGMLQuantizationType:
    """Name a type as writers of the `gguf` package take it, which does not know Q2_0 yet."""
    kind = TYPES[type_name]
    if type_name in gguf.GGMLQuantizationType.__members__:
        return gguf.GGMLQuantizationType[type_name]
    number = cast(gguf.GGMLQuantizationType, kind.ggml_id)
    gguf.GGML_QUANT_SIZES[number] = (kind.block_weights, kind.block_bytes)
    return number


def describe_tensor(name: str, type_name: str, shape: Sequence[int]) -> TensorInfo:
    """The TensorInfo of a tensor to be written; `shape` is row-major."""
    quant_type = TYPES[type_name]
    n_rows = int(np.prod(shape[:-1], dtype=np.int64))
    return TensorInfo(name, type_name, tuple(shape), n_rows * quant_type.row_bytes(shape[-1]))


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, MetadataValue],
    tensors: Sequence[TensorInfo],
    data: TensorData | None,
) -> None:
    """Write a GGUF version 3 file: `data(tensor)` gives each tensor's bytes when its turn comes.

    Without `data` the file has its whole size and a hole in place of the tensors: all of their
    bytes are read as 0, and none takes room on a disk that knows holes.

    Whole numbers become uint32, floats float32, lists of numbers arrays of int32.
    `general.architecture` must be in the metadata.  The same input gives the same bytes.
    """
    writer = gguf.GGUFWriter(path, str(metadata["general.architecture"]))
    for key, value in metadata.items():
        if key != "general.architecture":
            _add(writer, key, value)
    for tensor in tensors:
        quant_type = TYPES[tensor.type]
        byte_shape = (*tensor.shape[:-1], quant_type.row_bytes(tensor.shape[-1]))
        writer.add_tensor_info(
            tensor.name, byte_shape, np.dtype(np.uint8), tensor.n_bytes, raw_type(tensor.type)
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if data is not None:
            for tensor in tensors:
                contents = data(tensor)
                assert contents.nbytes == tensor.n_bytes, (tensor, contents.nbytes)
                writer.write_tensor_data(contents)
    finally:
        writer.close()
    if data is None:
        aligned = gguf.GGUFWriter.ggml_pad
        begin = aligned(os.path.getsize(path), gguf.GGUF_DEFAULT_ALIGNMENT)
        n_bytes = sum(aligned(each.n_bytes, gguf.GGUF_DEFAULT_ALIGNMENT) for each in tensors)
        os.truncate(path, begin + n_bytes)


def _add(writer: gguf.GGUFWriter, key: str, value: MetadataValue) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))
