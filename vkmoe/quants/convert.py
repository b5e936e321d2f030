"""This module decodes weights of any type to float32, and converts them while they are loaded.

Types without kernels become Q8_0. Every block is rounded by itself, so that the bytes do not depend
on how many rows are converted at a time, nor on which thread does it. What the bits of a block mean
is known to the `gguf` package; the kernels are judged by what it decodes.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from vkmoe.errors import UnsupportedModelError
from vkmoe.quants.layouts import device_row_bytes, to_device
from vkmoe.quants.types import HAS_KERNEL, TYPES, Bytes, Floats

CONVERTED_TYPE = "Q8_0"
# Weights converted, and decoded, at a time: what that takes stays in the cache.
CHUNK_WEIGHTS, _DECODED_WEIGHTS = 1 << 16, 1 << 18
_WHOLE_NUMBERS = {"I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}  # tables, not weights
_NUMBERS = {**_WHOLE_NUMBERS, "F16": "<f2", "F32": "<f4", "F64": "<f8"}


def decode(type_name: str, data: Bytes, n_weights: int) -> Floats:
    """Decode `n_weights` weights from `data` (uint8, any shape) to float32 [n_weights].

    Raises UnsupportedModelError for a type that the `gguf` package does not decode.
    NaN and infinite scales are decoded as they are, without warnings.
    """
    kind = TYPES[type_name]
    flat = np.ascontiguousarray(data).reshape(-1)
    assert flat.dtype == np.uint8, flat.dtype
    assert flat.size == kind.row_bytes(n_weights), (type_name, flat.size, n_weights)
    with np.errstate(all="ignore"):
        if type_name == "BF16":  # the upper half of a float32
            return (flat.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
        if type_name in _NUMBERS:
            return flat.view(_NUMBERS[type_name]).astype(np.float32)
        out = np.empty(n_weights, np.float32)
        step = max(1, _DECODED_WEIGHTS // kind.block_weights)
        for start in range(0, n_weights // kind.block_weights, step):
            blocks = slice(start * kind.block_bytes, (start + step) * kind.block_bytes)
            weights = slice(start * kind.block_weights, (start + step) * kind.block_weights)
            out[weights] = _decoded_blocks(type_name, flat[blocks])
    return out


def _decoded_blocks(type_name: str, data: Bytes) -> Floats:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        # As one row: of several it would take 16 at a time, however short.
        row = dequantize(data[None], GGMLQuantizationType(TYPES[type_name].ggml_id))
    except (NotImplementedError, ValueError):  # not in this version of the package
        raise UnsupportedModelError(
            f"weights of type {type_name} cannot be decoded",
            "use a file with " + ", ".join(sorted(HAS_KERNEL)),
        ) from None
    return np.asarray(row, np.float32).reshape(-1)


def loaded_type(file_type: str) -> str:
    """Name the type that weights of `file_type` have on the device."""
    return file_type if file_type in HAS_KERNEL else CONVERTED_TYPE


@cache
def can_load(file_type: str) -> bool:
    """Say whether weights of this type can be used, as they are or converted."""
    if file_type in HAS_KERNEL or file_type in _WHOLE_NUMBERS:
        return file_type in HAS_KERNEL
    block = TYPES[file_type]
    try:
        decode(file_type, np.zeros(block.block_bytes, np.uint8), block.block_weights)
    except UnsupportedModelError:
        return False
    return True


def lay_out(
    file_type: str, kind: str, rows: Bytes, columns: int, out: Bytes | None = None
) -> Bytes:
    """Lay out file rows, uint8 [n, row_bytes], as the device has them in `kind`; see `to_device`.

    `kind` is the file's type, Q8_0 or F32. NaN, infinite and enormous weights make a block NaN.
    """
    if kind == file_type:
        return to_device(kind, rows, columns, out=out)
    assert kind in (CONVERTED_TYPE, "F32"), (file_type, kind)
    if out is None:
        out = np.empty((len(rows), device_row_bytes(kind, columns)), np.uint8)
    step = max(1, CHUNK_WEIGHTS // columns)
    for start in range(0, len(rows), step):
        piece = rows[start : start + step]
        encoded = _encoded(file_type, kind, piece, columns).reshape(len(piece), -1)
        to_device(kind, encoded, columns, out=out[start : start + step])
    return out


def _encoded(file_type: str, kind: str, rows: Bytes, columns: int) -> Bytes:
    """Encode rows of a file as a file of type `kind` would have them, in any shape."""
    if file_type == "Q5_0" and kind == CONVERTED_TYPE:
        return _q5_0_as_q8_0(rows)
    values = decode(file_type, rows, len(rows) * columns)
    return values.view(np.uint8) if kind == "F32" else round_q8_0(values)


def _q5_0_as_q8_0(rows: Bytes) -> Bytes:
    """Convert Q5_0 to Q8_0 exactly: both are d * q, and five bits with a sign fit into eight.

    A block is d, the 32 upper bits, and 16 bytes with the lower bits of weights i and 16 + i.
    """
    blocks = np.ascontiguousarray(rows).reshape(-1, TYPES["Q5_0"].block_bytes)
    out = np.empty((len(blocks), TYPES["Q8_0"].block_bytes), np.uint8)
    out[:, :2] = blocks[:, :2]
    quants = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    quants <<= np.uint8(4)
    quants[:, :16] |= blocks[:, 6:] & np.uint8(15)
    quants[:, 16:] |= blocks[:, 6:] >> np.uint8(4)
    np.subtract(quants, np.uint8(16), out=out[:, 2:])  # modulo 256: two's complement
    return out


def round_q8_0(weights: Floats) -> Bytes:
    """Round float32 [n * 32] to Q8_0, uint8 [n, 34]: each weight to the nearest multiple of d.

    d is the largest magnitude / 127, rounded to a half that is large enough: an error is at most
    d / 2. Searching for a better d (tools/quantise) takes ten times as long.
    """
    scaled = np.abs(weights)
    largest = np.maximum.reduceat(scaled, np.arange(0, weights.size, 32))
    with np.errstate(all="ignore"):
        d = (largest / np.float32(127)).astype("<f2")
        d.view("<u2")[...] += d.astype(np.float32) * np.float32(127.499) < largest
        step = d.astype(np.float32)[:, None]
        inverse = np.where(step == 0, np.float32(0), 1 / step)
        quants = np.multiply(weights.reshape(-1, 32), inverse, out=scaled.reshape(-1, 32))
        np.rint(quants, out=quants)
    if not np.isfinite(d).all():
        np.nan_to_num(quants, copy=False, posinf=0, neginf=0)
    out = np.empty((len(d), 34), np.uint8)
    out[:, :2] = d[:, None].view(np.uint8)
    out[:, 2:] = quants.astype(np.int8).view(np.uint8)
    return out
