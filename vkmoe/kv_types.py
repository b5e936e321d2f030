"""This module says what KV caches hold: a type for keys, one for values, and the bytes they take.

A region of a cache has the rows of one sequence: [n_kv_heads][context] rows of numbers.

- f16 and f32: the rows, one behind the other.
- q8_0, q5_1, q4_0: blocks of 32 numbers of a row share a scale, as in ggml; a row's last block may
  be shorter. First come the quants of all rows; behind them what the blocks of all rows share, of
  each row whole 32-bit words. A number is scale * quant (q8_0: int8), scale * (quant - 8) (q4_0: 4
  bits), or scale * quant + minimum (q5_1: 5 bits). So 8.5, 4.5 and 6 bits hold a number.

Rows of q5_1 and q4_0 are transformed before they are rounded: every block by the Walsh-Hadamard
matrix over the root of its size. That spreads what few large numbers of a block are over all of it.
The matrix is its own inverse and turns no product of two vectors into another: queries are
transformed as keys are, and sums of values are transformed back.

shaders/include/kv_types.glsl reads and writes regions on GPUs, cpu/native/cache_rows.cpp on the
CPU, kernels/attention/caches.py in the twins.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from vkmoe.choices import KvType

# As kernels number them.
KV_NUMBERS: dict[KvType, int] = {"f16": 0, "f32": 1, "q8_0": 2, "q5_1": 3, "q4_0": 4}
BLOCK_DIMS = 32  # numbers with a scale of their own
QUANT_BITS: dict[KvType, int] = {"f16": 16, "f32": 32, "q8_0": 8, "q5_1": 4, "q4_0": 4}
# What a block shares: scales, f16; of q5_1 a minimum too, and the fifth bits of all its quants.
BLOCK_BYTES: dict[KvType, int] = {"q8_0": 2, "q5_1": 8, "q4_0": 2}
TRANSFORMED: frozenset[KvType] = frozenset({"q5_1", "q4_0"})
ALIGNMENT = 16  # bytes, of a region


class KvTypes(NamedTuple):
    """Names the types of a model's caches. Rows that are key and value at once have equal ones."""

    keys: KvType
    values: KvType

    def __str__(self) -> str:
        return self.keys if self.keys == self.values else f"K {self.keys}, V {self.values}"


def both(kv_type: KvType) -> KvTypes:
    """Give keys and values the same type."""
    return KvTypes(kv_type, kv_type)


def hadamard_block(kv_type: KvType, *widths: int) -> int:
    """Count the numbers that are transformed together before they are rounded; 1: none are.

    They are a power of two that divides all `widths` of parts of a row, at most those of a block.
    """
    return gcd(BLOCK_DIMS, *widths) if kv_type in TRANSFORMED else 1


def row_parts(kv_type: KvType, row_dim: int) -> tuple[int, ...]:
    """Count the bytes of a row in each part of a region: of its numbers, and of its scales."""
    numbers = row_dim * QUANT_BITS[kv_type] // 8
    if kv_type not in BLOCK_BYTES:
        return (numbers,)
    n_blocks = -(-row_dim // BLOCK_DIMS)
    return numbers, -(-n_blocks * BLOCK_BYTES[kv_type] // 4) * 4


def region_bytes(kv_type: KvType, n_rows: int, row_dim: int) -> int:
    """Count the bytes of a region of `n_rows` rows, those of all kv heads together."""
    n_bytes = n_rows * sum(row_parts(kv_type, row_dim))
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT
