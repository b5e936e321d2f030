"""Where experts go, how many slots there are and where experts land, on invented devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.gpu.invented import AMD, APU, DISCRETE_12, GIB, LAVAPIPE, MIB, SMALL_WINDOW
from tests.models.changed_specs import with_experts
from vkmoe.errors import OutOfMemoryError
from vkmoe.facts import CacheSizing, DeviceInfo, Heap, MemoryPlan, WeightBytes
from vkmoe.modes import Cache, ExpertMode
from vkmoe.placement.memory import device_budget

from .invented_models import (
    DENSE,
    N_EXPERTS,
    N_USED,
    ROOMY,
    SPEC,
    WEIGHTS,
    bytes_of,
    one_and_two_sizes,
    planned,
)

RAM = 40 * GIB
TIGHT = replace(DISCRETE_12, heaps=(Heap(3 * GIB, True), Heap(64 * GIB, False)))
PACKED = replace(DISCRETE_12, heaps=(Heap(2460 * MIB, True), Heap(64 * GIB, False)))


def slot_bytes(made: MemoryPlan, weights: WeightBytes) -> int:
    return sum(n * size for n, size in zip(made.expert_slots, weights.spans, strict=True))


def sizing_of(made: MemoryPlan) -> CacheSizing:
    assert made.sizing is not None
    return made.sizing


# ----- the default -----


@pytest.mark.parametrize(
    ("info", "experts_in"),
    [(DISCRETE_12, "cache"), (SMALL_WINDOW, "cache"), (AMD, "cache"), (APU, "device"),
     (LAVAPIPE, "device"), (ROOMY, "device")],
    ids=("12 GB", "8 GB", "16 GB", "APU", "CPU", "24 GB"),
)  # fmt: skip
def test_where_experts_lie(info: DeviceInfo, experts_in: str) -> None:
    """17 GiB of experts: in place on shared memory, all on a large card, else slots and homes."""
    made = planned(info)
    assert made.mode.experts_in == experts_in
    assert bool(made.expert_slots) == (experts_in == "cache")
    assert sizing_of(made).status == "ok"


@one_and_two_sizes
@pytest.mark.parametrize("info", [DISCRETE_12, SMALL_WINDOW, AMD], ids=lambda info: info.name)
def test_slots_take_what_the_device_has_left(info: DeviceInfo, weights: WeightBytes) -> None:
    """No layer could have one more slot; allocations, rounded up, stay within the budget."""
    made = planned(info, weights)
    left = device_budget(info, RAM) - made.total("device")
    (slots_line,) = (line for line in made.lines if line.item.startswith("expert slots"))
    assert slots_line.place == "device"
    assert 0 <= slots_line.n_bytes - slot_bytes(made, weights) < 5 * MIB, "64 KiB a chunk"
    assert 0 <= left < max(weights.spans) + 5 * MIB
    homes = made.lines[-1]
    assert homes.place == "host" and homes.n_bytes >= weights.experts


@one_and_two_sizes
def test_layers_get_the_same_and_the_first_ones_one_more(weights: WeightBytes) -> None:
    slots = planned(DISCRETE_12, weights).expert_slots
    few = min(slots)
    assert 0 < few < N_EXPERTS and set(slots) <= {few, few + 1}
    n_more = sum(slots) - few * len(slots)
    if weights is WEIGHTS:
        assert list(slots) == [few + 1] * n_more + [few] * (len(slots) - n_more)


def test_what_is_left_over_goes_to_the_first_layers_it_is_enough_for() -> None:
    """Of 2 x 30 MB and 2 x 10 MB per layer, the rest is enough for a small slot only."""
    weights = WeightBytes((GIB,), 4 * 20_000_000 * N_EXPERTS, (30_000_128, 10_000_128) * 2)
    n_bytes = 5 * sum(weights.spans) + 15_000_000
    made = planned(DISCRETE_12, weights, expert_cache=str(n_bytes))
    assert made.expert_slots == (5, 6, 5, 5)


def test_less_than_a_slot_in_each_layer_goes_to_the_first_layers() -> None:
    """Some MiB are free: what is on the device is not read over the link, whichever layer's."""
    made = planned(replace(PACKED, heaps=(Heap(2520 * MIB, True), PACKED.heaps[1])))
    n_slots = sum(made.expert_slots)
    assert 0 < n_slots < 48 and made.expert_slots == (1,) * n_slots + (0,) * (48 - n_slots)
    assert sizing_of(made).status == "budget_exhausted"


def test_without_room_for_a_slot_all_are_at_home() -> None:
    made = planned(PACKED)
    assert (made.mode.experts_in, made.expert_slots) == ("host", ())
    assert sizing_of(made).status == "budget_exhausted" and sizing_of(made).ratio == 0
    assert "--ctx-size" in sizing_of(made).remedy
    assert made.lines[-1].place == "host" and "read in place" in made.lines[-1].reason


def test_few_slots_are_below_what_is_recommended() -> None:
    sizing = sizing_of(planned(TIGHT))
    assert sizing.status == "below_recommended" and sizing.recommended == 2 * N_USED
    assert 0 < sizing.ratio < 1 and sizing.remedy


def test_a_model_without_experts_has_an_empty_cache() -> None:
    made = planned(DISCRETE_12, WeightBytes((GIB,), 0), spec=DENSE, expert_slots=9)
    assert (made.mode.experts_in, made.expert_slots) == ("device", ())
    assert sizing_of(made).status == "empty" and "--expert-slots" in sizing_of(made).remedy


# ----- what was asked -----


@pytest.mark.parametrize(
    ("asked", "brings"),
    [({}, False), ({"promote_on_read": True}, True), ({"miss": "gather"}, True)],
    ids=["nothing", "promote", "gather"],
)
def test_shared_memory_has_no_copies_of_experts_of_prompts_unless_copies_are_asked_for(
    asked: dict[str, Any], brings: bool
) -> None:
    made = planned(APU, expert_slots=8, **({"promote_on_read": None, "miss": "auto"} | asked))
    assert (made.brought_places > 0) == brings


@one_and_two_sizes
@pytest.mark.parametrize("info", [DISCRETE_12, APU, LAVAPIPE], ids=lambda info: info.name)
@pytest.mark.parametrize("n_slots", [1, 8, 40])
def test_a_number_of_slots_is_made_on_every_device(
    info: DeviceInfo, weights: WeightBytes, n_slots: int
) -> None:
    """On shared memory too, where slots and homes both count."""
    made = planned(info, weights, expert_slots=n_slots)
    assert (made.mode.experts_in, made.expert_slots) == ("cache", (n_slots,) * 48)
    names = ["expert slots"] if info.is_uma else ["expert slots", "brought experts"]
    lines = made.lines[-1 - len(names) :]
    assert [(line.place, line.name) for line in lines[:-1]] == [("device", name) for name in names]
    assert (lines[-1].place, lines[0].reason) == ("host", "as --expert-slots")
    total = made.total("device") + (made.total("host") if info.is_uma else 0)
    assert total <= device_budget(info, RAM)


