"""Judges whether the expert cache is large enough: a status, what is recommended, what to do.

Pure. Whether slots fit is decided by placement/experts.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from vkmoe.facts import CacheSizing, SizingStatus

__all__ = ["CacheSizing", "recommended_slots", "size_cache", "sizing_line"]

GIB, MIB = 1 << 30, 1 << 20
_MORE_ROOM = "lower --ctx-size, close other programs that use the GPU, or take a smaller model"


def recommended_slots(n_experts: int, n_used: int) -> int:
    """Return the slots per layer from which caching works well: twice the experts a token uses.

    Measured on 20 models in "Not All Models Suit Expert Offloading" (arXiv:2505.16056).
    """
    return min(n_experts, 2 * n_used)


def size_cache(
    slots: Sequence[int], slot_bytes: Sequence[int], n_experts: int, n_used: int, asked: str = ""
) -> CacheSizing:
    """Judge `slots[layer]` slots of `slot_bytes[layer]` bytes (MoE layers).

    A size of 0 is one that is not known; no layers at all: a model without experts. `asked` is the
    flag by which the user chose the slots, empty if the plan did.
    """
    recommended = recommended_slots(n_experts, n_used)
    smallest = min(slots, default=0)
    ratio = smallest / recommended if recommended else 0.0
    n_bytes = sum(n * size for n, size in zip(slots, slot_bytes, strict=True))
    status, remedy = _judge(slots, slot_bytes, smallest, recommended, asked)
    n_total = n_experts * len(slots)
    return CacheSizing(
        status, smallest, sum(slots), n_total, n_experts, n_bytes, recommended, ratio, remedy
    )


def _judge(
    slots: Sequence[int], slot_bytes: Sequence[int], smallest: int, recommended: int, asked: str
) -> tuple[SizingStatus, str]:
    if not slots:
        return "empty", f"leave out {asked}" if asked else ""
    if not all(slot_bytes):
        return "unknown_expert_size", "look at the model file with `vkmoe info`"
    if not smallest:
        return "budget_exhausted", f"raise {asked}" if asked else _MORE_ROOM
    if smallest < recommended:
        return "below_recommended", f"raise {asked}" if asked else _MORE_ROOM
    return "ok", ""


def sizing_line(sizing: CacheSizing) -> str:
    """Say in one line how much is cached, what is recommended, the status and the remedy."""
    if sizing.status == "empty":
        advice = f", so {sizing.remedy}" if sizing.remedy else ""
        return f"expert cache: the model has no experts{advice}: empty"
    if sizing.status == "unknown_expert_size":
        found = "how large an expert is, is not known; all are read from host memory"
    else:
        found = f"{_share(sizing)}; recommended at least {sizing.recommended}"
    verdict = sizing.status.replace("_", " ")
    if sizing.status == "below_recommended":
        verdict += f" ({sizing.ratio:.2f} of it)"
    remedy = f"; to change that, {sizing.remedy}" if sizing.remedy else ""
    return f"expert cache: {found}: {verdict}{remedy}"


def _share(sizing: CacheSizing) -> str:
    if not sizing.n_slots:
        source = "host memory" if sizing.place == "device" else f"the {sizing.place}"
        return f"none of {sizing.n_experts} experts per layer on the device, all read from {source}"
    percent = 100 * sizing.n_slots / sizing.n_total
    size = (
        f"{sizing.n_bytes / GIB:,.1f} GiB"
        if sizing.n_bytes >= GIB
        else f"{sizing.n_bytes / MIB:,.1f} MiB"
    )
    return (
        f"{sizing.n_slots_smallest_layer} of {sizing.n_experts} experts per layer "
        f"({percent:.0f} %) {'on' if sizing.place == 'device' else 'in'} the {sizing.place}, {size}"
    )
