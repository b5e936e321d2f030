"""Describes an expert cache as plain data: its slots, what was chosen for it, whether it suffices.

Made from the config and the memory plan, for the engine and for the simulator. Whether slots fit is
decided by placement/experts.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vkmoe.choices import Executor, PolicyName, SlotSharing
from vkmoe.config import EngineConfig, Pins
from vkmoe.errors import UsageError
from vkmoe.facts import CacheSizing, ExpertSpec, MemoryPlan, SizingStatus

MOST_LANDING = 2  # slots of a layer in which experts land while they are read
_GIB, _MIB = 1 << 30, 1 << 20
_MORE_ROOM = "lower --ctx-size, close other programs that use the GPU, or take a smaller model"


@dataclass(frozen=True)
class PoolSpec:
    """Describes slots of one size that the experts of some layers share."""

    layers: tuple[int, ...]  # MoE layers
    capacity: int  # slots
    floor: int  # slots a layer is left with when other layers want more
    slot_bytes: int

    def n_slots(self, n_landing: int) -> int:
        """Return how many slots there are, with `n_landing` for each layer to land in."""
        return self.capacity + n_landing * len(self.layers)


@dataclass(frozen=True)
class CacheSettings:
    """Holds all that decides where experts are: equal settings and routing, equal decisions."""

    policy: PolicyName
    pins: tuple[Pins, ...] = ()  # with their numbers; those chosen by use come last
    prefetches: bool = True  # what is forecast, where a copy is there before it is missed
    executor: Executor = "fused"  # what is fetched early: of a token to come, or of the next layer
    # Fused: the token to come that a copy begun now is there for; 2 if it overlaps one.
    lag: int = 1
    fills: bool = False  # all slots before the first token, with whatever experts
    exchanges: bool = False  # not all experts have a home: those in slots alone do not leave


def make_pools(
    slots: Sequence[int], slot_bytes: Sequence[int], n_used: int, allocation: SlotSharing
) -> tuple[PoolSpec, ...]:
    """Make pools of `slots[layer]` slots of `slot_bytes[layer]` bytes; layers without get none.

    () where no layer has slots.

    "layer": each layer keeps its own. "global": layers whose experts have the same size share
    theirs, each with a floor of `n_used` slots, or an even share where there are fewer.
    """
    if not slots:
        return ()
    if allocation == "layer":
        sized = enumerate(zip(slots, slot_bytes, strict=True))
        return tuple(PoolSpec((layer,), n, 0, size) for layer, (n, size) in sized if n)
    pools = []
    for size, layers in _by_size(slot_bytes):
        if capacity := sum(slots[layer] for layer in layers):
            pools.append(PoolSpec(layers, capacity, min(n_used, capacity // len(layers)), size))
    return tuple(pools)


def host_pools(
    slots: Sequence[int], span_bytes: Sequence[int], n_used: int
) -> tuple[PoolSpec, ...]:
    """Make the pools of a plan's `host_slots`; none where all are in host memory or better.

    `span_bytes` are those of an expert in each MoE layer.
    """
    pools = []
    for capacity, (size, layers) in zip(slots, _by_size(span_bytes) if slots else (), strict=True):
        # A lower floor would keep slots from the layer whose experts are needed together.
        floor = n_used if capacity >= n_used * len(layers) else 0
        pools.append(PoolSpec(layers, capacity, floor, size))
    return tuple(pools)


def _by_size(span_bytes: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """List the sizes of experts, in the order of the first layers, and the layers of each."""
    sizes = dict.fromkeys(span_bytes)
    return [(size, tuple(i for i, n in enumerate(span_bytes) if n == size)) for size in sizes]


# ----- what was chosen for it -----


def copies_overlap(config: EngineConfig, has_queue: bool) -> bool:
    """Say whether experts are copied while tokens are computed: where there is a queue for it."""
    return has_queue if config.expert_copies is None else config.expert_copies == "overlap"


def cache_settings(
    config: EngineConfig,
    name: str,
    experts: ExpertSpec | None,
    plan: MemoryPlan,
    overlaps: bool = False,
) -> CacheSettings:
    """Choose what decides about slots; `overlaps`: experts are copied beside tokens.

    `name` is the model's, for messages. Without slots nothing is pinned, but guesses may serve a
    small host pool. Raises UsageError for an id that the model does not have, for more residents
    than slots, and for a --moe-warmpin that residents leave no slot.
    """
    settings = CacheSettings(config.expert_policy)
    if experts is None:
        return settings
    if unknown := [expert for expert in config.resident_ids if expert >= experts.n_experts]:
        raise UsageError(
            f"--expert-resident-ids names expert {unknown[0]}; "
            f"{name} has {experts.n_experts} in each layer, from 0 to {experts.n_experts - 1}",
            "leave that id out",
        )
    if not plan.mode.can_miss:
        return settings
    pins = _pins(config, experts.n_used, plan.expert_slots)
    if not plan.mode.has_slots and not plan.host_slots:
        return settings
    if plan.mode.has_slots:
        settings = replace(
            settings,
            pins=pins,
            fills=plan.mode.by_cpu or plan.exchanges,
            exchanges=plan.exchanges,
        )
    # A copy that begins between two tokens and overlaps one is there for the one after it.
    lag = 2 if overlaps else 1
    prefetches = config.moe_predict_prefetch is not False
    return replace(settings, prefetches=prefetches, executor=plan.executor, lag=lag)


def _pins(config: EngineConfig, n_used: int, slots: Sequence[int]) -> tuple[Pins, ...]:
    """Give the pins that were asked for their numbers, and check that there is room for them."""
    smallest, n_resident, pins = min(slots, default=0), 0, []
    if (residents := config.residents) is not None:
        n_resident = residents.n
        if n_resident > smallest:
            raise _no_room(config, n_resident, smallest)
        pins.append(residents)
    if (warm := config.warm_pins) is not None:
        if warm.n and slots:
            _check_room_for_warm(config, n_resident, slots)
        pins.append(replace(warm, n=warm.n or n_used))
    return tuple(pins)


def _check_room_for_warm(config: EngineConfig, n_resident: int, slots: Sequence[int]) -> None:
    """Check that pins and residents take at most half of a layer's slots; of all, if shared."""
    shared = config.expert_allocation == "global"
    room = sum(slots) // 2 - n_resident * len(slots) if shared else max(slots) // 2 - n_resident
    if room > 0:
        return
    kept = ""
    if config.residents is not None:
        verb = "is" if n_resident == 1 else "are"
        kept = f", and {_experts(n_resident)} {verb} kept"
    raise UsageError(
        f"--moe-warmpin {config.moe_warmpin} has no slots left: a layer has {max(slots)}, of which "
        f"at most half are pinned{kept}",
        "keep fewer experts, give more slots, or leave out --moe-warmpin",
    )


