"""Which way misses are served: read over the link by the matvec, or gathered ahead of it.

Pure. The thresholds are those of gpu-facts.md, part C.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from vkmoe.config import EngineConfig
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.link_speed import LinkSpeed
from vkmoe.placement.slots import MissWays

__all__ = ["MissWay", "choose_way", "miss_ways"]

READS_WELL, READS_BADLY = 0.9, 0.8  # read speed over gather speed
SMALLEST_GATHERED = 2_000_000  # bytes of an expert; a dispatch more costs what less would save


class MissWay(NamedTuple):
    """The way, and why in a few words."""

    way: Literal["read", "gather"]
    reason: str


def choose_way(
    asked: Literal["auto", "read", "gather"],
    is_uma: bool,
    link: LinkSpeed | None,
    span_bytes: int,
) -> MissWay:
    """The way for experts of `span_bytes` on a device that is UMA or behind `link`.

    `link` is None where it is not measured.
    """
    if asked != "auto":
        return MissWay(asked, "as asked")
    if is_uma:
        return MissWay("read", "the device shares the host's memory")
    if link is None or not link.gather_bytes_per_second:
        return MissWay("read", "the link was not measured")
    read, gather = link.read_bytes_per_second, link.gather_bytes_per_second
    speeds = f"{read / 1e9:.1f} GB/s read in place, {gather / 1e9:.1f} gathered"
    if read >= READS_WELL * gather:
        return MissWay("read", speeds)
    if read >= READS_BADLY * gather:
        return MissWay("read", f"{speeds}: too little to gain by gathering")
    if span_bytes < SMALLEST_GATHERED:
        return MissWay("read", f"{speeds}, but experts are too small to gain by gathering")
    return MissWay("gather", speeds)


def miss_ways(
    config: EngineConfig, device: DeviceInfo, link: LinkSpeed | None, span_bytes: int
) -> MissWays:
    """How misses are served, and whether they stay where they land.

    By default they do where they cross a link: there it saves their copy. Where the device shares
    the host's memory, a copy costs about as much as the stores of a kernel.
    """
    way = choose_way(config.miss, device.is_uma, link, span_bytes)
    promote = not device.is_uma if config.promote_on_read is None else config.promote_on_read
    return MissWays(way.way, promote, way.reason)
