"""Which of all plans is taken: the one that is predicted to be fastest, by bytes and speeds."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from tests.gpu.invented import APU, DEVICES, DISCRETE_12, LAVAPIPE
from tests.needs import need_cpu
from tests.placement.invented_models import plan
from vkmoe.experts.study.hit_curve import MEAN_CURVE
from vkmoe.experts.study.slot_curves import curves_of_counts
from vkmoe.facts import DeviceInfo, Heap, MemoryPlan
from vkmoe.placement.forecast.advice import describe, drawback
from vkmoe.placement.forecast.cost import (
    GATHER_SECONDS,
    LOST,
    MOVING,
    STOP_SECONDS,
    file_share_of,
    hit_rate_of,
    predict,
    token_bytes,
)
from vkmoe.placement.forecast.device_profiles import read_profile
from vkmoe.placement.forecast.speeds import TYPICAL, Machine, Speeds, machine_of

from .invented_models import N_EXPERTS, N_USED, SCRATCH, SPEC, WEIGHTS, expert_bytes, planned
from .test_device_plans import QWEN3, WAYS, decided, model_of

GIB = 1 << 30
SPEEDS = Speeds(device=100e9, link=10e9, host=50e9, file=1e9, copy=12e9, gather=11e9)
MACHINE = Machine(SPEEDS)


def seconds_of(made: MemoryPlan, hits: float, misses: float) -> float:
    """A token's, besides what crosses the link once more, by hand."""
    read = token_bytes(SPEC, WEIGHTS, WEIGHTS.pieces[0])
    return (read.trunk + hits * read.experts) / 100e9 + misses * read.others / 10e9


# ----- how misses are served, by speeds -----


def asked_of(link: Speeds, span_bytes: int = 2_971_136, **asked: Any) -> MemoryPlan:
    from vkmoe.config import EngineConfig

    weights = expert_bytes(span_bytes)
    return plan(EngineConfig(**asked), SPEC, DISCRETE_12, weights, SCRATCH, 40 * GIB, link)


@pytest.mark.parametrize(
    ("read", "gather", "way"),
    [(7.9e9, 12e9, "gather"), (9.1e9, 9.5e9, "read"), (20e9, 10e9, "read"), (11e9, 11e9, "read")],
)
def test_misses_are_gathered_where_that_is_faster(read: float, gather: float, way: str) -> None:
    """It costs two passes more over device memory, and a dispatch in each layer."""
    speeds = replace(SPEEDS, link=read, gather=gather)
    made = asked_of(speeds, expert_cache="3GiB")
    assert made.mode.miss == way
    assert f"{read / 1e9:.1f} GB/s read in place, {gather / 1e9:.1f} gathered" in made.mode.reason
    missed = 1.0 - hit_rate_of(made, SPEC, MEAN_CURVE)[0]
    n_bytes = missed * N_USED * sum(WEIGHTS.spans)
    gathered = n_bytes / gather + 2 * n_bytes / 100e9 + 48 * GATHER_SECONDS
    assert (gathered < n_bytes / read) == (way == "gather")


def test_reasons_say_what_decided() -> None:
    assert planned(DISCRETE_12, miss="gather").mode.reason == "as --miss"
    shared = planned(APU, expert_slots=8, miss="auto").mode
    assert (shared.reason, shared.miss) == ("the device shares the host's memory", "read")
    unmeasured = planned(DISCRETE_12, miss="auto").mode
    assert (unmeasured.reason, unmeasured.miss) == ("the link was not measured", "read")


@pytest.mark.parametrize("device", [DISCRETE_12, APU], ids=["discrete", "shared"])
@pytest.mark.parametrize("miss", ["read", "gather"])
def test_missed_experts_land_where_there_is_a_link(device: DeviceInfo, miss: Any) -> None:
    mode = planned(device, expert_slots=8, miss=miss, promote_on_read=None).mode
    assert mode.promotes == (not device.is_uma) and mode.gathers == (miss == "gather")
    assert mode.keeps == (mode.promotes and miss == "read")