def _no_room(config: EngineConfig, n_resident: int, smallest: int) -> UsageError:
    remedy = "there are no slots: leave that out"
    if smallest:
        remedy = f"keep at most {smallest}"
    elif config.expert_cache is not None:
        remedy = "there are no slots: give a larger --expert-cache"
    return UsageError(
        f"{_experts(n_resident)} {'does' if n_resident == 1 else 'do'} not fit in the "
        f"{smallest} slot{'' if smallest == 1 else 's'} of a layer",
        remedy,
    )


def _experts(n: int) -> str:
    return f"the {n} expert{'' if n == 1 else 's'} of --expert-resident-ids"


# ----- whether it is large enough -----


def recommended_slots(n_experts: int, n_used: int) -> int:
    """Return the slots per layer from which caching works well: twice the experts a token uses.

    Measured on 20 models in "Not All Models Suit Expert Offloading" (arXiv:2505.16056).
    """
    return min(n_experts, 2 * n_used)


def size_cache(
    slots: Sequence[int], slot_bytes: Sequence[int], n_experts: int, n_used: int, asked: str = ""
) -> CacheSizing:
    """Judge `slots[layer]` slots of `slot_bytes[layer]` bytes (MoE layers).

    No layers at all: a model without experts. `asked` is the flag by which the user chose the
    slots, empty if the plan did.
    """
    smallest, recommended = min(slots, default=0), recommended_slots(n_experts, n_used)
    usual = sum(slots) // max(1, len(slots))
    status: SizingStatus = "ok"
    remedy = ""
    if not slots:
        status, remedy = "empty", f"leave out {asked}" if asked else ""
    elif usual < recommended:
        status = "below_recommended" if usual else "budget_exhausted"
        remedy = f"raise {asked}" if asked else _MORE_ROOM
    return CacheSizing(
        status,
        n_slots_smallest_layer=smallest,
        n_slots_largest_layer=max(slots, default=0),
        n_slots=sum(slots),
        n_total=n_experts * len(slots),
        n_experts=n_experts,
        n_bytes=sum(n * size for n, size in zip(slots, slot_bytes, strict=True)),
        recommended=recommended,
        ratio=usual / recommended if recommended else 0.0,
        remedy=remedy,
    )


def sizing_line(sizing: CacheSizing) -> str:
    """Say in one line how much is cached, what is recommended, the status and the remedy."""
    if sizing.status == "empty":
        advice = f", so {sizing.remedy}" if sizing.remedy else ""
        return f"expert cache: the model has no experts{advice}: empty"
    found = f"{_share(sizing)}; recommended at least {sizing.recommended}"
    verdict = sizing.status.replace("_", " ")
    if sizing.status == "below_recommended":
        verdict += f" ({sizing.ratio:.2f} of it)"
    remedy = f"; to change that, {sizing.remedy}" if sizing.remedy else ""
    return f"expert cache: {found}: {verdict}{remedy}"


def _share(sizing: CacheSizing) -> str:
    n_experts, n_bytes, place = sizing.n_experts, sizing.n_bytes, sizing.place
    if not sizing.n_slots:
        source = "host memory" if place == "device" else f"the {place}"
        return f"none of {n_experts} experts per layer on the device, all read from {source}"
    unit, size = ("GiB", _GIB) if n_bytes >= _GIB else ("MiB", _MIB)
    return (
        f"{sizing.slots_text} of {n_experts} experts per layer "
        f"({100 * sizing.n_slots / sizing.n_total:.0f} %) "
        f"{'on' if place == 'device' else 'in'} the {place}, {n_bytes / size:,.1f} {unit}"
    )