@one_and_two_sizes
@pytest.mark.parametrize("size", ["1GiB", "2.5 g", "3GB", "2000000000"])
def test_a_size_is_split_over_the_layers(weights: WeightBytes, size: str) -> None:
    asked = {"1GiB": GIB, "2.5 g": 5 * GIB // 2, "3GB": 3 * 10**9}.get(size, 2 * 10**9)
    made = planned(DISCRETE_12, weights, expert_cache=size)
    assert made.mode.experts_in == "cache"
    taken = bytes_of(made, "expert slots")
    assert slot_bytes(made, weights) <= taken <= asked
    assert asked - max(weights.spans) - MIB < taken
    assert sizing_of(made).n_bytes == taken
    assert max(made.expert_slots) - min(made.expert_slots) <= 1


@pytest.mark.parametrize("asked", [{"expert_slots": 128}, {"expert_slots": 10**6},
                                   {"expert_cache": "1TiB"}])  # fmt: skip
@pytest.mark.parametrize("info", [ROOMY, APU, LAVAPIPE], ids=lambda info: info.type)
def test_slots_for_all_experts_are_no_cache(info: DeviceInfo, asked: dict[str, Any]) -> None:
    made = planned(info, **asked)
    assert (made.mode.experts_in, made.expert_slots) == ("device", ())
    assert sizing_of(made).n_slots_smallest_layer == N_EXPERTS


@pytest.mark.parametrize("asked", [{"expert_slots": 128}, {"expert_cache": "20GiB"}])
@pytest.mark.parametrize("info", [ROOMY, LAVAPIPE], ids=lambda info: info.type)
def test_a_cache_can_have_slots_for_all_experts(info: DeviceInfo, asked: dict[str, Any]) -> None:
    made = planned(info, ram=44 * GIB, expert_mode="cache", **asked)
    assert made.mode.experts_in == "cache"
    assert made.expert_slots == (N_EXPERTS,) * len(WEIGHTS.spans)


@one_and_two_sizes
@pytest.mark.parametrize("n_slots", [1, 2, 9])
def test_a_size_is_not_exceeded_by_what_allocations_add(weights: WeightBytes, n_slots: int) -> None:
    """Just enough for these slots alone: rounding and alignment leave room for fewer."""
    asked = n_slots * sum(weights.spans)
    made = planned(LAVAPIPE, weights, expert_cache=str(asked))
    assert sum(made.expert_slots) < n_slots * len(weights.spans)
    assert all(line.n_bytes <= asked for line in made.lines if line.item.startswith("expert slots"))


def test_a_size_too_small_for_a_slot_makes_none() -> None:
    for info in (DISCRETE_12, LAVAPIPE):
        made = planned(info, expert_cache="2MiB")
        assert (made.mode.experts_in, made.expert_slots) == ("host", ())
        assert sizing_of(made).status == "budget_exhausted"
        assert sizing_of(made).remedy == "raise --expert-cache"


@pytest.mark.parametrize("info", [DISCRETE_12, LAVAPIPE], ids=lambda info: info.type)
@pytest.mark.parametrize(
    "asked", [{"expert_slots": 100}, {"expert_cache": "14GiB"}, {"expert_slots": 127}]
)
@one_and_two_sizes
def test_slots_that_do_not_fit_say_what_does(
    info: DeviceInfo, asked: dict[str, Any], weights: WeightBytes
) -> None:
    """The message says what was asked and what is there; what the hint names can be had.

    Shared memory is to hold all experts beside the slots: without a pool of that size more fits.
    """
    ram = RAM
    if info.is_uma:
        ram, pool = 24 * GIB, {"host_pool": "18GiB"}
        assert planned(info, weights, ram, **asked).exchanges
        asked = asked | pool
    with pytest.raises(OutOfMemoryError) as caught:
        planned(info, weights, ram, **asked)
    (name, value), message = next(iter(asked.items())), str(caught.value)
    flag = "--" + name.replace("_", "-")
    assert message.startswith(f"{flag} {value} needs ") and info.name in message
    assert ("for all experts in the host pool" in message) == info.is_uma
    largest = caught.value.hint.split(f"use {flag} ")[1].split(" or less")[0]
    possible = asked | {name: int(largest) if name == "expert_slots" else largest}
    made = planned(info, weights, ram, **possible)
    assert made.mode.experts_in == "cache"
    if name == "expert_slots":
        with pytest.raises(OutOfMemoryError):
            planned(info, weights, ram, **asked | {"expert_slots": int(largest) + 1})


def test_all_experts_asked_for_on_a_card_they_do_not_fit_on() -> None:
    with pytest.raises(OutOfMemoryError, match=r"--expert-slots 500 needs 17,412 MiB"):
        planned(DISCRETE_12, expert_slots=500)
    with pytest.raises(OutOfMemoryError, match="--expert-cache 1TiB needs"):
        planned(DISCRETE_12, expert_cache="1TiB")


def test_without_room_for_any_slot_the_hint_is_to_ask_for_none() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        planned(PACKED, expert_slots=4)
    assert caught.value.hint == "leave --expert-slots out"


def test_a_context_takes_its_room_from_the_slots() -> None:
    short = planned(DISCRETE_12, ctx_size=1024).expert_slots
    long = planned(DISCRETE_12, ctx_size=32768).expert_slots
    assert sum(short) > sum(long) > 0


# ----- where missed experts land or are gathered -----

PROMOTE, GATHER = Cache(promotes=True), Cache("gather", promotes=True)


@one_and_two_sizes
@pytest.mark.parametrize("mode", [PROMOTE, GATHER], ids=["promote", "gather"])
def test_landing_slots_come_on_top_of_slots_asked_for(
    weights: WeightBytes, mode: ExpertMode
) -> None:
    plain, made = (planned(DISCRETE_12, weights, mode=w, expert_slots=9) for w in (Cache(), mode))
    assert plain.expert_slots == made.expert_slots == (9,) * 48
    assert (plain.landing_slots, made.landing_slots) == (0, 2)
    assert bytes_of(made, "expert slots") == bytes_of(plain, "expert slots")
    landing = bytes_of(made, "landing slots, 2 in each layer")
    assert abs(landing - 2 * sum(weights.spans)) < MIB
    assert bool(made.layout("gathered experts").runs) == (mode is GATHER)
    if mode is GATHER:
        gathered = bytes_of(made, f"gathered experts, {N_USED} at a time")
        assert 0 <= gathered - N_USED * max(weights.spans) < MIB


@one_and_two_sizes
@pytest.mark.parametrize("asked", [{}, {"expert_cache": "3GiB"}], ids=["left over", "3 GiB"])
@pytest.mark.parametrize("mode", [PROMOTE, GATHER], ids=["promote", "gather"])
def test_landing_slots_are_a_part_of_a_size(
    weights: WeightBytes, asked: dict[str, Any], mode: ExpertMode
) -> None:
    """So many slots fewer in each layer, where nothing is gathered."""
    plain, made = (planned(DISCRETE_12, weights, mode=w, **asked) for w in (Cache(), mode))
    assert made.total("device") <= device_budget(DISCRETE_12, 40 * GIB)
    both = bytes_of(made, "expert slots") + bytes_of(made, "landing slots")
    if asked:
        assert both <= 3 * GIB
    n_fewer = sum(plain.expert_slots) - sum(made.expert_slots)
    n_expected = made.landing_slots * 48 + (N_USED if mode is GATHER and not asked else 0)
    assert made.landing_slots > 0 and n_expected - 2 <= n_fewer <= n_expected + 4


@pytest.mark.parametrize(("heap_gib", "n_landing"), [(12, 1), (5, 2)])
def test_landing_slots_are_as_many_as_they_are_worth(heap_gib: int, n_landing: int) -> None:
    """With many slots few experts miss and one a layer takes them; with few slots it takes two."""
    card = replace(DISCRETE_12, heaps=(Heap(heap_gib * GIB, True), DISCRETE_12.heaps[1]))
    assert planned(card, promote_on_read=None).landing_slots == n_landing


def test_large_experts_have_slots_before_they_have_landing_places() -> None:
    """8 experts of 109 MiB in each of 32 layers: two places each would be 6.8 GiB."""
    weights = WeightBytes((GIB,), 8 * 32 * (109 << 20), (109 << 20,) * 32)
    spec = with_experts(replace(SPEC, layers=SPEC.layers[:32]), n_used=2, n_experts=8)
    made = planned(DISCRETE_12, weights, spec=spec, promote_on_read=None)
    assert made.landing_slots == 0 and sum(made.expert_slots) > 80
    assert made.total("device") >= 0.95 * device_budget(DISCRETE_12, RAM)


@pytest.mark.parametrize("mode", [PROMOTE, GATHER], ids=["promote", "gather"])
def test_a_layer_has_no_more_landing_slots_than_a_token_uses_experts(mode: ExpertMode) -> None:
    one = with_experts(SPEC, n_used=1)
    made = planned(DISCRETE_12, mode=mode, spec=one, expert_slots=9)
    landing = bytes_of(made, "landing slots, 1 in each layer")
    assert made.landing_slots == 1 and abs(landing - sum(WEIGHTS.spans)) < MIB


def test_without_room_for_slots_there_is_nowhere_to_land() -> None:
    made = planned(DISCRETE_12, expert_cache="5MiB", mode=GATHER)
    assert (made.mode.experts_in, made.landing_slots) == ("host", 0)
    assert not made.layouts("gathered experts")
    assert "not enough for a slot" in made.lines[-1].reason
    assert sum(planned(DISCRETE_12, expert_cache="5MiB").expert_slots) == 1
