"""A host pool smaller than the model: every byte a layer reads is right, and misses are awaited."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter_ns

import numpy as np
import pytest

from tests.experts.rig import FULL, N_USED, SPACE, MakeRig, random_routing
from vkmoe.errors import DeviceLostError, VkmoeError
from vkmoe.experts.store.copies import Copy, CopyBudget, QueueFullError, Upload


@pytest.mark.parametrize("delay", [None, FULL(0), 2])
@pytest.mark.parametrize("slots", [0, FULL(1), 3])
@pytest.mark.parametrize("host_slots", [N_USED, 5, 16])
@pytest.mark.sample(4)
def test_every_layer_reads_the_right_bytes(
    make: MakeRig, host_slots: int, slots: int, delay: int | None
) -> None:
    rig = make(slots, host_slots, delay)
    rng = np.random.default_rng(host_slots)
    for _ in range(20):
        rig.stepped_token(random_routing(rng, 0.0))
    pool = rig.cache.pool
    assert pool is not None
    counters = pool.counters
    assert counters.n_uses > 0 and (counters.n_reads > 8 or host_slots == 16)
    assert (slots == 0) == (rig.cache.counters.n_uploads == 0)


def test_an_expert_in_a_slot_leaves_the_pool_first(make: MakeRig) -> None:
    rig = make(2, 4)
    used = np.array([(0, 1)] * 3, np.uint32)
    rig.stepped_token(used)
    rig.stepped_token(used)  # in slots now
    assert rig.residency.hits(used).all()
    pool = rig.cache.pool
    assert pool is not None
    rig.stepped_token(np.array([(2, 3)] * 3, np.uint32))
    here = pool.locations.present
    assert not here[[0, 1]].all(), "twice in memory while others were read again"


def test_no_place_is_freed_or_left_while_it_is_read_into(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expert that was guessed at may still be on its way from the file."""
    monkeypatch.setattr("vkmoe.gpu.arena.SLOT_CHUNK", 1024)
    rig = make(0, 10)
    pool = rig.cache.pool
    assert pool is not None
    rng = np.random.default_rng(4)
    for _ in range(3):
        absent = np.flatnonzero(~pool.locations.resident)
        pool.want(absent[:2], np.zeros(SPACE.n_keys, np.bool_))
        assert pool.locations.any_arriving
        assert rig.cache.give_back_places(1)[0] > 0
        assert not pool.locations.any_arriving
        rig.cache.check_integrity()
        rig.stepped_token(random_routing(rng, 0.0))


def test_what_is_in_neither_tier_has_no_address(make: MakeRig) -> None:
    rig = make(0, N_USED)
    rng = np.random.default_rng(1)
    rig.stepped_token(random_routing(rng, 0.0))
    assert (rig.table.entries == 0).sum() == SPACE.n_keys - 2 * N_USED


def test_reading_while_something_is_computed_is_hidden(make: MakeRig) -> None:
    rig = make(0, 6, 0)
    pool = rig.cache.pool
    assert pool is not None and pool.counters.hidden is None, "what was read at the start counts"
    absent = np.flatnonzero(~pool.locations.present)
    began = perf_counter_ns()
    pool.want(absent[:1], np.zeros(SPACE.n_keys, np.bool_))
    pool.tier.collect(wait=True)
    pool.computed((began, perf_counter_ns()))
    first = pool.counters
    assert first.hidden == 1.0 and first.read_ns > 0
    rig.stepped_token(random_routing(np.random.default_rng(8), 0.0))  # tells of nothing computed
    pool.computed((perf_counter_ns(), perf_counter_ns() + 1))
    both = pool.counters
    assert both.read_ns > first.read_ns and both.hidden == first.read_ns / both.read_ns


