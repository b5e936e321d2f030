"""Slots and host memory hold the experts together: each is somewhere, every byte read is right."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from tests.experts.rig import FULL, SPACE, MakeRig, Rig, random_routing
from vkmoe.errors import DeviceLostError, GpuError
from vkmoe.gpu import arena

# Host slots of 16 and of 8 experts, by slots: both sizes have some to spare.
N_PLACES = {1: 14, 2: 12, 3: 10, 4: 8}


@pytest.fixture
def make(make: MakeRig) -> MakeRig:
    """Makes rigs whose slots and places hold the experts together."""
    return partial(make, fills=True, exchanges=True)


def n_written_back(rig: Rig) -> int:
    return rig.cache.counters.n_written_back


@pytest.mark.parametrize("delay", [None, FULL(0), 2])
@pytest.mark.parametrize("n_landing", [0, 2])
@pytest.mark.parametrize("allocation", ["layer", "global"])
@pytest.mark.parametrize("policy", [FULL("lru"), "forecast"])
@pytest.mark.sample(4)
def test_experts_exchange_places_and_every_byte_is_right(
    make: MakeRig, policy: str, allocation: str, n_landing: int, delay: int | None
) -> None:
    """The smaller size has 16 experts, 6 slots and 11 places: one to spare."""
    rig = make(3, 11, delay, n_landing, policy=policy, allocation=allocation)
    rng = np.random.default_rng(3)
    start = rig.residency.present.copy()
    for token in range(60):
        rig.token(random_routing(rng, first=token // 20))
    moved = (rig.residency.present != start).sum(axis=1)
    assert (moved[[0, 2]] > 0).all() and n_written_back(rig) > 3
    assert rig.cache.pool is not None and rig.cache.pool.counters.n_reads >= SPACE.n_keys - 1


def test_what_is_used_most_comes_to_the_device(make: MakeRig) -> None:
    """Experts that had no place of their own leave for those that are used from now on."""
    rig = make(3, 11)
    used = np.array([(6, 7)] * 3, np.uint32)
    for _ in range(12):
        hits = rig.token(used)
    assert hits[[0, 2]].all(), "the experts of every token are not in slots"


def test_without_anything_to_spare_nothing_leaves(make: MakeRig) -> None:
    """Experts without a place stay, and those with one are read there."""
    rig = make(4, 8)
    start, rng = rig.residency.present.copy(), np.random.default_rng(1)
    for _ in range(10):
        rig.token(random_routing(rng))
    assert (rig.residency.present[[0, 2]] == start[[0, 2]]).all() and n_written_back(rig) == 0


def test_what_is_to_leave_is_backed_and_no_more(make: MakeRig) -> None:
    """With half of the slots to spare, what leaves next has a place; the others are not copied."""
    rig = make(4, 14)
    used = np.array([(0, 1)] * 3, np.uint32)
    for _ in range(10):
        rig.token(used)
    before = n_written_back(rig)
    for _ in range(10):
        rig.token(used)
    assert n_written_back(rig) == before
    backing = rig.residency.backing
    assert backing is not None
    order = rig.residency.leaving_order()
    assert not backing.unbacked[order[:, 0]].any()


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_layer_by_layer_nothing_is_read_from_the_file(make: MakeRig, slots: int) -> None:
    rig = make(slots, N_PLACES[slots] + 1, 0)
    assert rig.cache.pool is not None
    n_reads, rng = rig.cache.pool.counters.n_reads, np.random.default_rng(slots)
    for _ in range(20):
        rig.stepped_token(random_routing(rng))
    assert rig.cache.pool.counters.n_reads == n_reads


@pytest.mark.parametrize("delay", [None, 1])
@pytest.mark.parametrize("at_start", [False, True])
def test_copies_that_fail_leave_every_expert_somewhere(
    make: MakeRig, delay: int | None, at_start: bool
) -> None:
    rig = make(3, 12, delay)
    rng = np.random.default_rng(5)
    for _ in range(6):
        rig.uploads.failures, rig.uploads.fail_at_start = 2, at_start
        for _ in range(5):
            rig.token(random_routing(rng))
        rig.uploads.failures = 0
        for _ in range(5):
            rig.token(random_routing(rng))
    assert rig.cache.counters.n_uploads > 0 and n_written_back(rig) > 0


def test_a_lost_device_is_passed_on(make: MakeRig) -> None:
    rig = make(3, 11)
    rig.uploads.failures, rig.uploads.error = 1000, DeviceLostError
    rng = np.random.default_rng(5)
    with pytest.raises(DeviceLostError):
        for _ in range(20):
            rig.token(random_routing(rng))


@pytest.mark.parametrize("n_landing", [0, 2])
@pytest.mark.parametrize("delay", [None, 1])
@pytest.mark.sample(2)
def test_slots_come_and_go_as_far_as_host_memory_has_room(
    make: MakeRig, delay: int | None, n_landing: int
) -> None:
    """What was to be written back waits for the submit that reads its place, which is over then."""
    n_resized = n_waited = 0
    for seed in range(6):
        rig = make(4, 12, delay, n_landing)
        cache, rng = rig.cache, np.random.default_rng(seed)
        assert cache.pool is not None
        assert not cache.room_for([1] * 3), "the smaller size has 16 experts, 8 slots, 12 places"
        for token in range(18):
            rig.run(random_routing(rng, first=token // 5))
            n_slots = int(rng.integers(2, 5))
            if token % 3 == 2 and cache.room_for([n_slots] * 3):
                n_waited += len(cache.pool.locations.waiting())
                cache.resize([n_slots] * 3)
                cache.check_integrity()
                n_resized += 1
    assert n_resized > 12 and n_waited > 0, (n_resized, n_waited)


def test_experts_are_written_back_however_few_copies_a_queue_takes(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vkmoe.experts.store.cache.OVERLAPPED_SUBMIT_BYTES", 1)
    rig = make(6, 8, 1)  # 4 places to spare, of 12 slots of the smaller size
    rig.uploads.room = 1
    for token in range(6):
        rig.run(random_routing(np.random.default_rng(token)))
    assert rig.cache.room_for([4] * 3)
    rig.cache.resize([4] * 3)
    rig.cache.check_integrity()
    assert rig.residency.locations.capacities.tolist() == [4] * 3


def test_memory_is_given_back_as_far_as_host_memory_has_room(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "SLOT_CHUNK", 1024)
    for seed in range(8):
        rig = make(4, 10)
        rng = np.random.default_rng(seed)
        for _ in range(5):
            rig.run(random_routing(rng))
        n_slots, n_freed = rig.cache.give_back(1 << 30)
        assert 0 < n_slots < 12 and n_freed > 0
        for _ in range(20):
            rig.run(random_routing(rng))


@pytest.mark.parametrize("delay", [None, FULL(0), 2])
@pytest.mark.parametrize("n_landing", [FULL(0), 2])
@pytest.mark.sample(2)
def test_places_go_and_experts_come_from_the_file_until_they_are_back(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch, delay: int | None, n_landing: int
) -> None:
    """Those in slots as well leave first: while these suffice, the file is not read."""
    monkeypatch.setattr(arena, "SLOT_CHUNK", 1024)
    rig, rng, ways = make(3, 12, delay, n_landing), np.random.default_rng(2), list[bool]()
    cache, pool = rig.cache, rig.cache.pool
    assert pool is not None
    for turn in range(24):
        if turn % 4 < 2:  # a place of a large expert, then four of the small ones, too
            assert cache.give_back_places((1, 1 << 30)[turn % 4])[0] > 0
        else:
            cache.take_back(1 << 30, of_host=True)
        cache.regain()
        cache.check_integrity()
        ways.append(cache.reads_file)
        assert cache.reads_file or pool.is_whole
        for _ in range(3):
            (rig.stepped_token if cache.reads_file else rig.run)(random_routing(rng))
    assert ways == [False, True, False, False] * 6


def test_what_cannot_be_read_again_stays_in_the_file(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "SLOT_CHUNK", 1024)
    rig, rng = make(3, 12), np.random.default_rng(2)
    assert rig.cache.give_back_places(1 << 30)[0] > 0 and rig.cache.reads_file
    rig.cache.take_back(1 << 30, of_host=True)
    for error in (GpuError, KeyboardInterrupt):
        rig.file.failures, rig.file.error = 1, error
        with suppress(KeyboardInterrupt):
            rig.cache.regain()
        assert rig.cache.reads_file
        rig.file.failures = 0
        rig.stepped_token(random_routing(rng))
    rig.cache.regain()
    assert not rig.cache.reads_file
    rig.run(random_routing(rng))


def test_a_pool_that_batches_need_as_it_is_gives_nothing(make: MakeRig) -> None:
    rig = make(6, 7)  # of the 8 experts of a layer
    assert rig.cache.give_back_places(1 << 30) == (0, 0) and not rig.cache.reads_file


@pytest.mark.parametrize("delay", [None, 0, 1])
def test_ctrl_c_while_experts_are_written_back_is_survived(
    make: MakeRig, delay: int | None
) -> None:
    """By a token, or because slots go: every expert stays somewhere, and no byte is wrong."""
    rig, rng, n_interrupted = make(3, 12, delay, 1), np.random.default_rng(7), 0
    whole = rig.cache.most_slots
    for turn in range(90):
        rig.run(random_routing(rng))
        rig.uploads.failures, rig.uploads.error = 1, KeyboardInterrupt
        try:
            if turn % 3 == 0 and rig.cache.room_for([2] * len(whole)):
                rig.cache.resize([2] * len(whole))
            rig.run(random_routing(rng))
            rig.cache.resize(whole)
        except KeyboardInterrupt:
            n_interrupted += 1
        rig.uploads.failures = 0
        rig.table.end_all()  # as the engine does before each token
    assert n_interrupted > 20 and n_written_back(rig) > 10
