"""Places of a host pool that does not hold all experts: how many of each size, and their bytes.

Pure. Layers whose experts have the same size share their places. Each size gets its share of the
bytes, but no less than a token uses in one layer: those must be there at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence

from vkmoe.experts.decide.settings import PoolSpec
from vkmoe.facts import DeviceInfo
from vkmoe.placement.allocations import arena_bytes

__all__ = ["host_pools", "least_places", "most_places", "places_bytes"]


def host_pools(
    places: Sequence[int], span_bytes: Sequence[int], n_used: int
) -> tuple[PoolSpec, ...]:
    """The pools of a plan's `host_places`; none where all experts are in host memory or better.

    `span_bytes` are those of an expert in each MoE layer.
    """
    if not places:
        return ()
    sizes = dict.fromkeys(span_bytes)
    pools = []
    for size, capacity in zip(sizes, places, strict=True):
        layers = tuple(i for i, other in enumerate(span_bytes) if other == size)
        # A lower floor would keep places from the layer whose experts are needed together.
        floor = n_used if capacity >= n_used * len(layers) else 0
        pools.append(PoolSpec(layers, capacity, floor, size))
    return tuple(pools)


def most_places(
    device: DeviceInfo, n_bytes: int, span_bytes: Sequence[int], n_experts: int, n_used: int
) -> tuple[int, ...] | None:
    """The most places of each size, in the order of their first layers, that `n_bytes` hold.

    None if not even the least do. What allocations add is counted.
    """
    sizes = dict.fromkeys(span_bytes)
    n_of_size = [n_experts * sum(other == size for other in span_bytes) for size in sizes]
    n_all = sum(n_of_size)

    def places(share: int) -> tuple[int, ...]:
        return tuple(max(n_used, n * share // n_all) for n in n_of_size)

    fits, too_many = -1, n_all + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if places_bytes(device, places(middle), span_bytes) <= n_bytes:
            fits = middle
        else:
            too_many = middle
    return places(fits) if fits >= 0 else None


def least_places(span_bytes: Sequence[int], n_used: int) -> tuple[int, ...]:
    """Enough for one layer of each size."""
    return (n_used,) * len(set(span_bytes))


def places_bytes(device: DeviceInfo, places: Sequence[int], span_bytes: Sequence[int]) -> int:
    """Bytes of places as they are allocated, at most: one arena for each size."""
    sizes = dict.fromkeys(span_bytes)
    return sum(
        arena_bytes(device, [size] * n, size * n) for size, n in zip(sizes, places, strict=True)
    )
