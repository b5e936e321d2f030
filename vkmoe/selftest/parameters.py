"""The per-token parameters as the kernels read them (params.glsl), for programs run by hand."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vkmoe.gpu.program import TensorRef

__all__ = ["PARAMS", "params_words"]

PARAMS = TensorRef("params", 16)


def params_words(
    position: int = 0,
    serial: int = 0,
    table: int = 0,
    token: int = 0,
) -> NDArray[np.uint32]:
    """uint32 [16]; `table` is the address of the expert table."""
    words = np.zeros(PARAMS.n_words, np.uint32)
    words[:5] = token, position, table & 0xFFFFFFFF, table >> 32, serial
    return words
