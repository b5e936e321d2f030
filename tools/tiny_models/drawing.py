"""Random tensors for the tiny models, and what tensors of their files can be."""

from __future__ import annotations

from typing import NamedTuple

import gguf
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Weights = dict[str, Floats]


class Quantised(NamedTuple):
    """A tensor of the file that is not F32: blocks as bytes [..., row bytes], and their type."""

    blocks: NDArray[np.uint8]
    type: gguf.GGMLQuantizationType


Tensors = dict[str, Floats | Quantised]


class Draw:
    """Random tensors; scales keep activations near one, logits wide."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def matrix(self, *shape: int, gain: float = 1.4) -> Floats:
        scale = np.float32(gain / np.sqrt(shape[-1]))
        return self._rng.standard_normal(shape, dtype=np.float32) * scale

    def norm(self, width: int) -> Floats:
        return self._rng.random(width, dtype=np.float32) * np.float32(1.2) + np.float32(0.4)

    def bias(self, *shape: int, gain: float = 0.5) -> Floats:
        return self._rng.standard_normal(shape, dtype=np.float32) * np.float32(gain)
