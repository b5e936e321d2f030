"""Notes why experts got their slots and why they lost them, while that is watched.

What decides (residency.py, and the store where slots are taken away) writes here; the view of
experts (records/watch.py) reads. Decides nothing, and is not there where nothing watches.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.locations import FREE, Move

# An expert comes because a token missed it, because a predictor guessed it, because it has landed
# in the submit that missed it, or because it is pinned. "moved": that was not noted.
Came = Literal["moved", "missed", "guessed", "landed", "pinned"]
# It leaves for another, because other programs need the memory, or because slots were taken away.
Left = Literal["moved", "evicted", "given back", "fewer slots"]


class Reasons:
    """Keeps the last reason for which each expert came into one kind of memory, and left it."""

    def __init__(self, space: KeySpace) -> None:
        """Begin with no reasons."""
        self._space = space
        self._came: list[Came] = ["moved"] * space.n_keys
        self._left: list[Left] = ["moved"] * space.n_keys
        self._left_for: list[int] = [FREE] * space.n_keys  # keys

    def entered(self, moves: Iterable[Move], why: Came) -> None:
        """Note why these experts come; those that have landed come for that. Victims leave."""
        for move in moves:
            self._came[move.key] = "landed" if move.landed else why
            if move.victim != FREE:
                self._left[move.victim] = "evicted"
                self._left_for[move.victim] = move.key

    def left(self, keys: Iterable[int], why: Left) -> None:
        """Note why these experts leave for no other."""
        for key in keys:
            self._left[key] = why

    def of_coming(self, key: int) -> str:
        """Return why an expert came last."""
        return self._came[key]

    def of_leaving(self, key: int) -> str:
        """Return why an expert left last; "evicted for 7" names the expert that has its slot now.

        Where layers share slots that may be one of another layer, which counts MoE layers.
        """
        if self._left[key] != "evicted":
            return self._left[key]
        layer, expert = divmod(self._left_for[key], self._space.n_experts)
        of_other = f" of layer {layer}" if layer != self._space.layer(key) else ""
        return f"evicted for {expert}{of_other}"
