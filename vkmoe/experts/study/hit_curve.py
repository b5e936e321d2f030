"""This module says how often the experts that tokens use are found in memory that holds some only.

A curve goes by the share of a layer's experts that are held. Before a model has run here nothing
better is known than the mean curve of recorded traces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class HitCurve:
    """Gives the hit rate for each share of experts that are held, linear between its points."""

    shares: tuple[float, ...]  # of a layer's experts, rising
    rates: tuple[float, ...]  # hits per use at these shares
    reason: str  # where the curve is from, in a few words

    def rate(self, share: float) -> float:
        """Return the hit rate where `share` of the experts are held; both from 0 to 1."""
        return float(np.interp(share, (0.0, *self.shares, 1.0), (0.0, *self.rates, 1.0)))

    def of_slots(self, slots: Sequence[int], n_experts: int) -> float:
        """Return the hits per use of all layers where each has its own number of slots."""
        alike = Counter(slots).items()  # few numbers, in many layers
        return sum(n * self.rate(n_slots / n_experts) for n_slots, n in alike) / len(slots)


# The demo model (32 experts, 4 used, 6 layers) on three texts of bench/prompts: prompts of 500
# tokens and replies of 400; hits in the replies from token 50 on, by the default settings with two
# landing slots, replayed by `experts/study/replay.py`. Means of the three.
MEAN_CURVE = HitCurve(
    tuple(n / 32 for n in (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 30)),
    (0.137, 0.241, 0.332, 0.412, 0.534, 0.631, 0.712, 0.775, 0.872, 0.926, 0.960, 0.985, 0.994),
    "the mean of recorded traces",
)
