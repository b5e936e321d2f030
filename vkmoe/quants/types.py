"""This module is the table of weight types: names, GGUF ids and block sizes.

It does not know what is inside a block. The ids and sizes are those of the GGUF format; a test
compares them with the `gguf` package, which takes too long to import for a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class QuantType(NamedTuple):
    """Describes a type: `block_weights` numbers are stored in `block_bytes` bytes.

    `has_kernel` says that weights may have it: the others are tables, or of ggml alone.
    """

    name: str
    ggml_id: int
    block_weights: int
    block_bytes: int
    has_kernel: bool = False

    def row_bytes(self, columns: int) -> int:
        """Count the bytes of a row of `columns` weights, which must be a multiple of the block."""
        assert columns % self.block_weights == 0, (self.name, columns)
        return columns // self.block_weights * self.block_bytes


_ROWS = (
    QuantType("F32", 0, 1, 4, True),
    QuantType("F16", 1, 1, 2, True),
    QuantType("Q4_0", 2, 32, 18, True),
    QuantType("Q4_1", 3, 32, 20, True),
    QuantType("Q5_0", 6, 32, 22, True),
    QuantType("Q5_1", 7, 32, 24, True),
    QuantType("Q8_0", 8, 32, 34, True),
    QuantType("Q8_1", 9, 32, 40),
    QuantType("Q2_K", 10, 256, 84, True),
    QuantType("Q3_K", 11, 256, 110, True),
    QuantType("Q4_K", 12, 256, 144, True),
    QuantType("Q5_K", 13, 256, 176, True),
    QuantType("Q6_K", 14, 256, 210, True),
    QuantType("Q8_K", 15, 256, 292),
    QuantType("IQ2_XXS", 16, 256, 66, True),
    QuantType("IQ2_XS", 17, 256, 74, True),
    QuantType("IQ3_XXS", 18, 256, 98, True),
    QuantType("IQ1_S", 19, 256, 50, True),
    QuantType("IQ4_NL", 20, 32, 18, True),
    QuantType("IQ3_S", 21, 256, 110, True),
    QuantType("IQ2_S", 22, 256, 82, True),
    QuantType("IQ4_XS", 23, 256, 136, True),
    QuantType("I8", 24, 1, 1),
    QuantType("I16", 25, 1, 2),
    QuantType("I32", 26, 1, 4),
    QuantType("I64", 27, 1, 8),
    QuantType("F64", 28, 1, 8),
    QuantType("IQ1_M", 29, 256, 56, True),
    QuantType("BF16", 30, 1, 2, True),
    QuantType("TQ1_0", 34, 256, 54, True),
    QuantType("TQ2_0", 35, 256, 66, True),
    QuantType("MXFP4", 39, 32, 17, True),
    QuantType("NVFP4", 40, 64, 36, True),
    QuantType("Q1_0", 41, 128, 18, True),
    QuantType("Q2_0", 42, 64, 18, True),  # of llama.cpp; the `gguf` package does not know it
)

TYPES: Mapping[str, QuantType] = MappingProxyType({row.name: row for row in _ROWS})
BY_ID: Mapping[int, QuantType] = MappingProxyType({row.ggml_id: row for row in _ROWS})
# Types that ggml no longer has, and the type that holds the same weights (ggml.h).
FORMER: Mapping[int, tuple[str, str]] = MappingProxyType(
    {
        **{4: ("Q4_2", "Q4_0"), 5: ("Q4_3", "Q4_1")},
        **{31: ("Q4_0_4_4", "Q4_0"), 32: ("Q4_0_4_8", "Q4_0"), 33: ("Q4_0_8_8", "Q4_0")},
        **{
            36: ("IQ4_NL_4_4", "IQ4_NL"),
            37: ("IQ4_NL_4_8", "IQ4_NL"),
            38: ("IQ4_NL_8_8", "IQ4_NL"),
        },
    }
)
HAS_KERNEL = frozenset(row.name for row in _ROWS if row.has_kernel)
