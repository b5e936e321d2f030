"""This module has the NumPy twin of read_words.comp."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["read_words"]

UNIT_WORDS = 4  # one load


def read_words(
    words: NDArray[np.uint32], workgroup_size: int, units_per_lane: int
) -> NDArray[np.uint32]:
    """Xor what each lane reads: [n_groups * workgroup_size]; words of whole workgroups."""
    units = words.reshape(-1, units_per_lane, workgroup_size, UNIT_WORDS)
    sums: NDArray[np.uint32] = np.bitwise_xor.reduce(units, axis=(1, 3)).reshape(-1)
    return sums
