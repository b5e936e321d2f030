"""This module says what KV caches hold: a type for keys, one for values, and the bytes they take.

A region of a cache has the rows of one sequence: [n_kv_heads][context] rows of numbers.

- f16 and f32: the rows, one behind the other.
- q8_0: blocks of 32 numbers of a row share a scale, as in ggml; a row's last block may be shorter.
  First come the quants of all rows, int8; behind them the scales of all rows, f16, of each row
  whole 32-bit words. So a row's quants begin at a multiple of 8 bytes, and 8.5 bits hold a number.

shaders/include/kv_types.glsl reads and writes regions on GPUs, cpu/native/cache_rows.cpp on the
CPU, kernels/attention/caches.py in the twins.
"""

from __future__ import annotations

from typing import NamedTuple

from vkmoe.choices import KvType

KV_NUMBERS: dict[KvType, int] = {"f16": 0, "f32": 1, "q8_0": 2}  # as kernels number them
BLOCK_DIMS = 32  # of q8_0, numbers with a scale of their own
NUMBER_BYTES: dict[KvType, int] = {"f16": 2, "f32": 4, "q8_0": 1}
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


def row_parts(kv_type: KvType, row_dim: int) -> tuple[int, ...]:
    """Count the bytes of a row in each part of a region: of its numbers, and of its scales."""
    numbers = row_dim * NUMBER_BYTES[kv_type]
    if kv_type != "q8_0":
        return (numbers,)
    n_blocks = -(-row_dim // BLOCK_DIMS)
    return numbers, -(-n_blocks // 2) * 4


def region_bytes(kv_type: KvType, n_rows: int, row_dim: int) -> int:
    """Count the bytes of a region of `n_rows` rows, those of all kv heads together."""
    n_bytes = n_rows * sum(row_parts(kv_type, row_dim))
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT
