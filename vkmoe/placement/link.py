"""Whether a miss crosses a link, and how fast that is."""

from __future__ import annotations

import logging

from vkmoe.errors import DeviceLostError, GpuError
from vkmoe.facts import MemoryPlan
from vkmoe.gpu.device import Device
from vkmoe.gpu.link_speed import GROUP_BYTES, N_SLICES, SLICE_BYTES, LinkSpeed, measure_link

__all__ = ["link_of_misses"]

log = logging.getLogger("vkmoe")
SMALLEST_SLICE_BYTES = 1 << 20  # the time of less is the time of a submit


def link_of_misses(device: Device, plan: MemoryPlan) -> LinkSpeed | None:
    """What a miss costs; None where there are no misses, or no link that they cross.

    To be called before anything is allocated: it takes memory that the plan has for other things,
    and gives it back. Raises DeviceLostError; without another result nothing depends on it.
    """
    if plan.experts_in == "device" or device.info.is_uma:
        return None
    room = min(plan.heap_totals().values()) // (2 * N_SLICES)
    slice_bytes = min(SLICE_BYTES, room) // GROUP_BYTES * GROUP_BYTES
    if slice_bytes < SMALLEST_SLICE_BYTES:
        return None
    try:
        return measure_link(device, slice_bytes)
    except DeviceLostError:
        raise
    except GpuError as error:
        log.warning("the speed of host memory could not be measured: %s", error)
        return None
