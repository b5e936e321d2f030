"""This module has the NumPy twins of what moves or reads bytes: gather.comp, read_words.comp."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

UNIT_WORDS = 4  # one load of read_words


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


def read_words(
    words: NDArray[np.uint32], workgroup_size: int, units_per_lane: int
) -> NDArray[np.uint32]:
    """Xor what each lane reads: [n_groups * workgroup_size]; words of whole workgroups."""
    units = words.reshape(-1, units_per_lane, workgroup_size, UNIT_WORDS)
    sums: NDArray[np.uint32] = np.bitwise_xor.reduce(units, axis=(1, 3)).reshape(-1)
    return sums