# ----- the time of a token -----


def test_the_time_of_a_cache_is_what_its_memory_takes() -> None:
    """By hand: over a link misses take turns with the rest, and some cross it once more."""
    model, profile = model_of(QWEN3), read_profile("8gb-nobar")
    made = decided(model, profile, expert_mode="cache", miss="read", promote_on_read=False)
    read = token_bytes(model.spec, made.weights, made.weights.pieces[0])
    assert 0 < read.trunk < made.weights.trunk and read.experts == 8 * sum(made.weights.spans)
    found = predict(made.plan, model.spec, read, MACHINE)
    trunk, experts = read.trunk / 100e9, read.experts / 100e9
    assert found.with_hits_alone == pytest.approx(1 / (trunk + experts))
    again = 0.5 * read.others / 12e9  # half of what misses gets a slot, by a copy
    assert found.without_hits == pytest.approx(1 / (trunk + read.others / 10e9 + again))
    rates = [MEAN_CURVE.rate(n / 128) for n in made.plan.expert_slots]
    assert found.hit_rate == pytest.approx(np.mean(rates)) and found.file_share == 0
    share = 1.0 - float(np.mean(rates))
    missed = share * read.others / 10e9 + share * again
    assert found.rate == pytest.approx(1 / (trunk + (1 - share) * experts + missed))
    assert found.bound == "device memory and the link"


def test_beside_the_cpu_a_layer_takes_as_long_as_the_slower_of_both() -> None:
    """By drawing misses: each of 8 experts a layer is the CPU's by chance."""
    model = model_of(QWEN3)
    made = decided(model, read_profile("8gb-nobar"), **WAYS["hybrid"])
    read = token_bytes(model.spec, made.weights, made.weights.pieces[0])
    found = predict(made.plan, model.spec, read, MACHINE)
    assert found.hit_rate is not None
    missed = (np.random.default_rng(1).random((100_000, 8)) > found.hit_rate).sum(axis=1)
    of_layer = np.maximum(read.experts / 100e9, missed * read.others / 8 / 50e9).mean()
    assert found.rate == pytest.approx(
        1 / (read.trunk / 100e9 + of_layer + 48 * STOP_SECONDS), 0.01
    )
    assert found.with_hits_alone and found.rate < found.with_hits_alone, "more slots are better"


@pytest.mark.parametrize("n_layers", [40, 48])
def test_layers_of_the_cpu_take_turns_with_the_others(n_layers: int) -> None:
    model = model_of(QWEN3)
    made = decided(model, read_profile("8gb-nobar"), n_cpu_moe=n_layers)
    read = token_bytes(model.spec, made.weights, made.weights.pieces[0])
    found, share = predict(made.plan, model.spec, read, MACHINE), n_layers / 48
    assert found.hit_rate == pytest.approx(1 - share)
    seconds = (read.trunk + (1 - share) * read.experts) / 100e9 + share * read.others / 50e9
    assert found.rate == pytest.approx(1 / (seconds + n_layers * STOP_SECONDS))
    assert (found.without_hits, found.with_hits_alone) == (None, None), "there is no cache"


def test_the_trunk_in_host_memory_is_read_over_the_link() -> None:
    model = model_of(QWEN3)
    made = decided(model, read_profile("8gb-nobar"), gpu_layers=12, cpu_moe=True)
    weights = made.weights
    read = token_bytes(model.spec, weights, weights.pieces[0], made.plan.host_layers)
    plain = token_bytes(model.spec, weights, weights.pieces[0])
    assert 0 < read.trunk_in_host < read.trunk == plain.trunk and plain.trunk_in_host == 0
    on_device, on_host = weights.trunk_pieces(36)
    assert sum(on_device) + sum(on_host) == weights.trunk and sum(on_host) == read.trunk_in_host
    found = predict(made.plan, model.spec, read, MACHINE)
    seconds = (read.trunk - read.trunk_in_host) / 100e9 + read.trunk_in_host / 10e9
    seconds += read.others / 50e9 + 48 * STOP_SECONDS
    assert found.rate == pytest.approx(1 / seconds)
    assert found.bound == "device memory and the CPU's memory and the link"


