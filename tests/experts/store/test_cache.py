"""The expert cache against a reader that looks at every byte, on a slow and a failing queue."""

from __future__ import annotations

import logging
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.experts.pins import named, warm
from tests.experts.rig import FULL, N_USED, SPACE, MakeRig, random_routing
from vkmoe.choices import PolicyName
from vkmoe.errors import DeviceLostError, GpuError, OutOfMemoryError
from vkmoe.experts.decide.token_table import Upcoming
from vkmoe.experts.store.copies import CopyBudget, Uploads, _Upload
from vkmoe.gpu import arena
from vkmoe.gpu.device import Device
from vkmoe.gpu.link_speed import LinkSpeed

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def routing(*rows: tuple[int, ...]) -> Any:
    return np.array(rows, np.uint32)


def test_a_missed_expert_is_in_a_slot_for_the_next_token(make: MakeRig) -> None:
    rig = make()
    used = routing((0, 1), (2, 3), (4, 5))
    assert not rig.token(used).any()
    assert rig.token(used).all()
    assert rig.cache.counters.n_uploads == 6
    assert rig.cache.counters.upload_bytes == 2 * (256 + 768 + 256)
    assert rig.cache.counters.missed_bytes == 2 * (256 + 768 + 256)


def test_nothing_moves_while_everything_hits(make: MakeRig) -> None:
    rig = make()
    used = routing((0, 1), (2, 3), (4, 5))
    rig.token(used)
    rig.token(used)
    before = rig.cache.counters
    for _ in range(5):
        rig.token(used)
    assert rig.cache.counters == before


@pytest.mark.parametrize("policy", ["lru", "forecast"])
@pytest.mark.parametrize("allocation", ["layer", "global"])
@pytest.mark.parametrize("slots", [1, 2, 8])
@pytest.mark.sample(4)
def test_what_the_token_used_is_never_thrown_out_for_it(
    make: MakeRig, policy: PolicyName, allocation: str, slots: int
) -> None:
    """Adversarial: every token uses what the last one did not, at the smallest capacities."""
    rig = make(slots, allocation=allocation, policy=policy)
    for token in range(24):
        first = (2 * token) % SPACE.n_experts
        used = routing(*[(first, first + 1)] * 3)
        rig.token(used)
        held = set(np.flatnonzero(rig.residency.locations.resident).tolist())
        wanted = {layer * 8 + expert for layer in range(3) for expert in (first, first + 1)}
        if slots >= N_USED:
            assert wanted <= held, "an expert of this token lost its slot to another of it"
        else:
            assert len(wanted & held) == 3, "no expert of this token was taken in"


def test_a_slot_is_not_written_while_an_older_submit_reads_it(make: MakeRig) -> None:
    """Two submits in flight: the first still reads a slot whose expert the table has let go."""
    rig = make(2, delay=0)
    old, new = routing((0, 1), (0, 1), (0, 1)), routing((2, 3), (2, 3), (2, 3))
    rig.token(old)
    assert rig.token(old).all()
    first = rig.begin()
    rig.read(first, old)
    second = rig.begin()
    rig.end(second, new)  # decides to evict what the first submit reads
    third = rig.begin()
    rig.read(third, new)
    rig.end(first, old)  # every byte of the old experts must still be there
    rig.end(third, new)
    rig.cache.check_integrity()
    assert not rig.residency.hits(new).any(), "published before it could be copied"
    rig.token(new)
    assert rig.token(new).all()


