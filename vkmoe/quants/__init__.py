"""This package has the weight types: their table, NumPy decoders, and the layouts the GPU reads.

It owns what the bytes of a block mean.  It knows nothing of files, tensors' names or devices.
"""

from __future__ import annotations

from vkmoe.quants.convert import can_load, lay_out, loaded_type
from vkmoe.quants.decode import decode
from vkmoe.quants.layouts import device_row_bytes, from_device, to_device
from vkmoe.quants.types import HAS_KERNEL, TYPES, QuantType

__all__ = [
    "HAS_KERNEL",
    "TYPES",
    "QuantType",
    "can_load",
    "decode",
    "device_row_bytes",
    "from_device",
    "lay_out",
    "loaded_type",
    "to_device",
]
