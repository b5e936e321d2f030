"""Typed face of the native extension: sums of what experts are worth, and which one leaves.

Each sum has a fixed order. Functions raise TypeError for arrays of another type (those that are
written to must be contiguous too), ValueError for shapes and ids that do not fit; then nothing was
written.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide.locations import Move

def learn_token(
    experts: NDArray[np.uint16],
    shares: NDArray[np.uint16],
    row: int,
    ids: NDArray[np.uint32],
    n: int,
) -> None:
    """Count in a row that its token used `ids` [n_layers, n_used], as one part in `n`.

    *Mutates* `experts` and `shares` [n_rows, n_layers, width]: which experts a token used, and in
    what share of its occurrences, from 0 (no entry) to 65535. An expert without an entry takes that
    of the smallest share, if that is smaller than its own.
    """

def expect(
    experts: NDArray[np.uint16],
    shares: NDArray[np.uint16],
    rows: Sequence[int],
    factors: Sequence[float],
    n_experts: int,
) -> NDArray[np.float64]:
    """Return the sum of the shares in `rows`, from 0 to 1 and each times its row's factor.

    It is [n_layers, n_experts]; `experts` and `shares` are those of `learn_token`.
    """

def admit(
    keys: NDArray[np.int64],
    bids: NDArray[np.float64] | None,
    pools: NDArray[np.int64],
    slot_bytes: NDArray[np.int64],
    n_landed: int,
    budget_bytes: float,
    holders: NDArray[np.int64],
    values: NDArray[np.float64],
    n_free: NDArray[np.int64],
    newest: NDArray[np.int64],
    floors: NDArray[np.int64],
    may_leave: NDArray[np.bool_],
    needed: NDArray[np.bool_],
    recency: NDArray[np.int32],
    n_experts: int,
) -> list[tuple[int, int]]:
    """Choose which newcomers get slots: (index of the newcomer, the expert that leaves), in turn.

    Newcomers [n] are `keys`, in slots of `slot_bytes` of one of `pools`, an index; -1: of a pool
    with a free slot for each of them. The highest of `bids` comes first; None: they do not bid. All
    but the first `n_landed` are copied, as long as `budget_bytes` last. A victim is a key, or -1: a
    free slot. Residents are the `holders` [n_pools, n_slots], n_keys where a slot has none; of
    those that `may_leave` [n_keys + 1] and are not `needed` [n_keys] the one of the lowest of
    `values` [n_pools, n_slots] leaves first, of equals as float32 the least in `recency`
    [n_keys + 1]. One whose value is not below the bid stays, and its pool is closed. The `newest`
    [n_pools] of a pool leaves only if no other may, and none of a layer that has no more residents
    than the pool's floor [n_pools], unless for one of that layer. `n_free` [n_pools] slots are
    given first.
    """

class Turn:
    """Works on arrays that Python made, and keeps: what a token used is noted, and decided on.

    They are those of `Record` (decide/locations.py) and `Uses` (decide/policies.py), and `counts`
    [n_keys] of uses, the main one last. decide/turn.py calls this.
    """

    def __init__(
        self,
        state: NDArray[np.uint8],
        slot_of: NDArray[np.int64],
        changed: NDArray[np.bool_],
        pool_of: NDArray[np.int64],
        recency: NDArray[np.int32],
        again: NDArray[np.bool_],
        newest: NDArray[np.int64],
        floors: NDArray[np.int64],
        slot_bytes: NDArray[np.int64],
        counts: Sequence[NDArray[np.float64]],
        n_experts: int,
        move: type[Move],
    ) -> None: ...
    def derive(
        self,
        pins: NDArray[np.uint8],
        entry_of: NDArray[np.int64],
        holders: NDArray[np.int64],
        unpinned: NDArray[np.bool_],
        free: NDArray[np.int64],
        n_free: NDArray[np.int64],
    ) -> None:
        """Work on this `Derived` (decide/locations.py) from now on."""

    def observe(
        self, ids: NDArray[np.uint32], weights: Sequence[float], first_turn: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Note that a token used `ids` [n_layers, n_used]; return keys, and those without a slot.

        Each count grows by its weight. Uses are as recent as the numbers from `first_turn` on say.
        """

    def decide(
        self,
        looked_at: tuple[
            NDArray[np.uint16],
            NDArray[np.uint16],
            list[float],
            list[tuple[list[int], list[float], float]],
            list[float],
            int,
        ],
        missed: tuple[NDArray[np.int64], Sequence[int], NDArray[np.int64]],
        bounds: tuple[
            NDArray[np.uint8] | None,
            bool,
            tuple[float, float],
            tuple[float, int],
            float,
            int,
        ],
    ) -> tuple[
        NDArray[np.float64],
        NDArray[np.float64] | None,
        list[Move],
        list[int],
        bool,
    ]:
        """Give experts slots: return worth, scores, moves, the keys guessed, what is to be derived.

        `looked_at` is a `LookedAt` (decide/foresight.py). `missed`: the keys that have no slot,
        those of them that landed, and those that may not leave. `bounds`: what is at home (None:
        all), and whether only that may leave; tolls of misses and of guesses; the score above which
        is guessed, and how many; bytes to copy; the first number of those that say how recent an
        entry is. The last: whether a pin changed what is
        derived, which has to be found anew.
        """

