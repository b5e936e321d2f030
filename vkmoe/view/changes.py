"""Checks what is to change about experts while a model is loaded, and carries it out.

How many slots are in use, which policy chooses what leaves, and what is pinned: all of it decides
where experts are, and none of it what comes out. Where it would decide which device computes an
expert it is refused. Nothing is changed unless all that was asked for can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import numpy as np

from vkmoe.choices import PolicyName
from vkmoe.engine import Engine
from vkmoe.errors import UsageError
from vkmoe.experts.decide.keys import Keys
from vkmoe.experts.store.tracker import ExpertTracker

MAX_PAIRS = 1 << 16  # in one list, far above what models have slots for


class _Change(NamedTuple):
    """Holds what was asked for and can be done."""

    capacities: list[int] | None  # slots in use, by pool
    policy: PolicyName | None
    pinned: Keys
    unpinned: Keys


def refusal(engine: Engine) -> tuple[str, str]:
    """Say why nothing can be changed about slots and pins, and what to start with; "" if it can."""
    mode = engine.plan.mode
    if engine.spec.experts is None:
        return "the model has no experts", "load a model with experts"
    if engine.device.info.layout == "file":
        return (
            "the CPU reads all experts where the file is mapped",
            "start with a GPU as --device, and --expert-slots",
        )
    return mode.unchangeable or ("", "")


def change_experts(
    engine: Engine, slots: Any, policy: Any, pin: Any, unpin: Any
) -> ExpertTracker | None:
    """Change what was asked for, None for what stays; return the tracker if anything was.

    Raises UsageError, with nothing changed.
    """
    if slots is None and policy is None and not pin and not unpin:
        return None
    tracker = engine.experts
    change = _checked(engine, tracker, slots, policy, pin or (), unpin or ())
    residency, cache = tracker.residency, tracker.cache
    assert cache is not None
    if change.unpinned.size:
        residency.unpin(change.unpinned)
    if change.capacities is not None:
        tracker.resize(change.capacities)
    if change.pinned.size:
        residency.pin(change.pinned)
    if change.policy is not None:
        residency.change_policy(change.policy)
        if cache.pool is not None:
            cache.pool.residency.change_policy(change.policy)
    return tracker


def _checked(
    engine: Engine, tracker: ExpertTracker, slots: Any, policy: Any, pin: Any, unpin: Any
) -> _Change:
    why, remedy = refusal(engine)
    has_pool = tracker.cache is not None and tracker.cache.pool is not None
    moves_in_pool = has_pool and not engine.plan.mode.has_slots
    if why and not (moves_in_pool and slots is None and not pin and not unpin):
        raise UsageError(f"this cannot be changed now: {why}", remedy)
    if policy is not None and policy not in get_args(PolicyName):
        raise UsageError(
            f"there is no policy {_shown(policy)}",
            f"take one of {', '.join(get_args(PolicyName))}",
        )
    pinned, unpinned = _keys(engine, pin, "pin"), _keys(engine, unpin, "unpin")
    if both := np.intersect1d(pinned, unpinned).tolist():
        layer, expert = divmod(both[0], tracker.residency.space.n_experts)
        raise UsageError(f"expert {expert} of layer {layer} is to be pinned and unpinned")
    capacities = None if slots is None else _capacities(tracker, slots)
    _check_pins(tracker, capacities, pinned, unpinned)
    return _Change(capacities, policy, pinned, unpinned)


def _keys(engine: Engine, pairs: Any, name: str) -> Keys:
    """Return the keys of [layer, expert] pairs. Raises UsageError."""
    space = engine.experts.residency.space
    is_list = isinstance(pairs, Sequence) and not isinstance(pairs, str | bytes)
    if not is_list or len(pairs) > MAX_PAIRS:
        raise UsageError(f"{name} is no list of pairs", "give [[layer, expert], ...]")
    found = []
    for pair in pairs:
        is_pair = isinstance(pair, Sequence) and not isinstance(pair, str | bytes)
        if not is_pair or len(pair) != 2 or not all(map(_is_int, pair)):
            raise UsageError(
                f"{name} names {_shown(pair)}, which is no pair", "give [[layer, expert], ...]"
            )
        layer, expert = pair
        if not (0 <= layer < space.n_layers and 0 <= expert < space.n_experts):
            raise UsageError(
                f"{name} names expert {_shown(expert)} of layer {_shown(layer)}; "
                f"there are {space.n_experts} in each of {space.n_layers} layers with experts",
                "count both from 0",
            )
        found.append(layer * space.n_experts + expert)
    return np.unique(np.array(found, np.int64))


def _capacities(tracker: ExpertTracker, slots: Any) -> list[int]:
    """Return how many slots each pool has if each layer has so many. Raises UsageError."""
    assert tracker.cache is not None
    pools, most = tracker.residency.locations.pools, tracker.cache.most_slots
    n_most = max(n // len(pool.layers) for pool, n in zip(pools, most, strict=True))
    n_least = max(1, *(pool.floor for pool in pools))
    if not _is_int(slots) or not n_least <= slots <= n_most:
        raise UsageError(
            f"a layer can have {n_least} to {n_most} slots, not {_shown(slots)}: memory for more "
            "was not taken at the start",
            f"start with --expert-slots {slots}" if _is_int(slots) and slots > n_most else "",
        )
    capacities = [
        min(slots * len(pool.layers), n) if slots < n_most else n
        for pool, n in zip(pools, most, strict=True)
    ]
    if not tracker.cache.room_for(capacities):
        raise UsageError(
            f"host memory has no room for the experts that leave the device with {slots} slots",
            "use more slots, or start with a larger --host-pool",
        )
    return capacities


def _check_pins(
    tracker: ExpertTracker, capacities: list[int] | None, pinned: Keys, unpinned: Keys
) -> None:
    """Raise UsageError where more experts are pinned than there are slots for them."""
    locations = tracker.residency.locations
    pins = locations.pins != 0
    pins[pinned], pins[unpinned] = True, False
    if without := pinned[locations.pool_of[pinned] < 0].tolist():
        layer = tracker.residency.space.layer(without[0])
        raise UsageError(f"layer {layer} has no slots to pin experts in", "leave it out")
    rooms = locations.capacities.tolist() if capacities is None else capacities
    for index, (pool, room) in enumerate(zip(locations.pools, rooms, strict=True)):
        n = int(np.count_nonzero(pins & (locations.pool_of == index)))
        if n > room:
            layers = f"layer {pool.layers[0]}" if len(pool.layers) == 1 else "the layers"
            raise UsageError(
                f"{n} experts would be pinned in the {room} slots of {layers}",
                "unpin some, or use more slots",
            )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """Show a value that was given, cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 64:
        return "such a large number"
    text = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= 40 else f"{text[:37]}..."
