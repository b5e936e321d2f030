"""Slots on a device, and pools that do not hold all experts, on devices that are not here."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from tests.gpu.invented import (
    AMD,
    APU,
    DEVICES,
    DISCRETE_12,
    GIB,
    LAVAPIPE,
    MIB,
    SMALL_WINDOW,
)
from vkmoe.cpu.host_memory import available_bytes
from vkmoe.errors import OutOfMemoryError, UsageError, VkmoeError
from vkmoe.experts.decide.settings import host_pools
from vkmoe.experts.study.slot_curves import split_slots
from vkmoe.facts import DeviceInfo, Heap, MemoryPlan, WeightBytes
from vkmoe.gpu.arena import lay_out_spans
from vkmoe.modes import Cache
from vkmoe.placement.memory import device_budget, layout_bytes
from vkmoe.placement.pools import SlotLayout
from vkmoe.weights.sizes import N_THREADS
from vkmoe.weights.span_reader import READING_BYTES, STAGING_BYTES

from .invented_models import (
    DENSE,
    MIXED,
    N_EXPERTS,
    N_USED,
    ROOMY,
    WEIGHTS,
    bytes_of,
    expert_bytes,
    one_and_two_sizes,
    planned,
)

N_ALL = 48 * N_EXPERTS
LARGE = expert_bytes(6_826_240)  # 39 GiB of experts
HUGE = expert_bytes(10_486_016)  # 60 GiB
APU_96 = replace(APU, heaps=(Heap(64 * GIB, True), Heap(32 * GIB, False)))
GATHER = Cache("gather", promotes=True)


def check(made: MemoryPlan, info: DeviceInfo, weights: WeightBytes, ram: int) -> None:
    """What holds for every plan with a small pool."""
    n_places, pools = sum(made.host_slots), host_pools(made.host_slots, weights.spans, N_USED)
    assert made.executor == ("fused" if made.exchanges else "stepped") and made.executor_reason
    assert 0 < n_places < N_ALL and all(n >= N_USED for n in made.host_slots)
    assert [pool.capacity for pool in pools] == list(made.host_slots)
    assert sorted(layer for pool in pools for layer in pool.layers) == list(range(48))
    assert bytes_of(made, f"host pool, {n_places:,} of {N_ALL:,} experts") >= sum(
        pool.capacity * pool.slot_bytes for pool in pools
    )
    assert bytes_of(made, "reading from the file") == READING_BYTES
    others = "on the device" if made.exchanges else "read from the file"
    assert others in next(x.reason for x in made.lines if "pool" in x.item)
    if info.is_uma:
        assert made.total("device") + made.total("host") <= device_budget(info, ram)
    else:
        assert made.total("device") <= device_budget(info, ram)
        assert made.total("host") <= ram


# ----- by default -----


def unasked(ram: int) -> int:
    """What is used of so much free memory: 2 GiB or 8 % is left, but of little only half."""
    return ram - min(max(2 * GIB, ram * 8 // 100), ram // 2)


@pytest.mark.parametrize(
    ("info", "weights", "ram", "experts_in"),
    [(DISCRETE_12, LARGE, 16 * GIB, "cache"), (SMALL_WINDOW, LARGE, 16 * GIB, "cache"),
     (AMD, LARGE, 30 * GIB, "cache"), (APU_96, HUGE, 32 * GIB, "host"),
     (LAVAPIPE, LARGE, 16 * GIB, "host"), (LAVAPIPE, HUGE, 5 * GIB, "host")],
    ids=["12 GB", "8 GB", "16 GB", "APU", "CPU", "CPU with little"],
)  # fmt: skip
def test_a_model_larger_than_ram_gets_what_there_is(
    info: DeviceInfo, weights: WeightBytes, ram: int, experts_in: str
) -> None:
    """All that is not left to others is used, and one more place would be too much."""
    made = planned(info, weights, ram)
    check(made, info, weights, ram)
    assert made.mode.experts_in == experts_in and bool(made.expert_slots) == (experts_in == "cache")
    used = made.total("host") + (made.total("device") if info.is_uma else 0)
    assert unasked(ram) - weights.spans[0] - MIB < used <= unasked(ram)


def test_a_cgroup_s_limit_is_the_memory_there_is(tmp_path: Path) -> None:
    """A container of 8 GiB on a machine with 64, of which 1 GiB is in use."""
    (tmp_path / "meminfo").write_text(f"MemAvailable: {64 << 20} kB\n")
    for name, text in (("max", str(8 * GIB)), ("current", str(GIB)), ("stat", "inactive_file 0\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    ram = available_bytes(tmp_path / "meminfo", tmp_path, tmp_path / "none")
    made = planned(DISCRETE_12, ram=ram)
    check(made, DISCRETE_12, WEIGHTS, ram)
    assert ram == 7 * GIB and made.total("host") <= 5 * GIB


def test_a_host_heap_can_be_the_limit() -> None:
    """Some drivers give the GPU only a part of the host's memory."""
    info = replace(DISCRETE_12, heaps=(Heap(12 * GIB, True), Heap(10 * GIB, False)))
    made = planned(info, ram=64 * GIB)
    check(made, info, WEIGHTS, 64 * GIB)
    assert 10 * GIB - 4 * MIB < made.total("host") <= 10 * GIB


