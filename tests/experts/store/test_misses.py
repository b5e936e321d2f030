"""What a run missed and where it landed, and the table's new entries, beside NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vkmoe.experts import _residency
from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.locations import ABSENT, COPYING, PRESENT

SPACE, N_USED = KeySpace(5, 12), 4


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
        n_missed, landed, places = _residency.misses(keys, hits, stored, 12, n_landing)
        distinct = np.unique(keys[~hits]) // SPACE.n_experts
        assert n_missed.tolist() == np.bincount(distinct, minlength=SPACE.n_layers).tolist()
        ranks = (~hits).cumsum(axis=2)
        here = ~hits & stored & (ranks <= n_landing)
        assert landed.tolist() == keys[here].tolist()
        assert places.tolist() == (ranks[here] - 1).tolist()
        nothing = _residency.misses(keys, hits, None, 12, n_landing)[1:]
        assert not nothing[0].size and not nothing[1].size
        n_landed += len(landed)
    assert n_landed > 100


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
    wrongs: list[Any] = [(keys[0], hits, None), (keys, hits[1:], None), (keys, hits, hits[..., 1:]),
                         (keys + 60, hits, None)]  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(ValueError, match="not"):
            misses(*wrong, SPACE.n_experts, 2)
    kinds = (np.bool_, np.uint8, np.int64, np.uint64, np.uint64, np.uint64)
    arrays: list[Any] = [np.ones(4, kind) for kind in kinds]
    arrays[2][:], arrays[3] = 0, arrays[3][:1]
    for place in (1, 2, 4, 5):
        with pytest.raises(ValueError, match=r"not|fewer"):
            _residency.write_addresses(*[a[:3] if i == place else a for i, a in enumerate(arrays)])
    arrays[2][1] = 1
    with pytest.raises(ValueError, match="no such slot"):
        _residency.write_addresses(*arrays)
