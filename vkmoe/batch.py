"""This module defines the unit of work, from the loop over tokens down to the words a GPU is sent,
and what it leaves.

Owns no memory. What the numbers of a run mean for experts is the subject of experts/.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_LATER = 1024  # of `TokenBatch.later`: what comes behind them hardly counts any more

_BOTH = np.uint64((1 << 32) + 1)  # makes a word twice that word, side by side

Phase = Literal["decode", "prompt"]


class BatchKind(NamedTuple):
    """Says what a program is recorded for; batches that are no larger replay it."""

    phase: Phase
    n_rows: int
    n_logits: int  # rows that may want logits


class TokenBatch(NamedTuple):
    """Holds tokens that are processed together, one row each; those of a sequence in order.

    Rows of a prompt are summed in another order than rows that are decoded: the phase says which
    order it is, never their number.
    """

    tokens: tuple[int, ...]  # [n_tokens]
    positions: tuple[int, ...]  # [n_tokens], counted from 0
    sequences: tuple[int, ...]  # [n_tokens]: the region of the KV caches that each one's has
    wants_logits: tuple[bool, ...]  # [n_tokens]
    phase: Phase = "decode"
    later: tuple[int, ...] = ()  # tokens that are known to come in the runs after this one
    # Of rows that want logits, states are read in place of these: the head does not run. Prompts.
    wants_states: bool = False

    @classmethod
    def one(cls, token: int, position: int, with_logits: bool = True) -> TokenBatch:
        """Make the batch of one token."""
        return cls((token,), (position,), (0,), (with_logits,))


class TopLogits(NamedTuple):
    """Holds the largest of a token's `n_vocab` logits: descending, equal ones by rising id."""

    ids: NDArray[np.int32]  # [n]
    logits: NDArray[np.float32]  # [n], NaN reads as -inf
    n_vocab: int
    log_sum_exp: float  # of all logits
    has_nan: bool = False  # some logit is NaN: the weights are damaged


class RunResult(NamedTuple):
    """Holds what the run of a batch leaves, copied out of memory that the next run overwrites."""

    routing: NDArray[np.uint32]  # [n_tokens, n_moe_layers, n_used]: the experts each token used
    filled: NDArray[np.uint32] | None  # [n_tokens, n_moe_layers, n_used, 2], see RoutingLog
    tops: tuple[TopLogits, ...] = ()  # of the first rows that want any, as many as the head takes

    @property
    def top(self) -> TopLogits | None:
        """Return those of the last row that the head took; None where no row wants any."""
        return self.tops[-1] if self.tops else None

    @property
    def landed(self) -> NDArray[np.bool_]:
        """Mark the used experts that were stored whole where they may land, like `routing`."""
        assert self.filled is not None, "no expert has a place to land in"
        both = self.filled.view(np.uint64)[..., 0]  # words that are to be the same
        stored: NDArray[np.bool_] = both == (self.routing + np.uint64(1)) * _BOTH
        return stored


class TextForm(NamedTuple):
    """Says what the bytes of a text hold, one behind the other: rows, then states.

    The rows are those of `n_positions`, layer by layer. The states are those at `stops`, rising, of
    which the last is `n_positions`; there are none where every layer has rows of all positions.
    """

    n_positions: int
    stops: tuple[int, ...] = ()

    def stop(self, n_positions: int) -> int:
        """Return the last position, up to `n_positions`, at which the text can go on; 0: none."""
        most = min(n_positions, self.n_positions)
        return max((stop for stop in self.stops if stop <= most), default=0) if self.stops else most