def misses(
    keys: NDArray[np.int64],
    state: NDArray[np.uint8],
    hits: NDArray[np.bool_] | None,
    stored: NDArray[np.bool_] | None,
    span_bytes: NDArray[np.int64],
    n_landing: int,
) -> tuple[NDArray[np.bool_], int, NDArray[np.int64], NDArray[np.int64]]:
    """Return which uses were hits, the bytes of distinct experts that were missed, which landed.

    `hits` mark which of `keys` [n_rows, n_layers, n_used] had slots; None: those that are present
    by their `state` [n_keys]. `stored` marks those that kernels stored whole; an expert of a layer
    has so many `span_bytes` [n_layers]. Behind the keys that landed comes the place of their layer
    that each is in: its rank among what its row missed there, below `n_landing`.
    """

def write_addresses(
    changed: NDArray[np.bool_],
    state: NDArray[np.uint8],
    slot_of: NDArray[np.int64],
    of_slots: NDArray[np.uint64],
    homes: NDArray[np.uint64],
    entries: NDArray[np.uint64],
) -> NDArray[np.int64]:
    """Write where the experts are that changed, and return their keys.

    *Mutates* the first of `entries`, one for each key, and takes the marks of `changed` [n_keys]
    away. An expert that is present is in its slot, the others are at home.
    """

def begin_moves(
    moves: Sequence[Move],
    state: NDArray[np.uint8],
    slot_of: NDArray[np.int64],
    readable: NDArray[np.uint8] | None,
    last_mapped: NDArray[np.int64],
    version: int,
    oldest_read: int,
) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
    """Note which slots others leave for these moves, and find the copies that can begin.

    *Mutates* `last_mapped` [n_slots]: no version after `version` leads to slots with a victim.
    Returns how many victims there are, and the experts that wait, with their slots: those that are
    present in `readable` (None: all), into slots to which no version since `oldest_read` led. They
    are in the order of keys, but those of `moves` come last, in their order.
    """

def land(
    state: NDArray[np.uint8],
    slot_of: NDArray[np.int64],
    changed: NDArray[np.bool_],
    entry_of: NDArray[np.int64],
    holders: NDArray[np.int64],
    slots: NDArray[np.int64],
    keys: NDArray[np.int64],
    indices: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Let experts keep the slots to land in that they are in, which get the slots they had.

    *Mutates* the arrays of decide/locations.py; `slots` [n_layers, n_landing] are those to land in,
    and `indices` say which of their layer's the experts of `keys` are in. Returns the numbers of
    those, layer * n_landing + index.
    """

def offer(
    waiting: NDArray[np.int64],
    slots: NDArray[np.int64],
    last_mapped: NDArray[np.int64],
    addresses: NDArray[np.uint64],
    oldest_read: int,
    offered: NDArray[np.uint64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Offer slots to land in that wait until no submit reads them; those that still wait, to none.

    *Mutates* `offered` [n_layers, n_offered]: their addresses, or 0. `waiting` are numbers as
    `land` returns them. A slot can be offered if the version that is `last_mapped` to it [n_slots]
    is before `oldest_read`. Returns which entries were written, and which slots still wait.
    """

def blend(rows: Sequence[NDArray[np.float64]], factors: Sequence[float]) -> NDArray[np.float64]:
    """Return the sum of `rows` [n], each times its factor: [n]. There must be a row."""

def products(rows: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the sums of the products of every two of `rows` [n]: [n_rows, n_rows]."""