def test_what_the_cpu_reads_is_counted_as_the_file_has_it() -> None:
    """Q6_K has 210 bytes for 256 values in files, and some more where a device keeps them."""
    from tools.pipelines import Described

    need_cpu()
    model = Described(QWEN3).file("Q6_K")
    made = decided(model, read_profile("8gb-nobar"), cpu_moe=True)
    read = token_bytes(model.spec, made.weights, made.weights.pieces[0])
    experts = sum(tensor.n_bytes for name, tensor in model.file.tensors.items() if "_exps" in name)
    assert read.others == pytest.approx(experts * 8 / 128, rel=1e-6)
    assert read.experts > read.others


def test_shared_memory_is_read_in_turns() -> None:
    model = model_of(QWEN3)
    made = decided(model, read_profile("uma-32gb"), cpu_moe=True)
    read = token_bytes(model.spec, made.weights, made.weights.pieces[0])
    machine = Machine(Speeds(100e9, 100e9, 100e9, 1e9, 100e9, 100e9), shares_memory=True)
    found = predict(made.plan, model.spec, read, machine)
    seconds = (read.trunk + read.others) / 100e9 + 48 * STOP_SECONDS
    assert found.rate == pytest.approx(1 / seconds)


def test_where_memory_is_shared_nothing_misses() -> None:
    """The device reads host memory as fast as its own: a hit rate of 0 % would mislead."""
    profile, model = read_profile("uma-32gb"), model_of(QWEN3)
    made = decided(model, profile, expert_mode="cache")
    read = token_bytes(model.spec, made.weights, made.weights.pieces[0])
    machine = machine_of(profile.info, profile.speeds, profile.available_host_bytes)
    found = predict(made.plan, model.spec, read, machine)
    assert found.hit_rate is None and "in place" in found.hit_rate_reason
    assert "link" not in found.bound


def test_a_correction_is_a_factor_of_the_time() -> None:
    made, read = planned(DISCRETE_12), token_bytes(SPEC, WEIGHTS, 0)
    plain = predict(made, SPEC, read, MACHINE)
    slower = predict(made, SPEC, read, replace(MACHINE, corrections={"cache": 1.5, "cpu": 9.0}))
    assert slower.rate == pytest.approx(plain.rate / 1.5)
    assert slower.prompt_rate == plain.prompt_rate


# ----- hits, and the file -----


def test_hits_go_by_what_a_profile_counted() -> None:
    made = planned(DISCRETE_12)
    n_slots = min(made.expert_slots)
    counts = np.zeros((48, 128))
    counts[:, :n_slots] = 3.0
    curve = curves_of_counts(counts, inf)
    assert hit_rate_of(made, SPEC, curve)[0] == pytest.approx(1.0)
    share, reason = hit_rate_of(made, SPEC, curves_of_counts(np.ones((48, 128)), inf))
    assert share == pytest.approx(MEAN_CURVE.of_slots(made.expert_slots, 128), abs=0.02)
    assert "--expert-profile" in reason


def test_exchanging_needs_homes_to_leave_to() -> None:
    """Without a place to spare the experts on the device stay: uses find them by chance alone."""
    made = planned(DISCRETE_12, ram=16 * GIB)
    assert made.exchanges
    n_slots, n_all = sum(made.expert_slots), 48 * N_EXPERTS
    free, _ = hit_rate_of(replace(made, exchanges=False), SPEC, MEAN_CURVE)
    rates = []
    for spare in (0, 9, 72, 10**6):
        few = replace(made, host_slots=(n_all - n_slots + spare,))
        rates.append(hit_rate_of(few, SPEC, MEAN_CURVE)[0])
    assert rates[0] == pytest.approx(n_slots / n_all) and rates[-1] == pytest.approx(free)
    shares = [(rate - rates[0]) / (free - rates[0]) for rate in rates]
    assert MOVING[2] < shares[1] < MOVING[3], "three for every 16 layers, which all share"
    assert shares[2] == pytest.approx((MOVING[-3] + MOVING[-2]) / 2), "one and a half in each layer"
    assert rates == sorted(rates)


