"""Chooses how misses are served: read over the link by the matvec, or gathered ahead of it.

Pure. How fast the link is, is the subject of link.py.
"""

from __future__ import annotations

from typing import NamedTuple

from vkmoe.choices import MissWay
from vkmoe.config import EngineConfig
from vkmoe.facts import DeviceInfo, ExpertMode
from vkmoe.gpu.link_speed import LinkSpeed

__all__ = ["N_LANDING", "cache_mode", "promotes"]

N_LANDING = 2  # slots of a layer in which experts land while they are read, at most
# Read speed over gather speed. Gathering costs a dispatch, and two passes more over device memory:
# it pays where reading in place has less than four fifths of its speed.
READS_WELL, READS_BADLY = 0.9, 0.8
SMALLEST_GATHERED = 2_000_000  # bytes of an expert; a dispatch more costs what less would save


def promotes(config: EngineConfig, device: DeviceInfo) -> bool:
    """Decide whether missed experts of a cache stay where they land.

    By default they do where they cross a link: there it saves their copy. Where the device shares
    the host's memory, a copy costs about as much as the stores of a kernel.
    """
    return not device.is_uma if config.promote_on_read is None else config.promote_on_read


def cache_mode(
    config: EngineConfig, device: DeviceInfo, link: LinkSpeed | None, span_bytes: int
) -> ExpertMode:
    """Decide how the misses of a cache are served; its largest expert has `span_bytes`.

    `link` is None where it is not measured.
    """
    chosen = _chosen(config, device, link, span_bytes)
    return ExpertMode("cache", chosen.way, promotes(config, device), chosen.reason)


class _Chosen(NamedTuple):
    way: MissWay
    reason: str


def _chosen(
    config: EngineConfig, device: DeviceInfo, link: LinkSpeed | None, span_bytes: int
) -> _Chosen:
    if config.miss != "auto":
        return _Chosen(config.miss, "as --miss")
    if device.is_uma:
        return _Chosen("read", "the device shares the host's memory")
    if link is None or not link.gather_bytes_per_second:
        return _Chosen("read", "the link was not measured")
    read, gather = link.read_bytes_per_second, link.gather_bytes_per_second
    speeds = f"{read / 1e9:.1f} GB/s read in place, {gather / 1e9:.1f} gathered"
    if read >= READS_WELL * gather:
        return _Chosen("read", speeds)
    if read >= READS_BADLY * gather:
        return _Chosen("read", f"{speeds}: too little to gain by gathering")
    if span_bytes < SMALLEST_GATHERED:
        return _Chosen("read", f"{speeds}, but experts are too small to gain by gathering")
    return _Chosen("gather", speeds)
