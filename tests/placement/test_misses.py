"""How misses are served: as asked, or as the measured speeds favour."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.invented import APU, DISCRETE_12
from vkmoe.config import EngineConfig
from vkmoe.facts import DeviceInfo, ExpertMode
from vkmoe.gpu.link_speed import LinkSpeed
from vkmoe.placement.cache_choice import cache_mode

AUTO = EngineConfig()
LARGE, SMALL = 2_800_000, 1_900_000
SLOW_READS, EVEN, BETWEEN = (LinkSpeed(read, 12e9, 10e9) for read in (7.9e9, 9.1e9, 8.5e9))


@pytest.mark.parametrize(
    ("link", "span_bytes", "way"),
    [(SLOW_READS, LARGE, "gather"), (SLOW_READS, SMALL, "read"), (EVEN, LARGE, "read"),
     (BETWEEN, LARGE, "read"), (LinkSpeed(20e9, 12e9, 10e9), LARGE, "read")],
)  # fmt: skip
def test_the_measured_speeds_decide(link: LinkSpeed, span_bytes: int, way: str) -> None:
    choice = cache_mode(AUTO, DISCRETE_12, link, span_bytes)
    assert choice.miss == way
    assert f"{link.read_bytes_per_second / 1e9:.1f} GB/s" in choice.reason
    assert f"{link.gather_bytes_per_second / 1e9:.1f} gathered" in choice.reason


def test_reasons_tell_the_cases_apart() -> None:
    cases = [(SLOW_READS, LARGE), (SLOW_READS, SMALL), (EVEN, LARGE), (BETWEEN, LARGE), (None, 1)]
    assert len({cache_mode(AUTO, DISCRETE_12, *case).reason for case in cases}) == len(cases)


@pytest.mark.parametrize("link", [None, LinkSpeed(7e9, 12e9)])
def test_what_was_not_measured_is_read(link: LinkSpeed | None) -> None:
    wanted = ExpertMode("cache", "read", True, "the link was not measured")
    assert cache_mode(AUTO, DISCRETE_12, link, LARGE) == wanted


def test_where_memory_is_shared_nothing_is_gathered_unasked() -> None:
    assert cache_mode(AUTO, APU, SLOW_READS, LARGE).miss == "read"


@pytest.mark.parametrize("device", [DISCRETE_12, APU], ids=["discrete", "shared"])
@pytest.mark.parametrize("asked", ["read", "gather"])
def test_what_was_asked_is_done(asked: Any, device: DeviceInfo) -> None:
    for link in (None, SLOW_READS, EVEN):
        mode = cache_mode(EngineConfig(miss=asked), device, link, LARGE)
        assert mode == ExpertMode("cache", asked, not device.is_uma, "as --miss")
        assert mode.gathers == (asked == "gather")
        assert mode.keeps == (mode.promote and asked == "read")
