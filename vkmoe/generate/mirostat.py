"""This module keeps the surprise of tokens near a target: Mirostat, in both its versions.

The method is Basu et al., "Mirostat: A Neural Text Decoding Algorithm that Directly Controls
Perplexity", 2021, in the form of llama.cpp's `llama_sampler_mirostat` and `_v2`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from vkmoe.config import SamplingConfig

__all__ = ["Mirostat"]

Floats = npt.NDArray[np.float64]

_N_ESTIMATED = 100  # tokens by which version 1 estimates how fast probabilities fall


class Mirostat:
    """Holds how much surprise the next token may have."""

    def __init__(self, config: SamplingConfig) -> None:
        self._config = config
        self._mu = 2 * config.mirostat_tau  # bits

    def n_kept(self, shares: Floats, n_vocab: int) -> int:
        """Return how many tokens are left, at least one.

        `shares` are the probabilities of tokens, descending; `n_vocab` counts all tokens there are.
        """
        if self._config.mirostat == 2:
            surprising = np.flatnonzero(shares < 2.0**-self._mu)
            return max(1, int(surprising[0])) if surprising.size else shares.size
        first = shares[:_N_ESTIMATED]
        first = first[first > 0]
        if first.size < 2:
            return 1
        steps = np.log(np.arange(2, first.size + 1) / np.arange(1, first.size))
        slope = float(steps @ np.log(first[:-1] / first[1:]) / (steps @ steps))
        return max(1, min(shares.size, self._n_zipf(slope, n_vocab)))

    def learn(self, share: float) -> None:
        """Note the probability of the chosen token among those that were left. Mutates."""
        surprise = -math.log2(max(share, 1e-300))  # a rounded draw may reach a share of 0
        self._mu -= self._config.mirostat_eta * (surprise - self._config.mirostat_tau)

    def _n_zipf(self, slope: float, n_vocab: int) -> int:
        """Return how many tokens have the surprise mu where probabilities fall by rank^-slope."""
        rest = slope - 1
        with np.errstate(all="ignore"):
            ratio = np.float64(rest) * np.exp2(self._mu) / (1 - np.power(float(n_vocab), -rest))
            n = float(np.power(ratio, np.float64(1) / slope))
        return 1 if math.isnan(n) else int(min(n, n_vocab))
