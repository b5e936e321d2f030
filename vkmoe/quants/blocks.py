"""What the decoders and quantisers of all block types share: halves, nibbles, and two code books.

Owns no type of its own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = [
    "E2M1_VALUES",
    "IQ4_VALUES",
    "Bytes",
    "Floats",
    "exponent_scale",
    "half_at",
    "half_bytes",
    "join_nibbles",
    "split_nibbles",
]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# The code book of IQ4_NL and IQ4_XS: close together near zero, where most weights are.
IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
# Twice the values of E2M1 (OCP Microscaling Formats 1.0, section 5.3.3): sign, exponent, mantissa.
E2M1_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def half_at(blocks: Bytes, at: int) -> Floats:
    """The f16 at byte `at` of every block, as float32 [n, 1]."""
    halves: npt.NDArray[np.float16] = np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)
    return halves.astype(np.float32)


def half_bytes(values: Floats) -> Bytes:
    """f16 bytes of [n] as [n, 2]."""
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def split_nibbles(packed: Bytes) -> Bytes:
    """[..., 16] bytes to [..., 32]: the low nibbles, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def join_nibbles(values: Bytes) -> Bytes:
    """[..., 32] values below 16 to [..., 16] bytes: `split_nibbles` backwards."""
    packed: Bytes = values[..., :16] | (values[..., 16:] << np.uint8(4))
    return packed


def exponent_scale(exponents: Bytes) -> Floats:
    """2^(e - 128) for the exponent bytes e of MXFP4: half of E8M0, for the doubled values.

    0 and 1 are below the normal float32; 255, which E8M0 calls NaN, is 2^127, as in llama.cpp.
    """
    wide = exponents.astype(np.uint32)
    subnormal = np.uint32(0x200000) << (wide & np.uint32(1))
    bits = np.where(wide < 2, subnormal, (np.maximum(wide, 1) - np.uint32(1)) << np.uint32(23))
    return bits.astype(np.uint32).view(np.float32)