@pytest.mark.parametrize("at_start", [False, True])
def test_a_read_that_fails_once_is_repeated(
    make: MakeRig, at_start: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(2, 3, 0)
    rng = np.random.default_rng(2)
    with caplog.at_level(logging.WARNING, "vkmoe"):
        for _ in range(10):
            rig.file.failures, rig.file.fail_at_start = 1, at_start
            rig.stepped_token(random_routing(rng, 0.0))
    assert rig.cache.pool is not None and rig.cache.pool.counters.n_failed > 5
    assert len(caplog.records) == 1


def test_a_file_that_cannot_be_read_ends_the_token_with_its_error(make: MakeRig) -> None:
    rig = make(2, 3, 0)
    rng = np.random.default_rng(3)
    rig.stepped_token(random_routing(rng, 0.0))
    rig.file.failures = 1000
    with pytest.raises(VkmoeError, match="injected") as told:
        for _ in range(10):
            rig.stepped_token(random_routing(rng, 0.0))
    assert told.value.__cause__ is None, "it caused itself"
    rig.file.failures = 0
    rig.table.end_all()
    for _ in range(5):
        rig.stepped_token(random_routing(rng, 0.0))


def test_a_lost_device_is_passed_on(make: MakeRig) -> None:
    rig = make(2, 3, 0)
    rig.file.failures, rig.file.error = 1, DeviceLostError
    rng = np.random.default_rng(4)
    with pytest.raises(DeviceLostError):
        for _ in range(10):
            rig.stepped_token(random_routing(rng, 0.0))


@pytest.mark.parametrize("delay", [FULL(None), FULL(0), 1])
def test_ctrl_c_between_submits_and_while_the_file_is_read_is_survived(
    make: MakeRig, delay: int | None
) -> None:
    """A token that ends at a layer, or amid the reads for it, leaves the next ones right."""
    rig, rng = make(2, 3, delay), np.random.default_rng(5)
    n_interrupted = 0
    for turn in range(90):
        routing = random_routing(rng, 0.0)
        rig.table.end(rig.begin())
        rig.uploads.error = rig.file.error = KeyboardInterrupt
        try:
            for layer in range(turn % 4):
                rig.uploads.failures, rig.file.failures = turn % 3 == 1, turn % 3 == 2
                rig.cache.need(layer, routing[layer][None])
                rig.table.end(rig.begin(first=False))
        except KeyboardInterrupt:
            n_interrupted += 1
        rig.uploads.failures = rig.file.failures = 0
        rig.table.end_all()  # as the engine does before each token
        rig.stepped_token(random_routing(rng, 0.0))
    assert n_interrupted > 20


def test_a_profile_fills_slots_and_pool(make: MakeRig) -> None:
    counts = np.zeros(SPACE.n_keys)
    counts[[1, 2, 3, 8 + 3, 8 + 4, 8 + 5, 16, 16 + 5, 16 + 6]] = [3, 2, 1] * 3
    rig = make(2, 8, seed=counts)
    assert rig.cache.pool is not None
    hits = rig.stepped_token(np.array([(1, 3), (3, 5), (0, 6)], np.uint32))
    assert hits[:, 0].all() and not hits[:, 1].any()
    assert rig.cache.pool.counters.n_hits == 3


def test_a_warm_start_does_not_fill_the_pool_with_who_has_a_slot(make: MakeRig) -> None:
    rig = make(2, 4, seed=np.arange(SPACE.n_keys, dtype=np.float64) + 1)
    assert rig.cache.pool is not None
    counters = rig.cache.pool.counters
    assert counters.n_reads > 0 and rig.cache.counters.n_uploads == 6
    assert (counters.n_uses, counters.n_hits, counters.read_ns, counters.hidden) == (0, 0, 0, None)
    assert counters.stall_ns == rig.cache.counters.stall_ns == 0, "no token waited yet"
    assert rig.residency.present.sum() == 6
    assert not (rig.cache.pool.locations.present & rig.residency.present.ravel()).any()
    assert rig.cache.pool.locations.present.sum() == 8, "there is room for others"
    rng = np.random.default_rng(6)
    for _ in range(5):
        rig.stepped_token(random_routing(rng, 0.0))


def test_guesses_are_right_if_the_next_layer_uses_them(make: MakeRig) -> None:
    rig = make(0, 8, 0)
    pool = rig.cache.pool
    assert pool is not None
    absent = np.flatnonzero(~pool.locations.present)
    guessed, used = absent[:2], np.array([absent[0], absent[3]])
    pool.want(guessed, np.zeros(SPACE.n_keys, np.bool_))
    for _ in range(2):  # the second time nobody was guessed
        pool.need(used, rig.cache._steps._kept(used), lambda: rig.cache._steps._make_room(used))
        assert (pool.counters.n_hinted, pool.counters.n_right) == (2, 1)


def test_guesses_that_the_queue_refused_do_not_go_before_who_is_needed(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(0, 8, 0)
    pool, start = rig.cache.pool, rig.file.start
    assert pool is not None

    def full(copies: Sequence[Copy], urgent: bool = False) -> Upload:
        if not urgent:
            raise QueueFullError("full")
        return start(copies, urgent)

    monkeypatch.setattr(rig.file, "start", full)
    absent = np.flatnonzero(~pool.locations.present)
    guessed, used = absent[:2], absent[2:4]
    pool.want(guessed, np.zeros(SPACE.n_keys, np.bool_))
    assert np.array_equal(np.flatnonzero(pool.locations.arriving), np.sort(guessed))
    pool.need(used, rig.cache._steps._kept(used), lambda: rig.cache._steps._make_room(used))
    assert [copy[0] for copy in rig.file.copied] == used.tolist()
    assert pool.counters.n_cancelled == 2 and not pool.locations.any_arriving
    pool.residency.check_integrity()


class SmallBudget(CopyBudget):
    """Lets one small expert be copied in every token."""

    def __init__(self) -> None:
        super().__init__(None, 0)

    @property
    def n_bytes(self) -> float:
        return 300.0


def test_copies_ahead_keep_to_the_token_s_budget(make: MakeRig) -> None:
    """Of all layers together, however soon they arrive."""
    rig = make(3, 16, 0, policy="forecast", executor="stepped")
    object.__setattr__(rig.cache._ways, "budget", SmallBudget())
    rig.cache._steps._budget = rig.cache._ways.budget
    rng = np.random.default_rng(7)
    before, most = 0, 0
    for _ in range(40):
        rig.stepped_token(random_routing(rng, 0.0))
        most = max(most, rig.cache.counters.n_hinted - before)
        before = rig.cache.counters.n_hinted
    assert most <= 1


def test_a_use_of_a_batch_is_counted_as_often_as_it_occurs_and_read_once(make: MakeRig) -> None:
    """Several tokens that need the same experts, and all together as many as there is room for."""
    rig = make(0, 3)
    pool = rig.cache.pool
    assert pool is not None
    absent = np.flatnonzero(~pool.locations.present[: SPACE.n_experts])[:3]
    used = absent[[0, 1, 1, 2, 0, 2]]
    kept = np.zeros(SPACE.n_keys, np.bool_)
    kept[used] = True
    n_reads = pool.counters.n_reads
    pool.need(used, kept, lambda: kept)
    pool.need(used, kept, lambda: kept)
    counters = pool.counters
    assert (counters.n_uses, counters.n_hits, counters.n_reads - n_reads) == (12, 6, 3)
    assert rig.hinted == absent.tolist(), "the disk was not asked for all of them at once"
    assert pool.locations.present[absent].all()
