"""What penalties and bans make of logits, before anything is chosen from them.

Owns the tokens that penalties look back on. Does not own the choice (sampler.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vkmoe.config import SamplingConfig

__all__ = ["Penalties", "Seen"]

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Seen(NamedTuple):
    """The tokens that penalties apply to now."""

    ids: Ids  # [n] rising
    counts: Floats  # [n]: how often each occurred


class Penalties:
    """The penalties of one generation. `banned` tokens are never chosen."""

    def __init__(self, config: SamplingConfig, banned: Iterable[int] = ()) -> None:
        self._config = config
        self._banned = np.array(sorted(set(banned)), dtype=np.int64)
        self._history: list[int] = []

    def accept(self, token_ids: Sequence[int]) -> None:
        """Note tokens of the prompt or of the reply, oldest first. Mutates."""
        c = self._config
        active = c.repeat_penalty != 1 or c.presence_penalty != 0 or c.frequency_penalty != 0
        if active and c.repeat_last_n != 0:
            self._history.extend(token_ids)

    def seen(self) -> Seen:
        """What is in the window of the last tokens."""
        last_n = self._config.repeat_last_n
        window = self._history if last_n < 0 else self._history[-last_n:] if last_n else []
        counted = sorted(Counter(window).items())
        ids = np.array([token_id for token_id, _ in counted], dtype=np.int64)
        return Seen(ids, np.array([count for _, count in counted], dtype=np.float64))

    def may_lower(self, seen: Seen) -> bool:
        """Whether any logit may come out lower than it went in."""
        return bool(seen.ids.size or self._banned.size)

    def may_raise(self, seen: Seen) -> bool:
        """Whether any logit may come out higher than it went in."""
        c = self._config
        raises = c.repeat_penalty < 1 or c.presence_penalty < 0 or c.frequency_penalty < 0
        return raises and seen.ids.size > 0

    def adjusted(self, ids: Ids, logits: Floats, seen: Seen) -> Floats:
        """Logits [n] of `ids` [n] after penalties and bans."""
        result = logits.copy()
        if seen.ids.size:
            place = np.minimum(np.searchsorted(seen.ids, ids), seen.ids.size - 1)
            hit = seen.ids[place] == ids
            result[hit] = self._penalised(logits[hit], seen.counts[place[hit]])
        if self._banned.size:
            result[np.isin(ids, self._banned)] = -np.inf
        return result

    def _penalised(self, logits: Floats, counts: Floats) -> Floats:
        c = self._config
        scaled = np.where(logits > 0, logits / c.repeat_penalty, logits * c.repeat_penalty)
        return scaled - c.presence_penalty - counts * c.frequency_penalty
