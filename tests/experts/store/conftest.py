"""Rigs of three layers, closed behind each test; the middle layer's experts are larger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.experts.rig import N_USED, SIZES, SPACE, MakeRig, Rig
from vkmoe.experts.decide.settings import CacheSettings, make_pools
from vkmoe.gpu.device import Device


@pytest.fixture
def make(device: Device, nothing_left: None) -> Iterator[MakeRig]:
    """Makes a rig with `slots` per layer, and `host_slots` for each of the two sizes of expert.

    Without the latter all have a home. What else is named are fields of the settings.
    """
    made: list[Rig] = []

    def rig(slots: int = 4, host_slots: int | None = None, delay: int | None = None,
            n_landing: int = 0, allocation: Any = "layer", seed: Any = None, **choices: Any
            ) -> Rig:  # fmt: skip
        pools = make_pools([slots] * 3, SIZES, N_USED, allocation)
        settings = CacheSettings(**{"policy": "slru", **choices})
        made.append(Rig(device, SPACE, pools, settings, delay, seed, host_slots, SIZES, n_landing))
        return made[-1]

    yield rig
    for one in made:
        one.close()
