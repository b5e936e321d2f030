"""This module has the NumPy twins of rms_norm.comp and norm_residual.comp, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.kernels.matvec.twins import HiddenState

Floats = NDArray[np.floating]


def rms_norm(x: Floats, gain: Floats, eps: float) -> NDArray[np.float64]:
    """Compute x / sqrt(mean(x^2) + eps) * gain (Zhang & Sennrich 2019, eq. 4); x, gain [width]."""
    wide = x.astype(np.float64)
    result: NDArray[np.float64] = wide / np.sqrt(np.mean(wide**2) + eps) * gain.astype(np.float64)
    return result


class NormedRow(NamedTuple):
    """Holds what a part of a block gave [width], and the gain of its norm; None: it has none."""

    values: Floats
    gain: Floats | None

    def normed(self, eps: float) -> NDArray[np.float64]:
        if self.gain is None:
            return self.values.astype(np.float64)
        return rms_norm(self.values, self.gain, eps)


def norm_residual(
    parts: Sequence[NormedRow],
    hidden: Floats,
    gain: Floats,
    next_gain: Floats,
    eps: float,
    scale: float = 1.0,
) -> HiddenState:
    """Compute scale * (hidden + norm of the sum of the parts), [width], and that * next_gain."""
    joined = np.sum([part.normed(eps) for part in parts], axis=0)
    found = scale * (hidden.astype(np.float64) + rms_norm(joined, gain, eps))
    return HiddenState(found, found * next_gain.astype(np.float64))
