"""Random blocks decode to what was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from tools.quantise import random_weights
from vkmoe.quants import HAS_KERNEL, TYPES, decode


@pytest.mark.parametrize("name", sorted(HAS_KERNEL))
def test_mean_deviation_and_repeatability(name: str) -> None:
    raw = random_weights(name, 128, 1024, np.random.default_rng(7), 0.03)
    assert raw.shape == (128, TYPES[name].row_bytes(1024))
    weights = decode(name, raw, 128 * 1024)
    assert np.isfinite(weights).all()
    assert abs(float(weights.mean())) < 0.001
    assert float(weights.std()) == pytest.approx(0.03, rel=0.02)
    np.testing.assert_array_equal(
        raw, random_weights(name, 128, 1024, np.random.default_rng(7), 0.03)
    )
