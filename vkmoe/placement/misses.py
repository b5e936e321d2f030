"""Chooses how misses are served: read over the link by the matvec, or gathered ahead of it.

Pure. How fast the link is, is the subject of link.py.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from vkmoe.choices import MissWay
from vkmoe.config import EngineConfig
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.link_speed import LinkSpeed

__all__ = ["N_LANDING", "READ_AT_HOME", "MissWays", "choose_way", "miss_ways"]

N_LANDING = 2  # slots of a layer in which experts land while they are read, at most
# Read speed over gather speed. Gathering costs a dispatch, and two passes more over device memory:
# it pays where reading in place has less than four fifths of its speed.
READS_WELL, READS_BADLY = 0.9, 0.8
SMALLEST_GATHERED = 2_000_000  # bytes of an expert; a dispatch more costs what less would save


class MissWays(NamedTuple):
    """How an expert without a slot is served, and whether it may stay where it landed."""

    way: MissWay = "read"
    promote: bool = False
    reason: str = ""  # for the way, in a few words


READ_AT_HOME = MissWays()


def miss_ways(
    config: EngineConfig, device: DeviceInfo, link: LinkSpeed | None, span_bytes: int
) -> MissWays:
    """Decide how misses are served, and whether they stay where they land.

    By default they do where they cross a link: there it saves their copy. Where the device shares
    the host's memory, a copy costs about as much as the stores of a kernel.
    """
    ways = choose_way(config.miss, device.is_uma, link, span_bytes)
    promote = not device.is_uma if config.promote_on_read is None else config.promote_on_read
    return ways._replace(promote=promote)


def choose_way(
    asked: Literal["auto", "read", "gather"],
    is_uma: bool,
    link: LinkSpeed | None,
    span_bytes: int,
) -> MissWays:
    """Choose the way for experts of `span_bytes` on a device that is UMA or behind `link`.

    `link` is None where it is not measured.
    """
    if asked != "auto":
        return MissWays(asked, reason="as asked")
    if is_uma:
        return MissWays("read", reason="the device shares the host's memory")
    if link is None or not link.gather_bytes_per_second:
        return MissWays("read", reason="the link was not measured")
    read, gather = link.read_bytes_per_second, link.gather_bytes_per_second
    speeds = f"{read / 1e9:.1f} GB/s read in place, {gather / 1e9:.1f} gathered"
    if read >= READS_WELL * gather:
        return MissWays("read", reason=speeds)
    if read >= READS_BADLY * gather:
        return MissWays("read", reason=f"{speeds}: too little to gain by gathering")
    if span_bytes < SMALLEST_GATHERED:
        return MissWays("read", reason=f"{speeds}, but experts are too small to gain by gathering")
    return MissWays("gather", reason=speeds)
