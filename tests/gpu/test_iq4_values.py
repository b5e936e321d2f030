"""The polynomial that kernels use for the code book of IQ4, evaluated as devices may do it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from gguf.quants import IQ4_NL

SOURCE = Path(__file__).resolve().parents[2] / "shaders" / "include" / "types" / "iq4_values.glsl"


def test_no_device_rounds_to_another_value() -> None:
    """Vulkan lets fma round twice, and arithmetic round either way: by one part in 2^23 at most."""
    coefficients = [
        float(found) for found in re.findall(r"vec4\((-?\d+\.\d+)\)", SOURCE.read_text())
    ]
    assert len(coefficients) == 5
    n = np.arange(16.0)
    value = np.full(16, coefficients[0])
    doubt = np.zeros(16)  # of what has been computed, from all roundings so far
    for coefficient in coefficients[1:]:
        product = n * value
        doubt = n * doubt + (2 * np.abs(product) + abs(coefficient)) * 2.0**-22
        value = product + coefficient
    assert (np.abs(value - IQ4_NL.kvalues) + doubt).max() < 0.45
    assert doubt.max() < 1e-3