def test_little_is_lacking_yet_much_is_read_from_the_file() -> None:
    """Who leaves the device for another is in no memory, where not all are to have one."""
    made = replace(planned(DISCRETE_12, ram=16 * GIB), exchanges=False)
    n_slots, n_all = sum(made.expert_slots), 48 * N_EXPERTS
    missed = 1 - hit_rate_of(made, SPEC, MEAN_CURVE)[0]
    shares = []
    for n_lacking in (1, n_all // 8, n_all - n_slots):
        few = replace(made, host_slots=(n_all - n_slots - n_lacking,))
        shares.append(file_share_of(few, SPEC, MEAN_CURVE, MACHINE))
    assert shares[0] == pytest.approx(LOST * missed, rel=0.01)
    assert shares == sorted(shares) and shares[-1] == pytest.approx(missed)


def test_what_is_read_from_the_file_takes_its_time() -> None:
    """Half of the experts in a pool: the others' share of the uses is by the curve, and a quarter
    of what is missed besides was lost when it left a slot."""
    model = model_of(QWEN3)
    made = decided(model, read_profile("8gb-nobar"), host_pool="4GiB", expert_slots=8)
    read = token_bytes(model.spec, made.weights, made.weights.pieces[0])
    held = (sum(made.plan.host_slots) + 8 * 48) / (128 * 48)
    quick = predict(
        made.plan, model.spec, read, replace(MACHINE, speeds=replace(SPEEDS, file=1e15))
    )
    slow = predict(made.plan, model.spec, read, MACHINE)
    lacking, missed = (
        1 - MEAN_CURVE.rate(held),
        1 - hit_rate_of(made.plan, model.spec, MEAN_CURVE)[0],
    )
    assert pytest.approx(lacking + LOST * (missed - lacking)) == slow.file_share > 0.1
    waited = slow.file_share * read.others / 1e9
    assert 1 / slow.rate - 1 / quick.rate == pytest.approx(waited, rel=1e-3)
    assert slow.bound.endswith("the file") and slow.prompt_rate < quick.prompt_rate


def test_the_cpu_reads_the_disk_where_the_page_cache_is_too_small() -> None:
    model = model_of(QWEN3)
    made = decided(model, read_profile("8gb-nobar"), **WAYS["hybrid"]).plan
    shares = [
        file_share_of(made, model.spec, MEAN_CURVE, replace(MACHINE, host_bytes=n * GIB))
        for n in (64, 12, 6)
    ]
    assert shares[0] == 0 == shares[1] < shares[2] < 1, "slots hold what 12 GiB do not"


# ----- speeds -----


@pytest.mark.parametrize("info", DEVICES, ids=lambda info: info.name)
def test_speeds_that_are_not_known_are_those_of_the_kind(info: DeviceInfo) -> None:
    machine = machine_of(info, Speeds(), GIB)
    assert min(vars(machine.speeds).values()) > 0
    assert machine.speeds.device == TYPICAL[info.type].speeds.device
    assert machine.shares_memory == info.is_uma
    known = machine_of(info, Speeds(5e9, 2e9, 3e9, 4e9), GIB).speeds
    assert (known.device, known.host, known.file) == (5e9, 3e9, 4e9)
    assert known.link == known.copy == known.gather == (5e9 if info.is_uma else 2e9)
    assert machine_of(info, Speeds(1e9, 2e9), GIB).speeds.link == 1e9, "no faster than at home"


# ----- which plan -----


def best_of(info: DeviceInfo, ram: int = 40 * GIB, **asked: Any) -> Any:
    need_cpu()
    from tools.pipelines import Described
    from vkmoe.config import EngineConfig
    from vkmoe.placement.decide import Choosing, decide

    model = Described(QWEN3).file("Q4_K")
    choosing = Choosing(beside_cpu=True)
    return decide(EngineConfig(**asked), model, info, choosing=choosing, available_host_bytes=ram)


def test_the_candidates_are_in_order_and_the_first_is_the_plan() -> None:
    found = best_of(DISCRETE_12)
    times = [each.prediction.seconds for each in found.candidates]
    assert times == sorted(times) and len(times) > 20
    assert {each.plan.mode.name for each in found.candidates} == {"cache", "hybrid", "cpu"}
    assert found.plan.lines[: len(found.candidates[0].plan.lines)] == found.candidates[0].plan.lines


def test_the_first_layers_of_the_cpu_are_as_few_as_the_device_needs() -> None:
    found = best_of(DISCRETE_12)
    least = min(x.plan.cpu_layers for x in found.candidates if x.plan.mode.name == "cpu")
    assert 0 < least < 48
    assert best_of(DISCRETE_12, n_cpu_moe=least).plan.cpu_layers == least
    from vkmoe.errors import OutOfMemoryError

    with pytest.raises(OutOfMemoryError, match=f"--n-cpu-moe {least - 1}"):
        best_of(DISCRETE_12, n_cpu_moe=least - 1, ubatch_size=64)


def test_shorter_chunks_leave_room_to_what_then_fits() -> None:
    """All experts fit with shorter chunks alone; whether they are worth that is predicted."""
    found = best_of(replace(DISCRETE_12, heaps=(Heap(24 * GIB, True), Heap(64 * GIB, False))))
    device_bytes = found.plan.total("device")
    few = (device_bytes - 10 * (1 << 20)) * 100 // 95 + (512 << 20)
    tight = best_of(replace(DISCRETE_12, heaps=(Heap(few, True), Heap(64 * GIB, False))))
    assert found.plan.mode.name == "resident" and found.plan.chunk_rows == 512
    sizes = {(x.plan.mode.name, x.plan.chunk_rows) for x in tight.candidates}
    assert {("resident", 256), ("cache", 512)} <= sizes and ("resident", 512) not in sizes


def test_what_heaps_cannot_hold_the_cpu_computes_in_place() -> None:
    """The GPU of an APU reaches a part of the RAM only; nothing is read from the disk."""
    info = replace(APU, heaps=(Heap(8 * GIB, True), Heap(4 * GIB, False)))
    found = best_of(info, 32 * GIB)
    assert found.plan.cpu_layers > 0 and found.candidates[0].prediction.file_share == 0
    assert found.plan.total("device") > 0.9 * 12 * GIB * 0.95
    assert best_of(APU).plan.mode.name == "resident" == best_of(APU, cpu_moe=False).plan.mode.name


def test_shaders_on_a_cpu_are_slower_than_its_own_kernels() -> None:
    assert best_of(LAVAPIPE).plan.mode.name == "cpu"


# ----- how others differ -----


def test_what_others_lack_is_true_of_a_faster_one_too() -> None:
    """The plan may be the one that a trial measured to be fastest."""
    first, *others = best_of(DISCRETE_12).candidates
    slower = others[-1]
    assert drawback(first, slower) == "predicted to be faster; the trial measured otherwise"
    assert "times as long" in drawback(slower, first)
    larger = replace(first, plan=planned(DISCRETE_12))
    needs = "needs [0-9,]+ MiB more of host memory"
    assert re.fullmatch(needs, drawback(larger, first)) and drawback(first, larger) == "as fast"


def test_the_place_of_experts_without_one_in_host_memory_is_told() -> None:
    texts = [describe(planned(DISCRETE_12, ram=ram * GIB)) for ram in (6, 16)]
    assert "in host memory, the others in the file" in texts[0]
    assert "in host memory, the others on the device" in texts[1]
