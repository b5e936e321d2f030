"""What a run missed and where it landed, and the table's new entries, beside NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vkmoe.experts import _residency
from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.locations import ABSENT, COPYING, FREE, PRESENT, WAITING, Move

SPACE, N_USED = KeySpace(5, 12), 4
SIZES = np.array([1, 10, 100, 1000, 10000])  # bytes of each layer's experts


def run(random: np.random.Generator, n_rows: int) -> Any:
    """Distinct keys in each row and layer [n_rows, n_layers, n_used]."""
    shape = (n_rows, SPACE.n_layers, SPACE.n_experts)
    ids = np.argsort(random.random(shape), axis=2)[..., :N_USED]
    return SPACE.keys_of(ids.astype(np.uint32))


@pytest.mark.parametrize("n_rows", [1, 3])
def test_misses_are_counted_once_and_land_by_their_rank(n_rows: int) -> None:
    random, n_landed = np.random.default_rng(n_rows), 0
    for n_landing in (0, 2, 9) * 20:
        keys = run(random, n_rows)
        hits, stored = random.random((2, *keys.shape)) < 0.5
        state = np.zeros(SPACE.n_keys, np.uint8)
        given = (keys, state, hits, stored, SIZES, n_landing)
        same, n_bytes, landed, places = _residency.misses(*given)
        distinct = np.unique(keys[~hits]) // SPACE.n_experts
        assert same is hits and n_bytes == SIZES[distinct].sum()
        ranks = (~hits).cumsum(axis=2)
        here = ~hits & stored & (ranks <= n_landing)
        assert landed.tolist() == keys[here].tolist()
        assert places.tolist() == (ranks[here] - 1).tolist()
        nothing = _residency.misses(keys, state, hits, None, SIZES, n_landing)[2:]
        assert not nothing[0].size and not nothing[1].size
        n_landed += len(landed)
    assert n_landed > 100


def test_hits_are_the_experts_whose_bytes_are_there() -> None:
    random = np.random.default_rng(9)
    keys = run(random, 2)
    state = random.integers(ABSENT, COPYING + 1, SPACE.n_keys).astype(np.uint8)
    hits, n_bytes, _, _ = _residency.misses(keys, state, None, None, SIZES, 2)
    assert (hits == (state[keys] == PRESENT)).all()
    assert n_bytes == _residency.misses(keys, state, hits, None, SIZES, 2)[1] > 0


def test_copies_begin_into_slots_that_no_submit_reads() -> None:
    random, n_begun = np.random.default_rng(5), 0
    for oldest in range(2, 20):
        state = random.integers(ABSENT, COPYING + 1, 60).astype(np.uint8)
        readable = state[random.permutation(60)] if oldest % 2 else None
        slot_of, last_mapped = random.permutation(60), random.integers(0, 20, 60)
        last = random.permutation(np.flatnonzero(state == WAITING))[:5].tolist()
        moves = [Move(0, key, FREE if key % 2 else key - 1) for key in last]
        given = (state, slot_of, readable, last_mapped)
        victims = slot_of[[move.key for move in moves if move.victim != FREE]]
        expected = last_mapped.copy()
        expected[victims] = oldest - 2
        n_evicted, keys, slots = _residency.begin_moves(moves, *given, oldest - 2, oldest)
        assert n_evicted == len(victims) and (last_mapped == expected).all()
        able = (state == WAITING) & (expected[slot_of] < oldest)
        if readable is not None:
            able &= readable == PRESENT
        others = np.setdiff1d(np.flatnonzero(able), last).tolist()
        assert keys.tolist() == others + [key for key in last if able[key]]
        assert slots.tolist() == slot_of[keys].tolist()
        n_begun += len(keys)
    assert n_begun > 50


def test_entries_lead_to_slots_or_home_where_something_changed() -> None:
    random = np.random.default_rng(3)
    slots, homes = np.arange(100, 130, dtype=np.uint64), np.arange(60, dtype=np.uint64)
    for share in (0.0, 0.1, 1.0):
        changed = random.random(60) < share
        state = random.integers(ABSENT, COPYING + 1, 60).astype(np.uint8)
        slot_of, entries = random.integers(0, 30, 60), np.full(70, 7, np.uint64)
        expected, keys = entries.copy(), np.flatnonzero(changed)
        expected[keys] = np.where(state == PRESENT, slots[slot_of], homes)[keys]
        written = _residency.write_addresses(changed, state, slot_of, slots, homes, entries)
        assert written.tolist() == keys.tolist() and not changed.any()
        assert (entries == expected).all()


def test_slots_to_land_in_are_offered_once_no_submit_reads_them() -> None:
    random, n_later = np.random.default_rng(4), 0
    landing = random.permutation(40)[:15].reshape(5, 3)
    addresses = np.arange(900, 940, dtype=np.uint64)
    for oldest in range(20):
        waiting = random.permutation(15)[: random.integers(0, 8)]
        last_mapped, offered = random.integers(0, 20, 40), np.full((5, 4), 7, np.uint64)
        expected, able = offered.copy(), last_mapped[landing.ravel()[waiting]] < oldest
        layers, indices = np.divmod(waiting, 3)
        found = np.where(able, addresses[landing[layers, indices]], np.uint64(0))
        expected[layers, indices] = found
        written, later = _residency.offer(waiting, landing, last_mapped, addresses, oldest, offered)
        assert written.tolist() == (4 * layers + indices).tolist()
        assert later.tolist() == waiting[~able].tolist()
        assert (offered == expected).all()
        n_later += len(later)
    assert n_later > 10


def test_what_does_not_fit_is_refused() -> None:
    keys = run(np.random.default_rng(0), 2)
    hits = np.zeros(keys.shape, np.bool_)
    misses: Any = _residency.misses
    state = np.zeros(SPACE.n_keys, np.uint8)
    right = (keys, state, hits, None, SIZES)
    wrongs = {0: keys[0], 1: state[1:], 2: hits[1:], 3: hits[..., 1:], 4: SIZES[1:]}
    for wrong in [*wrongs.items(), (0, keys + SPACE.n_keys)]:
        with pytest.raises(ValueError, match="not"):
            misses(*[wrong[1] if i == wrong[0] else a for i, a in enumerate(right)], 2)
    begin_moves: Any = _residency.begin_moves
    numbers, last_mapped = np.arange(SPACE.n_keys), np.zeros(3, np.int64)
    for move in ((1, 2), (0, "1", FREE, False), Move(0, 60, FREE), Move(0, 5, FREE)):
        with pytest.raises((ValueError, TypeError), match=r"not|no such|integer"):
            begin_moves([move], state, numbers, None, last_mapped, 1, 2)
    kinds = (np.bool_, np.uint8, np.int64, np.uint64, np.uint64, np.uint64)
    arrays: list[Any] = [np.ones(4, kind) for kind in kinds]
    arrays[2][:], arrays[3] = 0, arrays[3][:1]
    for place in (1, 2, 4, 5):
        with pytest.raises(ValueError, match=r"not|fewer"):
            _residency.write_addresses(*[a[:3] if i == place else a for i, a in enumerate(arrays)])
    arrays[2][1] = 1
    with pytest.raises(ValueError, match="no such slot"):
        _residency.write_addresses(*arrays)