def test_an_apu_s_heaps_can_be_the_limit() -> None:
    info = replace(APU, heaps=(Heap(4 * GIB, True), Heap(2 * GIB, False)))
    made = planned(info, ram=32 * GIB)
    check(made, info, WEIGHTS, 32 * GIB)


def test_experts_that_fit_are_planned_as_ever() -> None:
    for info in DEVICES:
        made = planned(info, expert_bytes(2_971_136 // 8), 32 * GIB)
        assert (made.host_slots, made.executor, made.notes) == ((), "fused", ())
        assert made.executor_reason


def test_one_byte_too_little_makes_the_pool_small() -> None:
    """Just above the default's limit all experts are in the pool, below it not."""
    total = planned(DISCRETE_12).total("host")
    enough = total + 2 * GIB
    assert planned(DISCRETE_12, ram=enough).host_slots == ()
    few = planned(DISCRETE_12, ram=enough - 2)
    assert N_ALL - 8 < sum(few.host_slots) < N_ALL


def test_below_the_experts_of_a_token_it_is_an_error() -> None:
    """The message says what is needed, and that it is the least."""
    for info, ram in ((DISCRETE_12, 25 * MIB), (LAVAPIPE, 3 * GIB + 700 * MIB)):
        with pytest.raises(OutOfMemoryError, match=r"8 experts .* least --host-pool") as caught:
            planned(info, expert_bytes(200 * MIB) if info.is_uma else WEIGHTS, ram)
        assert "smaller model" in caught.value.hint


def test_what_is_needed_is_taken_beyond_the_default_s_limit() -> None:
    """8 experts of 2.8 MiB do not fit in 70 % of this, but in all of it."""
    made = planned(DISCRETE_12, ram=61 * MIB)
    assert made.host_slots == (N_USED,)


# ----- as asked -----


@one_and_two_sizes
@pytest.mark.parametrize("info", [DISCRETE_12, APU, LAVAPIPE], ids=lambda info: info.name)
@pytest.mark.parametrize("size", ["8GiB", "500MiB", "60MB"])
def test_the_size_asked_for_is_not_exceeded(
    info: DeviceInfo, weights: WeightBytes, size: str
) -> None:
    asked = {"8GiB": 8 * GIB, "500MiB": 500 * MIB}.get(size, 60 * 10**6)
    made = planned(info, weights, host_pool=size)
    check(made, info, weights, 40 * GIB)
    taken = bytes_of(made, "host pool")
    assert asked - 2 * max(weights.spans) - MIB < taken <= asked
    assert "as --host-pool" in next(x.reason for x in made.lines if "pool" in x.item)


@pytest.mark.parametrize("info", [APU, LAVAPIPE], ids=lambda info: info.name)
@pytest.mark.parametrize("n_slots", [None, 1, 20])
def test_on_shared_memory_slots_are_not_needed(info: DeviceInfo, n_slots: int | None) -> None:
    """There the pool is what kernels read in place, and is what the sizing judges."""
    made = planned(info, host_pool="4GiB", expert_slots=n_slots)
    check(made, info, WEIGHTS, 40 * GIB)
    assert made.mode.experts_in == ("cache" if n_slots else "host")
    assert made.sizing is not None
    per_layer = n_slots or made.host_slots[0] // 48
    assert made.sizing.n_slots_smallest_layer == per_layer
    assert made.sizing.place == ("device" if n_slots else "host pool")


def test_the_remedy_is_the_pool_s_flag_only_where_it_was_given() -> None:
    remedies = []
    for asked in ("900MiB", None):
        sizing = planned(LAVAPIPE, ram=5 * GIB, host_pool=asked).sizing
        assert sizing is not None
        assert (sizing.status, sizing.place) == ("below_recommended", "host pool")
        remedies.append(sizing.remedy)
    assert remedies[0] == "raise --host-pool" and "--ctx-size" in remedies[1]


def test_two_sizes_get_their_proportional_share() -> None:
    """Half of all bytes is half of the places of each size."""
    made = planned(DISCRETE_12, MIXED, host_pool=str(MIXED.experts // 2))
    small, large = made.host_slots
    assert abs(small - N_ALL // 4) <= 2 and abs(large - N_ALL // 4) <= 2


def test_a_rare_size_has_room_for_a_token_s_experts() -> None:
    """One layer of 48 has larger experts: its share would be 3 places."""
    weights = WeightBytes(
        (GIB,), 128 * (47 * 1_000_192 + 4_000_000), (1_000_192,) * 47 + (4_000_000,)
    )
    made = planned(DISCRETE_12, weights, host_pool="200MiB", expert_slots=1)
    assert made.host_slots[1] == N_USED and made.host_slots[0] > 100
    common, rare = host_pools(made.host_slots, weights.spans, N_USED)
    assert rare.layers == (47,) and (rare.capacity, rare.floor) == (8, 8)
    assert common.layers == tuple(range(47))
    assert common.floor == (8 if common.capacity >= 8 * 47 else 0)


@pytest.mark.parametrize("info", DEVICES, ids=lambda info: info.name)
def test_more_than_all_experts_is_all(info: DeviceInfo) -> None:
    weights = expert_bytes(2_971_136 // 8)
    for size in ("3GiB", "1TiB"):
        asked, plain = (
            planned(info, weights, 32 * GIB, expert_slots=8, host_pool=pool)
            for pool in (size, None)
        )
        assert asked == plain and asked.executor == "fused"


@pytest.mark.parametrize("size", ["20MB", "1MiB", "1"])
def test_a_pool_below_the_experts_of_a_token_names_the_least(size: str) -> None:
    for info, weights in product((DISCRETE_12, LAVAPIPE), (WEIGHTS, MIXED)):
        with pytest.raises(UsageError, match=rf"--host-pool {size} is too small.*8 exp") as caught:
            planned(info, weights, host_pool=size)
        least = caught.value.hint.split("--host-pool ")[1].split(" or more")[0]
        made = planned(info, weights, host_pool=least)
        assert made.host_slots == (N_USED,) * len(set(weights.spans))


def test_the_least_is_named_in_bytes_where_it_is_less_than_a_mib() -> None:
    weights = expert_bytes(2048)
    with pytest.raises(UsageError, match="64 KiB") as caught:
        planned(LAVAPIPE, weights, host_pool="1000")
    least = caught.value.hint.split("--host-pool ")[1].split(" or more")[0]
    assert int(least) < MIB and planned(LAVAPIPE, weights, host_pool=least).host_slots[0] >= 8


@pytest.mark.parametrize("info", [DISCRETE_12, APU_96, LAVAPIPE], ids=lambda info: info.name)
def test_more_than_there_is_names_the_largest(info: DeviceInfo) -> None:
    """An explicit size may take more than 70 % of the memory, but no more than all."""
    ram = 24 * GIB
    with pytest.raises(OutOfMemoryError, match="--host-pool 30GiB needs 30,720 MiB") as caught:
        planned(info, LARGE, ram, host_pool="30GiB")
    largest = caught.value.hint.split("--host-pool ")[1].split(" or less")[0]
    made = planned(info, LARGE, ram, host_pool=largest)
    check(made, info, LARGE, ram)
    if not info.is_uma:
        assert made.total("host") > ram * 70 // 100


# ----- what goes with it -----


def test_where_all_experts_are_on_the_card_a_pool_changes_nothing_and_says_so() -> None:
    made, plain = planned(ROOMY, host_pool="2GiB"), planned(ROOMY)
    assert made.notes == ("--host-pool 2GiB has no effect: all experts are on the device",)
    assert replace(made, notes=()) == plain and plain.mode.experts_in == "device"
    shared = planned(LAVAPIPE, host_pool="2GiB", expert_mode="resident")
    assert (shared.mode.experts_in, shared.notes) == ("device", made.notes)


def test_a_dense_model_has_no_pool() -> None:
    made = planned(DISCRETE_12, WeightBytes((GIB,), 0), spec=DENSE, host_pool="2GiB")
    assert made.notes == ("--host-pool 2GiB has no effect: the model has no experts",)
    assert made.executor == "fused"


def test_the_fused_executor_needs_all_experts() -> None:
    with pytest.raises(UsageError, match=r"--executor fused .* --host-pool 2GiB holds") as caught:
        planned(DISCRETE_12, host_pool="2GiB", executor="fused")
    assert caught.value.exit_code == 2
    assert caught.value.hint == "leave out --executor, or give a larger --host-pool"
    with pytest.raises(UsageError, match=r"in slots or host memory; .* are 96 slots") as caught:
        planned(DISCRETE_12, LARGE, 16 * GIB, executor="fused", expert_slots=2)
    assert caught.value.hint == "leave out --executor, or give a larger --expert-slots"
    with pytest.raises(UsageError, match=r"--executor fused .* the host pool holds"):
        planned(DISCRETE_12, LARGE, 16 * GIB, executor="fused")
    assert planned(DISCRETE_12, executor="fused").executor_reason == "as --executor"


def test_the_stepped_executor_can_be_asked_for() -> None:
    for info in DEVICES:
        made = planned(info, expert_bytes(2_971_136 // 8), 32 * GIB, executor="stepped")
        assert (made.executor, made.executor_reason) == ("stepped", "as --executor")
        assert made.host_slots == ()


def test_slots_and_a_pool_share_the_memory_of_a_cpu() -> None:
    """Slots asked for come first; with too many of them the pool is what a token needs."""
    made = planned(LAVAPIPE, LARGE, 16 * GIB, expert_slots=30)
    check(made, LAVAPIPE, LARGE, 16 * GIB)
    assert made.expert_slots == (30,) * 48
    with pytest.raises(OutOfMemoryError, match=r"--expert-slots 60 .* beside .* in the host pool"):
        planned(LAVAPIPE, LARGE, 16 * GIB, expert_slots=60)
    with pytest.raises(OutOfMemoryError, match=r"--expert-slots 30 .* beside 9,\d\d\d MiB for"):
        planned(LAVAPIPE, LARGE, 16 * GIB, expert_slots=30, host_pool="9GiB")


def test_what_reading_takes_is_what_the_threads_have() -> None:
    assert READING_BYTES == N_THREADS * STAGING_BYTES


@one_and_two_sizes
@pytest.mark.parametrize("n_bytes", [23 * MIB, 100 * MIB, 3 * GIB, 18 * GIB])
def test_places_are_the_most_that_fit(weights: WeightBytes, n_bytes: int) -> None:
    """A place more of every size would not fit; the arenas of a device agree (test_memory)."""
    layout = SlotLayout(DISCRETE_12, weights.spans, N_EXPERTS, N_USED)
    places = layout.most_host_slots(n_bytes)
    if places is None:
        assert layout.least_host_bytes > n_bytes
        return
    assert layout.host_bytes(places) <= n_bytes
    assert sum(places) == N_ALL or layout.host_bytes([n + 1 for n in places]) > n_bytes


@pytest.mark.parametrize("info", [DISCRETE_12, APU, LAVAPIPE], ids=lambda info: info.name)
def test_every_choice_is_planned_within_bounds_or_refused(info: DeviceInfo) -> None:
    """All combinations: no assertion of our own fails, and no budget is exceeded."""
    n_planned = 0
    for ram, weights, pool, slots, cache, mode in product(
        (2 * GIB, 9 * GIB, 24 * GIB), (MIXED,), (None, "50MiB", "6GiB"), (None, 20),
        (None, "1GiB"), (Cache(), GATHER),
    ):  # fmt: skip
        if slots and cache:
            continue
        try:
            made = planned(info, weights, ram, mode, expert_slots=slots, host_pool=pool,
                           expert_cache=cache)  # fmt: skip
        except VkmoeError as error:
            assert error.hint, error
            continue
        n_planned += 1
        if made.host_slots:
            check(made, info, weights, ram)
        assert all(line.n_bytes >= 0 and line.reason for line in made.lines)
    assert n_planned > 10


# ----- slots on a device -----


@pytest.mark.parametrize(
    ("n_bytes", "slots"),
    [(-1, (0, 0)), (0, (0, 0)), (3 * 256 - 1, (0, 0)), (3 * 256, (1, 1)), (4 * 256, (2, 1)),
     (5 * 256, (2, 1)), (6 * 256, (2, 2)), (30 * 256, (8, 8))],
)  # fmt: skip
def test_bytes_are_split_evenly(n_bytes: int, slots: tuple[int, ...]) -> None:
    """A layer of 256 and one of 512 bytes per slot, 8 experts."""
    assert split_slots(n_bytes, (256, 512), 8) == slots


def test_a_rest_may_be_enough_for_a_later_layer_only() -> None:
    assert split_slots(2 * 768 + 256, (512, 256), 8) == (2, 3)


LAYOUTS = {
    name: SlotLayout(DISCRETE_12, (50_176, 100_096, 50_176), 10**6, 8, n_landing, gathers)
    for name, n_landing, gathers in (("read", 0, False), ("land", 2, False), ("gather", 1, True))
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@each_layout
@pytest.mark.parametrize("n_bytes", [0, 10_000, 600_000, 5_000_000, 5_065_536, 1 << 30, 3 << 30])
def test_the_largest_slots_fit_and_one_more_would_not(n_bytes: int, layout: SlotLayout) -> None:
    """With the slots that each layer has to land in; less than one each goes to the first."""
    slots = layout.largest(n_bytes)
    assert layout.n_bytes(slots) <= n_bytes
    assert layout.n_bytes(tuple(n + 1 for n in slots)) > n_bytes
    if not min(slots):
        assert max(slots) <= 1 and layout.n_bytes((1, 1, 1)) > n_bytes
        more = [(*slots[:i], 1, *slots[i + 1 :]) for i in range(3) if not slots[i]]
        assert all(layout.n_bytes(one_more) > n_bytes for one_more in more)


@each_layout
@pytest.mark.parametrize("n_slots", [1, 5, 21_399, 21_400])
def test_landing_slots_are_of_the_same_arenas(n_slots: int, layout: SlotLayout) -> None:
    """Layers without slots have nowhere to land."""
    wanted = layout.own_bytes((n_slots + layout.n_landing,) * 3)
    assert layout.n_bytes((n_slots,) * 3) == wanted
    assert layout.n_bytes((0, n_slots, 0)) == layout.own_bytes((0, n_slots + layout.n_landing, 0))
    assert layout.n_bytes((0, 0, 0)) == 0


@each_layout
@pytest.mark.parametrize("slots", [(0, 0, 0), (0, 1, 0), (2, 1, 1), (40_000, 39_999, 39_999)])
def test_bytes_are_counted_as_arenas_lay_them_out(
    slots: tuple[int, ...], layout: SlotLayout
) -> None:
    assert layout.n_bytes(slots) == layout_bytes(layout.arenas(slots))
    assert layout.host_bytes(slots[:2]) == layout_bytes(layout.host_arenas(slots[:2]))
    huge = replace(layout, span_bytes=(3 << 30, 256, 3 << 30))
    assert huge.n_bytes(slots) == layout_bytes(huge.arenas(slots))


@each_layout
def test_gathered_experts_have_room_for_the_largest(layout: SlotLayout) -> None:
    assert layout.n_gathered == (8 if layout.gathers else 0)
    assert layout.gathered == lay_out_spans(DISCRETE_12, [100_096] * layout.n_gathered)


# ----- what a card and host memory hold together -----


@one_and_two_sizes
@pytest.mark.parametrize("info", [DISCRETE_12, SMALL_WINDOW, AMD], ids=lambda info: info.name)
def test_what_card_and_ram_hold_together_needs_no_file(
    info: DeviceInfo, weights: WeightBytes
) -> None:
    """RAM alone is too small. Every size has a place for each expert, and some more."""
    ram = 16 * GIB
    made = planned(info, weights, ram, GATHER)
    assert made.exchanges and made.executor == "fused" and made.host_slots
    assert unasked(ram) - 2 * max(weights.spans) - MIB < made.total("host") <= unasked(ram)
    layers = [weights.spans.count(size) for size in dict.fromkeys(weights.spans)]
    for size, n_layers, n_host in zip(
        dict.fromkeys(weights.spans), layers, made.host_slots, strict=True
    ):
        pairs = zip(made.expert_slots, weights.spans, strict=True)
        n_slots = sum(n for n, other in pairs if other == size)
        assert n_host < n_layers * N_EXPERTS < n_host + n_slots
    pool = next(line for line in made.lines if line.name == "expert pool")
    assert pool.reason == "what host memory allows; the others are on the device"
    assert planned(info, weights, ram, GATHER, executor="fused").executor == "fused"


def test_one_expert_too_few_is_read_from_the_file() -> None:
    """As asked: slots and a pool that together lack one place, or have just enough."""
    size = WEIGHTS.spans[0]
    for n_places, holds in ((N_ALL - 8 * 48 - 1, False), (N_ALL - 8 * 48, True)):
        least = SlotLayout(DISCRETE_12, WEIGHTS.spans, N_EXPERTS, N_USED).host_bytes((n_places,))
        assert least > n_places * size
        made = planned(DISCRETE_12, host_pool=str(least), expert_slots=8, ram=40 * GIB)
        assert made.host_slots == (n_places,)
        assert made.exchanges == holds == (made.executor == "fused")
