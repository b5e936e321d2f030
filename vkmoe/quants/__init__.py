"""This package has the weight types: their table, what they are decoded to, and the layouts the GPU
reads.

It knows nothing of files, tensors' names or devices.
"""

from __future__ import annotations

from vkmoe.quants.decoding import decode
from vkmoe.quants.layouts import device_row_bytes, lay_out, to_device
from vkmoe.quants.types import HAS_KERNEL, TYPES

__all__ = [
    "HAS_KERNEL",
    "TYPES",
    "decode",
    "device_row_bytes",
    "lay_out",
    "to_device",
]