def test_uploads_that_fail_leave_experts_at_home(
    make: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make()
    rng = np.random.default_rng(2)
    rig.uploads.failures = 1000
    with caplog.at_level(logging.WARNING, "vkmoe"):
        for _ in range(10):
            assert not rig.token(random_routing(rng)).any()
    assert len(caplog.records) == 1 and "read in place" in caplog.text
    assert rig.cache.counters.n_uploads == 0 < rig.cache.counters.n_failed_uploads
    rig.uploads.failures = 0
    used = routing((0, 1), (2, 3), (4, 5))
    rig.token(used)
    assert rig.token(used).all(), "the cache did not recover"


@pytest.mark.parametrize("error", [GpuError, OutOfMemoryError])
@pytest.mark.parametrize("delay", [None, 2])
def test_single_failures_at_any_time_change_nothing_read(
    make: MakeRig, delay: int | None, error: type[GpuError], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(3, delay=delay)
    rig.uploads.error = error
    rng = np.random.default_rng(3)
    for token in range(40):
        if token % 3 == 0:
            rig.uploads.failures, rig.uploads.fail_at_start = 1, token % 2 == 0
        rig.token(random_routing(rng))
    assert rig.cache.counters.n_failed_uploads > 5 and rig.cache.counters.n_uploads > 5


def test_a_lost_device_is_passed_on(make: MakeRig) -> None:
    rig = make()
    rig.uploads.failures, rig.uploads.error = 1, DeviceLostError
    rig.token(routing((0, 1), (2, 3), (4, 5)))
    with pytest.raises(DeviceLostError):
        rig.begin()


def test_a_copy_is_taken_back_while_a_submit_reads_what_it_replaces(make: MakeRig) -> None:
    rig = make(2, delay=1)
    rng = np.random.default_rng(3)
    used = random_routing(rng)
    for _ in range(4):
        rig.token(used)
    first, second = rig.begin(), rig.begin()
    rig.end(first, (used + 3) % SPACE.n_experts)
    blocked = rig.residency.locations.arriving.sum()
    assert blocked and not rig.cache._tier.is_copying
    rig.cache._tier.cancel(np.zeros(SPACE.n_keys, np.bool_))
    assert rig.cache.counters.n_cancelled == blocked and not rig.residency.locations.any_arriving
    rig.end(second, used)
    for _ in range(4):
        rig.token(random_routing(rng))


# ----- slots that are given back -----


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots or so are a chunk: only those at the end of each arena can be given back."""
    monkeypatch.setattr(arena, "SLOT_CHUNK", 1024)


@pytest.mark.parametrize("n_landing", [0, 2])
@pytest.mark.parametrize("delay", [None, 1])
@pytest.mark.parametrize("allocation", ["layer", FULL("global")])
def test_slots_are_given_back_between_tokens(
    make: MakeRig, small_chunks: None, allocation: str, delay: int | None, n_landing: int
) -> None:
    """What they held is read at home from then on; each layer keeps some, to the end."""
    rig = make(6, None, delay, n_landing, allocation, pins=(warm(1, 3),))
    rng, locations = np.random.default_rng(5), rig.residency.locations
    before, freed = rig.slots.n_bytes, 0
    while True:
        for _ in range(6):
            rig.token(random_routing(rng))
        n_held = int(locations.resident.sum())
        n_slots, n_bytes = rig.cache.give_back(1)
        freed += n_bytes
        rig.cache.check_integrity()
        assert rig.slots.n_bytes == before - freed
        if not n_slots:
            break
        assert n_bytes >= n_slots * 256
        assert n_held - int(locations.resident.sum()) <= n_slots + 3 * n_landing
        assert locations.capacities.sum() == int(locations.resident.sum()) + sum(
            locations.n_free_of_all
        )
    assert freed > 0 and (locations.capacities >= 1).all()
    assert (locations.capacities < [pool.capacity for pool in locations.pools]).all()
    n_hits = sum(rig.token(random_routing(rng, 3)).sum() for _ in range(40))
    assert n_hits > 0, "the slots that are left are used"
    assert rig.cache.give_back(1 << 40) == (0, 0), "no more can be given back"


def test_much_is_given_back_at_once(make: MakeRig, small_chunks: None) -> None:
    rig = make(6)
    rng = np.random.default_rng(6)
    for _ in range(6):
        rig.token(random_routing(rng))
    before = rig.slots.n_bytes
    n_slots, n_bytes = rig.cache.give_back(1 << 40)
    assert n_slots > 6 and before - n_bytes == rig.slots.n_bytes < before / 2
    for _ in range(6):
        rig.token(random_routing(rng))


@pytest.mark.parametrize("delay", [FULL(None), FULL(0), 3])
def test_slots_come_and_go_between_any_tokens(make: MakeRig, delay: int | None) -> None:
    """Also while copies are under way; no token reads a slot that is out of use."""
    rig = make(6, delay=delay, n_landing=1)
    rng, locations = np.random.default_rng(4), rig.cache.residency.locations
    whole = rig.cache.most_slots
    for _ in range(150):
        wanted = [int(rng.integers(1, n + 1)) for n in whole]
        rig.cache.resize(wanted)
        assert locations.capacities.tolist() == wanted and rig.cache.most_slots == whole
        rig.cache.check_integrity()
        for _ in range(int(rng.integers(0, 3))):
            rig.token(random_routing(rng))
        held = np.bincount(locations.pool_of[locations.resident], minlength=len(whole))
        assert (held <= wanted).all()


def test_residents_and_a_profile_are_there_for_the_first_token(make: MakeRig) -> None:
    rig = make(4, pins=(named(6, 7),))
    assert rig.token(routing((6, 7), (6, 7), (6, 7))).all()
    counts = np.zeros(SPACE.n_keys)
    counts[[1, 2, 8 + 3, 8 + 4, 16, 16 + 5]] = 3.0
    warm = make(4, seed=counts)
    assert warm.token(routing((1, 2), (3, 4), (0, 5))).all()


def test_an_expert_that_a_batch_misses_twice_is_missed_once(make: MakeRig) -> None:
    """Every use counts as a miss, but its bytes are read, and have a place to land, once."""
    rig = make(4)
    rig.token(routing((0, 1), (2, 3), (4, 5)))
    assert rig.token(routing((0, 1), (2, 3), (4, 5))).all()
    before = rig.cache.counters.missed_bytes
    batch = np.stack([routing((0, 6), (7, 6), (4, 5)), routing((6, 1), (6, 7), (6, 5))])
    rig.table.end(rig.begin())
    hits = rig.over(batch)
    assert hits.tolist() == [[[True, False], [False, False], [True, True]],
                             [[False, True], [False, False], [False, True]]]  # fmt: skip
    assert rig.cache.counters.missed_bytes - before == 256 + 2 * 768 + 256
    assert rig.token(batch[0]).all() and rig.token(batch[1]).all()


def test_submits_behind_copies_in_one_queue_find_them_without_a_wait_of_the_host(
    make: MakeRig, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, waited = make(), list[int]()
    object.__setattr__(rig.cache._ways, "in_order", True)
    rig.cache._tier.uploads = Uploads(device)
    real, read = _Upload.wait, rig.read

    def wait(upload: _Upload) -> None:
        waited.append(1)
        real(upload)

    def read_behind_copies(*given: Any) -> None:
        device.native.wait_idle()  # a submit would begin then; the rig reads without one
        read(*given)

    monkeypatch.setattr(rig, "read", read_behind_copies)
    monkeypatch.setattr(_Upload, "done", lambda upload: False)  # none is seen to end
    monkeypatch.setattr(_Upload, "wait", wait)
    for n in (0, 2, 4):
        used = routing((n, n + 1), (n, n + 1), (n, n + 1))
        assert not rig.token(used).any()
        assert rig.token(used).all(), "and its bytes were there"
        assert len(waited) == n // 2, "only `settle` waits"
        rig.cache.settle()
        rig.cache.settle()
    assert len(waited) == 3 and rig.cache.counters.n_uploads == 18


@pytest.mark.parametrize(
    ("n_rows", "later", "copies"), [(1, (), 0), (1, (7,), 0), (9, (), 0), (9, (7,), 6)]
)
def test_free_slots_are_filled_without_a_budget_before_a_long_chunk_that_another_follows(
    make: MakeRig, n_rows: int, later: tuple[int, ...], copies: int
) -> None:
    """That one need not bring what was copied; a reply may have no use for it."""
    rig = make(4, delay=0)
    object.__setattr__(rig.cache._ways, "budget", CopyBudget(LinkSpeed(1.0, 1.0), 0))
    reader, missed = rig.begin(), routing((0, 1), (2, 3), (4, 5))
    rig.table.end(reader)
    rig.cache.after_run(missed[None])
    rig.cache.decide(Upcoming((5,) * n_rows, later), decodes=n_rows == 1)
    rig.cache.settle()
    assert rig.cache.counters.n_uploads == copies


@pytest.mark.parametrize(("n_rows", "copies"), [(1, 1), (8, 1), (9, 6)])
def test_a_reply_begins_with_the_copies_that_the_last_chunk_of_its_prompt_had_no_bytes_for(
    make: MakeRig, n_rows: int, copies: int
) -> None:
    """A token has bytes for the first expert alone; nine rows have those of nine tokens."""
    rig = make(4, delay=0)
    object.__setattr__(rig.cache._ways, "budget", CopyBudget(LinkSpeed(1.0, 1.0), 512))
    rig.table.end(rig.begin())
    rig.cache.after_run(np.stack([routing((0, 1), (2, 3), (4, 5))] * n_rows))
    rig.cache.decide(Upcoming((5,)))
    rig.cache.settle()
    assert rig.cache.counters.n_uploads == copies


CHOICES: list[dict[str, Any]] = [
    {}, {"pins": (warm(2, 5),)}, {"pins": (named(0),)},
]  # fmt: skip


@settings(max_examples=10, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(
    slots=st.integers(1, 8),
    policy=st.sampled_from(POLICIES),
    allocation=st.sampled_from(["layer", "global"]),
    delay=st.sampled_from([None, 0, 1, 4]),
    choice=st.sampled_from(CHOICES),
    seed=st.integers(0, 1000),
    failing=st.sets(st.integers(0, 24)),
)
def test_random_tokens_read_the_right_bytes(
    make: MakeRig, slots: int, policy: PolicyName, allocation: str, delay: int | None,
    choice: dict[str, Any], seed: int, failing: set[int],
) -> None:  # fmt: skip
    rig = make(slots, None, delay, 0, allocation, policy=policy, **choice)
    rng = np.random.default_rng(seed)
    for token in range(25):
        rig.uploads.failures = int(token in failing)
        rig.token(random_routing(rng, skew=float(rng.choice([0.0, 1.0, 2.0]))))
    rig.close()


@pytest.mark.parametrize("delay", [None, 0, 1])
def test_ctrl_c_while_copies_are_waited_for_is_survived(make: MakeRig, delay: int | None) -> None:
    """Also while slots come and go. What was waited for arrives later, and no byte is wrong."""
    rig = make(4, delay=delay)
    rng, whole, n_interrupted = np.random.default_rng(7), rig.cache.most_slots, 0
    for turn in range(90):
        rig.run(random_routing(rng))
        rig.uploads.failures, rig.uploads.error = 1, KeyboardInterrupt
        try:
            if turn % 3 == 0:
                rig.cache.resize([2 + turn % 2] * len(whole))
            rig.run(random_routing(rng))
            rig.cache.resize(whole)
        except KeyboardInterrupt:
            n_interrupted += 1
        rig.uploads.failures = 0
        rig.table.end_all()  # as the engine does before each token
    assert n_interrupted > 20 and rig.cache.counters.n_uploads > 60
    assert not rig.cache.counters.n_failed_uploads
