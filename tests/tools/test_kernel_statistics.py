"""tools/kernel_statistics.py: what it adds up of what drivers state; tests/gpu_drivers runs it."""

from __future__ import annotations

import pytest

from tools import kernel_statistics


@pytest.mark.parametrize(
    ("lanes", "least_lanes", "fit"),
    [(64, 32, 10), (32, 32, 20), (64, 64, 20)],
    ids=("RDNA", "RDNA, narrow", "GCN"),
)
def test_waves_are_counted_in_their_own_size(lanes: int, least_lanes: int, fit: int) -> None:
    assert kernel_statistics.waves({"Subgroups per SIMD": 20}, lanes, least_lanes) == fit
    assert kernel_statistics.waves({"Number of GPRs": 90}, lanes, least_lanes) is None


@pytest.mark.parametrize(
    "name", ["Spilled VGPRs", "Scratch size", "SLM Size", "Fill Count", "Scratch Memory Size"]
)
def test_no_maker_hides_a_spill(name: str) -> None:
    assert kernel_statistics.spills({"VGPRs": 72, name: 4})
    assert not kernel_statistics.spills({"VGPRs": 72, name: 0})
