"""This module has the NumPy twin of rms_norm.comp, in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]


def rms_norm(x: Floats, gain: Floats, eps: float) -> NDArray[np.float64]:
    """Compute x / sqrt(mean(x^2) + eps) * gain (Zhang & Sennrich 2019, eq. 4); x, gain [width]."""
    wide = x.astype(np.float64)
    result: NDArray[np.float64] = wide / np.sqrt(np.mean(wide**2) + eps) * gain.astype(np.float64)
    return result
