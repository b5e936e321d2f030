"""Who leaves a pool for newcomers that come one after the other."""

from __future__ import annotations

from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.moves import FREE

__all__ = ["Leaving"]


class Leaving:
    """A pool's free slots first; then who leaves, in order.

    The one inserted last leaves only if nobody else may, and none of a layer that has nobody to
    spare, unless for an expert of the same layer.
    """

    def __init__(
        self,
        n_free: int,
        order: list[int],
        newest: int,
        space: KeySpace,
        spare: list[int] | None = None,
    ) -> None:
        """`order` are those that may leave; `spare` [n_layers] how many each layer can do without,
        None: all.
        """
        self._n_free, self._order, self._newest = n_free, order, newest
        self._space, self._spare = space, spare

    def first_for(self, newcomer: int) -> int | None:
        """Whose slot it would take; FREE: one that nobody holds; None: there is none."""
        if self._n_free:
            return FREE
        last = None
        for key in self._order:
            if self._spare is not None and not self._is_spared(key, newcomer):
                continue
            if key != self._newest:
                return key
            last = key
        return last

    def take(self, victim: int, newcomer: int) -> None:
        """The newcomer takes the slot that `first_for` said."""
        self._newest = FREE  # it is the newcomer now, who cannot leave
        if victim == FREE:
            self._n_free -= 1
        else:
            self._order.remove(victim)
        if self._spare is not None:
            self._spare[self._space.layer(newcomer)] += 1
            if victim != FREE:
                self._spare[self._space.layer(victim)] -= 1

    def _is_spared(self, key: int, newcomer: int) -> bool:
        assert self._spare is not None
        layer = self._space.layer(key)
        return self._spare[layer] > 0 or layer == self._space.layer(newcomer)
