"""Measures how fast experts cross the link, if there is one: read in place, copied, and gathered.

Also says by which of these speeds the work of a submit is bounded. Which way misses are served is
the subject of cache_choice.py.
"""

from __future__ import annotations

import logging

import numpy as np

from vkmoe.batch import TokenBatch
from vkmoe.errors import DeviceLostError, GpuError
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.backend import Backend
from vkmoe.gpu.device import Device
from vkmoe.gpu.link_speed import (
    GROUP_BYTES,
    N_SLICES,
    LinkSpeed,
    Timed,
    best_of,
    default_slice_bytes,
    link_memory,
    measure_link,
)
from vkmoe.gpu.program import Program, TensorRef, memory_range
from vkmoe.gpu.token_io import pack_params, param_words
from vkmoe.gpu.transfer import Transfer
from vkmoe.modes import ExpertMode
from vkmoe.ops.context import OpContext
from vkmoe.ops.experts import LandingMemory, gather
from vkmoe.ops.router import RoutingLog
from vkmoe.ops.tuning import choose_tuning

__all__ = ["SHARED_BYTES_PER_SECOND", "link_of_misses", "measure_gather", "submit_speed"]

log = logging.getLogger("vkmoe")
SMALLEST_SLICE_BYTES = 1 << 20  # the time of less is the time of a submit
# Assumed of integrated GPUs, whose memory is not measured: a quarter of the 19 GB/s that one was
# seen to read. Too low costs a token some submits more, of about 75 us each.
SHARED_BYTES_PER_SECOND = 5e9
HEAP_SHARE = 16  # measuring takes at most this part of the smallest heap
_ROUTING = TensorRef("link routing", 6 * N_SLICES)
_PARAMS = TensorRef("link params", param_words(1))
_LOG = RoutingLog(1, N_SLICES, name="link log")


def link_of_misses(device: Device) -> LinkSpeed | None:
    """Measure what a miss costs; None where there is no link that misses cross.

    To be called before anything is allocated: it takes up to 64 MiB, or less on small devices, and
    gives them back. Raises DeviceLostError; without another result nothing depends on it.
    """
    if device.info.is_uma:
        return None
    room = min(heap.size for heap in device.info.heaps) // (HEAP_SHARE * N_SLICES)
    slice_bytes = min(default_slice_bytes(device), room) // GROUP_BYTES * GROUP_BYTES
    if slice_bytes < SMALLEST_SLICE_BYTES:
        return None
    try:
        speed = measure_link(device, slice_bytes)
        return speed._replace(gather_bytes_per_second=measure_gather(device, slice_bytes))
    except DeviceLostError:
        raise
    except GpuError as error:
        log.warning("the speed of host memory could not be measured: %s", error)
        return None


def submit_speed(info: DeviceInfo, link: LinkSpeed | None, mode: ExpertMode) -> float | None:
    """Choose the bytes per second to estimate a submit's time by, when misses are served so.

    None where it is not known, and on CPUs, where nothing ends a long one.
    """
    if link is not None:
        gathers = mode.gathers and link.gather_bytes_per_second > 0
        return link.gather_bytes_per_second if gathers else link.read_bytes_per_second
    return SHARED_BYTES_PER_SECOND if info.is_uma and not info.is_cpu else None


def measure_gather(device: Device, slice_bytes: int | None = None) -> float:
    """Measure the bytes per second that the gather kernel copies from host memory, at best.

    It copies N_SLICES slices as it would that many missed experts. As cheap as `measure_link`, with
    as much memory, and the same errors.
    """
    slice_bytes = slice_bytes or default_slice_bytes(device)
    with link_memory(device, N_SLICES * slice_bytes) as (source, target):
        (best,) = best_of([_gather(device, source.address, target.address, slice_bytes)])
        return best


def _gather(device: Device, source: int, target: int, slice_bytes: int) -> Timed:
    """Time the copy of all slices from the address `source` to `target`."""
    backend, program = Backend(device), Program("gather slices")
    n_bytes = N_SLICES * slice_bytes
    starts = slice_bytes * np.arange(N_SLICES, dtype=np.uint64)
    addresses = np.concatenate([np.uint64(target) + starts, np.uint64(source) + starts])
    words = np.concatenate([np.zeros(2 * N_SLICES, np.uint32), addresses.view(np.uint32)])
    params = np.zeros(_PARAMS.n_words, np.uint32)
    pack_params(params.data, TokenBatch.one(0, 0), 0, serial=1)
    with Transfer(device, words.nbytes) as transfer:
        transfer.write(backend.tensor(_ROUTING), 0, words.view(np.uint8))
        transfer.write(backend.tensor(_PARAMS), 0, params.view(np.uint8))
        transfer.flush()
    memory = memory_range(target, n_bytes)
    landing = LandingMemory((memory,), _LOG, layer=0)
    homes = (memory_range(source, n_bytes),)
    op = OpContext(program, choose_tuning(device.info), "gather slices")
    gather(op, _ROUTING, _PARAMS, landing, slice_bytes, homes)
    return Timed(device, backend.record(program, timed=True), n_bytes)
