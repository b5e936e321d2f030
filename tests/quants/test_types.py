"""The type table against the `gguf` package."""

from __future__ import annotations

import gguf
import pytest
from gguf.constants import GGML_QUANT_SIZES

from vkmoe.quants import HAS_KERNEL, TYPES
from vkmoe.quants.types import BY_ID


@pytest.mark.parametrize("theirs", [kind for kind in gguf.GGMLQuantizationType if kind <= 41])
def test_every_type_of_the_package_is_known_alike(theirs: gguf.GGMLQuantizationType) -> None:
    ours = TYPES[theirs.name]
    assert ours.ggml_id == theirs.value
    assert (ours.block_weights, ours.block_bytes) == GGML_QUANT_SIZES[theirs]
    assert BY_ID[theirs.value] is ours


def test_types_with_kernels_are_types() -> None:
    """All but tables of whole numbers, doubles, and what ggml makes of activations."""
    others = {"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"}
    assert set(TYPES) - HAS_KERNEL == others


def test_a_type_that_the_package_does_not_know() -> None:
    assert TYPES["Q2_0"] == BY_ID[42] == ("Q2_0", 42, 64, 2 + 64 // 4, True)  # ggml-common.h


def test_row_bytes() -> None:
    assert TYPES["Q4_K"].row_bytes(2048) == 8 * 144
    assert TYPES["F16"].row_bytes(3) == 6
    with pytest.raises(AssertionError):
        TYPES["Q4_K"].row_bytes(128)
