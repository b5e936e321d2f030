"""Says what layers keep of the sequences that they work on.

Full attention keeps rows of every position. A layer that sees a window keeps rows of the last
positions in a ring: what it takes ends there, whatever the text. A recurrent layer keeps a state.
The last two hold for the latest positions alone, so a text that goes back further needs a copy.
Pure; the memory itself is owned by kv_caches.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vkmoe.facts import (
    RING_ROWS,
    AttentionSpec,
    DeltaNetSpec,
    LatentSpec,
    MemoryPlan,
    Mixer,
    ModelSpec,
)
from vkmoe.kv_types import KvTypes, region_bytes, row_parts


class Kept(NamedTuple):
    """Says for how much layers have room, for each sequence."""

    n_positions: int
    kv_types: KvTypes
    n_versions: int = 1  # of a recurrent state, behind the last positions
    margin: int = 0  # positions of a ring beside those of its window, at least; 0: no rings

    @classmethod
    def by(cls, plan: MemoryPlan, n_positions: int) -> Kept:
        """Return what a plan says, with so many positions."""
        return cls(n_positions, plan.kv_types, plan.n_versions, plan.margin)


def ring_of(mixer: Mixer, margin: int) -> int:
    """Count the places of a layer's ring; 0: each position has a place of its own.

    A batch adds its rows before any of them is read, so the margin is at least that of a batch.
    They are a power of two, so that kernels find a place by the last bits of a position.
    """
    window = mixer.window if isinstance(mixer, AttentionSpec) else 0
    return 1 << (window + margin - 1).bit_length() if window and margin else 0


def state_bytes(mixer: Mixer, kept: Kept) -> tuple[int, ...]:
    """Count the bytes of each cache of a layer, for one sequence.

    They are of keys and of values, or of the compressed rows that are both, or of the rows that a
    recurrent layer projected last and of its states, f32. Layers that see others' have none.
    """
    if isinstance(mixer, DeltaNetSpec):
        states = 4 * kept.n_versions * mixer.n_heads * mixer.head_dim**2
        return 4 * RING_ROWS * mixer.n_channels, states
    if isinstance(mixer, AttentionSpec) and not mixer.own_kv:
        return ()
    n_places = min(kept.n_positions, ring_of(mixer, kept.margin) or kept.n_positions)
    if isinstance(mixer, LatentSpec):
        return (region_bytes(kept.kv_types.keys, n_places, mixer.row),)
    n_rows = n_places * mixer.n_kv_heads
    return tuple(region_bytes(kv_type, n_rows, mixer.head_dim) for kv_type in kept.kv_types)


def largest_cache(spec: ModelSpec, kept: Kept) -> int:
    """Count the bytes of the largest cache of any layer, for one sequence."""
    return max(n_bytes for mixer in spec.mixers for n_bytes in state_bytes(mixer, kept))


def holds_all(mixer: Mixer, kept: Kept) -> bool:
    """Say whether texts can go back to any of their positions with what a layer keeps."""
    if isinstance(mixer, DeltaNetSpec):
        return False
    if isinstance(mixer, AttentionSpec) and not mixer.own_kv:
        return True
    return not 0 < ring_of(mixer, kept.margin) < kept.n_positions


def copied_bytes(spec: ModelSpec, kept: Kept) -> int:
    """Count the bytes of a copy of all that does not hold for earlier positions; 0: all does."""
    kinds = spec.n_layers_of.items()
    return sum(n * _copied_bytes(mixer, kept) for mixer, n in kinds if not holds_all(mixer, kept))


def _copied_bytes(mixer: Mixer, kept: Kept) -> int:
    if not isinstance(mixer, AttentionSpec):
        return sum(state_bytes(mixer, kept._replace(n_versions=1)))
    parts = (part for kind in kept.kv_types for part in row_parts(kind, mixer.head_dim))
    return (mixer.window - 1) * mixer.n_kv_heads * sum(parts)


def oldest_start(spec: ModelSpec, kept: Kept, last: int) -> int:
    """Return the first position at which a text whose last one this is can go on without a copy."""
    return max(0, *_oldest_starts(spec, kept, last))


def _oldest_starts(spec: ModelSpec, kept: Kept, last: int) -> Iterator[int]:
    for mixer in spec.mixers:
        ring = ring_of(mixer, kept.margin)
        if isinstance(mixer, DeltaNetSpec):
            yield last + 2 - kept.n_versions
        elif isinstance(mixer, AttentionSpec) and ring and last >= ring:
            yield last - (ring - mixer.window)
        else:
            yield 0
