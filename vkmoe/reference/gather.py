"""This module has the NumPy twin of gather.comp."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Gathered", "gather"]


class Gathered(NamedTuple):
    """Holds memory after the copies, and the two words of each slot in the log."""

    memory: NDArray[np.uint8]
    filled: NDArray[np.uint32]  # [n_used, 2]


def gather(
    memory: NDArray[np.uint8],
    ids: NDArray[np.uint32],
    addresses: NDArray[np.uint64],
    partners: NDArray[np.uint64],
    span_bytes: int,
) -> Gathered:
    """Copy `span_bytes` from `partners` to `addresses`, where there is a partner.

    All three are [n_used]; addresses count from 256, so that 0 is no address.
    """
    after = memory.copy()
    filled = np.zeros((len(ids), 2), np.uint32)
    for slot, (expert, address, partner) in enumerate(zip(ids, addresses, partners, strict=True)):
        if partner:
            source, target = int(partner) - 256, int(address) - 256
            after[target : target + span_bytes] = memory[source : source + span_bytes]
            filled[slot] = 1 + expert
    return Gathered(after, filled)
