"""This package has the weight types: their table, what they are decoded and converted
to, and the layouts the GPU reads.

It knows nothing of files, tensors' names or devices.
"""

from __future__ import annotations

from vkmoe.quants.convert import can_load, decode, lay_out, loaded_type
from vkmoe.quants.layouts import device_row_bytes, to_device
from vkmoe.quants.types import FOR_THREADS, HAS_KERNEL, TYPES

__all__ = [
    "FOR_THREADS",
    "HAS_KERNEL",
    "TYPES",
    "can_load",
    "decode",
    "device_row_bytes",
    "lay_out",
    "loaded_type",
    "to_device",
]
