"""The memory plan, on devices that are not here, and what is decided around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.tiny import model_path
from tests.gpu.invented import (
    APU,
    DEVICES,
    DISCRETE_12,
    GIB,
    LAVAPIPE,
    MIB,
    NOT_COHERENT,
    SMALL_WINDOW,
    device,
)
from tests.models.changed_specs import with_mixer
from tests.placement.invented_models import plan
from vkmoe.config import EngineConfig
from vkmoe.errors import OutOfMemoryError, UsageError
from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.settings import CacheSettings
from vkmoe.experts.decide.token_table import TokenTable
from vkmoe.facts import (
    Allocation,
    DeviceInfo,
    Heap,
    LatentSpec,
    MemoryPlan,
    ModelSpec,
    RopeSpec,
    WeightBytes,
)
from vkmoe.gpu.link_speed import LinkSpeed
from vkmoe.kv_types import both
from vkmoe.models import open_model
from vkmoe.models.program_sizes import FIRST_POSITIONS, SURE_CTX_SIZE, sure_context
from vkmoe.modes import RESIDENT, AtHome, Cache
from vkmoe.placement.decide import Choosing, Decision, decide, predictor_lines
from vkmoe.placement.forecast.cost import token_bytes
from vkmoe.placement.forecast.speeds import TYPICAL, Speeds
from vkmoe.placement.memory import GRANULARITY, device_budget, layout_bytes

from .invented_models import (
    DENSE,
    N_EXPERTS,
    N_LAYERS,
    SCRATCH,
    SPEC,
    WEIGHTS,
    bytes_of,
    expert_bytes,
)

RAM = 32 * GIB
DENSE_WEIGHTS = WeightBytes((GIB,), 0)
KV_BYTES_PER_TOKEN = 2 * 48 * 4 * 128 * 2

# An APU whose firmware gives the GPU a part of the RAM, and the driver a little more of the rest.
SMALL_APU = device(
    "APU with small heaps", "integrated",
    (Heap(4 * GIB, True), Heap(2 * GIB, False), Heap(GIB, False)),
    [
        (0, "DEVICE_LOCAL HOST_VISIBLE HOST_COHERENT"),
        (1, "HOST_VISIBLE HOST_COHERENT"),
        (2, "HOST_VISIBLE HOST_CACHED"),  # must be flushed: never for weights
    ],
)  # fmt: skip


def planned(
    info: DeviceInfo, config: EngineConfig | None = None, weights: WeightBytes = WEIGHTS,
    ram: int = RAM, spec: ModelSpec = SPEC,
) -> MemoryPlan:  # fmt: skip
    return plan(config or EngineConfig(), spec, info, weights, SCRATCH, ram)


@pytest.mark.parametrize("info", [*DEVICES, SMALL_APU], ids=lambda info: info.name)
def test_a_plan_fits_and_explains_itself(info: DeviceInfo) -> None:
    small = info.name in (SMALL_APU.name, NOT_COHERENT.name)
    made = planned(info, weights=expert_bytes(2_971_136 // 8) if small else WEIGHTS)
    total = made.total("device") + (made.total("host") if info.is_uma else 0)
    assert total <= device_budget(info, RAM)
    assert made.total("host") <= RAM - 2 * GIB
    assert all(line.reason and line.n_bytes > 0 for line in made.lines)
    assert sum(made.heap_totals().values()) == made.total("device") + made.total("host")


@pytest.mark.parametrize("info", DEVICES, ids=lambda info: info.name)
def test_a_plan_counts_what_is_allocated_and_little_more(info: DeviceInfo) -> None:
    """Every part is at least what it holds; rounding and the ends of chunks add a few MiB."""
    weights = expert_bytes(2_971_136 // 8)
    made = planned(info, weights=weights)
    held = {
        "weights used by every token": weights.trunk,
        "KV cache": SURE_CTX_SIZE * KV_BYTES_PER_TOKEN,
        "rotary table": SURE_CTX_SIZE * 4 * SPEC.ropes[0].dim,
        "activations": sum(SCRATCH.tensors),
        "expert table": 2 * SPEC.n_layers * N_EXPERTS * 8,
        "parameters": SCRATCH.params,
        "results": SCRATCH.results,
        "logits": sum(SCRATCH.logits),
        "experts": weights.experts,
    }
    for item, n_bytes in held.items():
        assert n_bytes <= bytes_of(made, item) < n_bytes + 4 * MIB, item


@pytest.mark.parametrize("info", DEVICES, ids=lambda info: info.name)
def test_staging_is_there_where_memory_is_not_mapped(info: DeviceInfo) -> None:
    """Two halves of 16 MiB for weights; two more as large as a table, without a mapped window."""
    staged = [line.n_bytes for line in planned(info, weights=DENSE_WEIGHTS, spec=DENSE).lines
              if line.item == "staging"]  # fmt: skip
    expected = {"virtual without a window": [(32 << 20) + (2 << 16)]}
    assert staged == expected.get(info.name, [] if info.is_uma else [32 << 20])


def test_lines_name_the_heap_they_come_from() -> None:
    """The table lies in the window, all other device memory outside of it."""
    made = planned(SMALL_WINDOW)
    heaps = {line.item.split(",")[0]: line.heap for line in made.lines}
    assert heaps == {
        "weights used by every token": 0, "KV cache": 0, "rotary table": 0, "activations": 0,
        "expert table": 2, "parameters": 1, "results": 1, "logits": 1, "staging": 1,
        "expert slots": 0, "landing slots": 0, "brought experts": 0, "host pool": 1,
    }  # fmt: skip
    totals = made.heap_totals()
    assert totals[2] == bytes_of(made, "expert table")
    assert totals[1] == made.total("host")
    assert sum(totals.values()) == made.total("device") + made.total("host")


def test_a_dense_model_has_no_experts() -> None:
    made = planned(DISCRETE_12, weights=DENSE_WEIGHTS, spec=DENSE)
    assert not [line for line in made.lines if line.item in ("experts", "host pool")]
    assert (made.mode.experts_in, made.expert_slots, made.sizing) == ("device", (), None)


@pytest.mark.parametrize("info", [DISCRETE_12, SMALL_APU], ids=lambda info: info.name)
@pytest.mark.parametrize("n_host", [0, 10])
def test_rows_of_tokens_lie_in_host_memory(info: DeviceInfo, n_host: int) -> None:
    """As embeddings for each layer do, whatever the card has room for; one arena has both."""
    layer_bytes, n_layers = 8 * MIB, DENSE.n_layers
    layers = (layer_bytes,) * n_layers
    weights = WeightBytes(
        (MIB, 2 * GIB, *layers, 3 * MIB), 0, table_pieces=1, layer_pieces=(1,) * n_layers,
        table=2 * GIB,
    )  # fmt: skip
    config = EngineConfig(gpu_layers=n_layers - n_host if n_host else None)
    made = planned(info, config, weights=weights, spec=DENSE)
    found = {line.item: line for line in made.lines if line.name == "host weights"}
    assert sum(line.n_bytes for line in found.values()) == layout_bytes(
        made.layouts("host weights")
    )
    table, *rest = found.values()
    assert table.place == "host" and 0 <= table.n_bytes - 2 * GIB < MIB
    assert [line.n_bytes for line in rest] == [n_host * layer_bytes] * (n_host > 0)
    on_device = MIB + (n_layers - n_host) * layer_bytes + 3 * MIB
    assert 0 <= bytes_of(made, "weights used by every token") - on_device < MIB
    read = token_bytes(DENSE, weights, MIB, n_host)
    assert read.trunk == on_device - MIB + n_host * layer_bytes, "a row of the table is nothing"
    assert read.trunk_in_host == n_host * layer_bytes


def test_f32_keys_and_values_take_twice_the_memory() -> None:
    half = planned(DISCRETE_12)
    whole = planned(DISCRETE_12, EngineConfig(cache_type_k="f32", cache_type_v="f32"))
    f16, f32 = bytes_of(half, "KV cache"), bytes_of(whole, "KV cache")
    rounding = GRANULARITY * SPEC.n_layers
    assert half.first_positions == whole.first_positions == FIRST_POSITIONS
    assert 0 <= f16 - FIRST_POSITIONS * KV_BYTES_PER_TOKEN <= rounding
    assert abs(f32 - 2 * f16) <= rounding


# ----- the device's budget -----


def test_a_card_keeps_room_for_others() -> None:
    """Half a GiB for the desktop, and a twentieth for what the driver adds."""
    assert device_budget(SMALL_WINDOW, RAM) == (8 * GIB - 512 * MIB) * 95 // 100


def test_a_reported_budget_counts_what_others_use() -> None:
    heaps = (Heap(12 * GIB, True, 6 * GIB, GIB), Heap(64 * GIB, False))
    assert device_budget(replace(DISCRETE_12, heaps=heaps), RAM) == 5 * GIB * 95 // 100
    full = (Heap(12 * GIB, True, GIB, 2 * GIB), Heap(64 * GIB, False))
    assert device_budget(replace(DISCRETE_12, heaps=full), RAM) == 0


@pytest.mark.parametrize("info", [APU, LAVAPIPE], ids=("APU", "CPU"))
def test_shared_memory_is_the_host_s(info: DeviceInfo) -> None:
    """The heaps of an APU can be larger than what is free, or than RAM: the host's memory binds,
    less what the rest of the machine needs."""
    assert device_budget(info, 40 * GIB) == 40 * GIB - 40 * GIB * 8 // 100
    assert device_budget(info, 5 * GIB) == 3 * GIB
    assert device_budget(info, GIB) == GIB // 2
    assert device_budget(info, GIB, margin_bytes=100) == GIB - 100


def test_heaps_of_an_apu_can_be_smaller_than_ram() -> None:
    """Of 32 GiB, only the heaps that weights can come from count, less what is used of them."""
    assert device_budget(SMALL_APU, RAM) == 6 * GIB * 95 // 100
    assert device_budget(SMALL_APU, 5 * GIB) == 3 * GIB
    used = (replace(SMALL_APU.heaps[0], usage=GIB), *SMALL_APU.heaps[1:])
    assert device_budget(replace(SMALL_APU, heaps=used), RAM) == 5 * GIB * 95 // 100
    assert planned(SMALL_APU).host_slots


def test_a_cpu_s_heap_is_no_limit() -> None:
    """Mesa 22.3's lavapipe reports 2 GiB, whatever the machine has, and allocates more."""
    small = replace(LAVAPIPE, heaps=(Heap(2 * GIB, True),))
    assert device_budget(small, RAM) == RAM - RAM * 8 // 100


def test_the_window_is_not_the_card() -> None:
    """The largest local heap counts, not the first."""
    heaps = (SMALL_WINDOW.heaps[2], SMALL_WINDOW.heaps[1], SMALL_WINDOW.heaps[0])
    shuffled = replace(SMALL_WINDOW, heaps=heaps)
    assert device_budget(shuffled, RAM) == device_budget(SMALL_WINDOW, RAM)


# ----- what does not fit -----


def test_experts_that_fit_nowhere() -> None:
    """Not even those of one token: 8 of 200 MiB."""
    large = expert_bytes(200 << 20)
    with pytest.raises(OutOfMemoryError, match=r"8 experts .* need 1,\d\d\d MiB of host memory"):
        planned(DISCRETE_12, weights=large, ram=GIB)
    with pytest.raises(OutOfMemoryError, match="8 experts") as caught:
        planned(APU, weights=large, ram=5 * GIB)
    assert caught.value.hint


def test_a_trunk_that_does_not_fit() -> None:
    with pytest.raises(OutOfMemoryError, match="without its experts") as caught:
        planned(SMALL_WINDOW, weights=WeightBytes((9 * GIB,), 0))
    assert "smaller model" in caught.value.hint
    with pytest.raises(OutOfMemoryError, match=r"KV cache 7,68\d MiB") as caught:
        planned(SMALL_WINDOW, EngineConfig(ctx_size=40960, cache_type_k="f32", cache_type_v="f32"))
    assert "--ctx-size" in caught.value.hint
    large = replace(SCRATCH, tensors=(9 * GIB,))
    with pytest.raises(OutOfMemoryError, match="activations 9,216 MiB") as caught:
        plan(EngineConfig(), SPEC, SMALL_WINDOW, WEIGHTS, large, RAM)
    assert "--ubatch-size" in caught.value.hint


def test_chunks_are_no_longer_than_the_device_can_bind() -> None:
    """Unless they were asked for: then that is an error before anything is loaded."""
    limits = replace(DISCRETE_12.limits, max_storage_buffer_range=1 << 17)
    device = replace(DISCRETE_12, limits=limits)
    with open_model(model_path("moe_plain")) as model:
        most = decide(EngineConfig(ctx_size=64), model, DISCRETE_12).workspace
        found = decide(EngineConfig(ctx_size=64), model, device).workspace
        assert most.row_sizes["prompt"][-1] == 512 > found.row_sizes["prompt"][-1] >= 32
        assert max(tensor.n_bytes for tensor in found.tensors) <= 1 << 17
        with pytest.raises(UsageError, match="512 tokens at once need") as caught:
            decide(EngineConfig(ctx_size=64, ubatch_size=512), model, device)
        assert "--ubatch-size" in caught.value.hint


# ----- the context -----


def test_the_default_context_is_the_model_s_up_to_a_limit() -> None:
    assert sure_context(EngineConfig(), SPEC) == SURE_CTX_SIZE
    assert sure_context(EngineConfig(), replace(SPEC, context_length=512)) == 512
    assert sure_context(EngineConfig(ctx_size=20000), SPEC) == 20000


def test_a_context_may_exceed_what_a_model_was_trained_for_but_not_what_it_can_take() -> None:
    longer = EngineConfig(ctx_size=40961)
    assert planned(DISCRETE_12, longer).ctx_size == sure_context(longer, SPEC) == 40961
    limited = replace(SPEC, context_limit="an indexer leaves positions out")
    with pytest.raises(UsageError, match=r"40961 is more than the 40960 tokens .* indexer"):
        sure_context(longer, limited)


def test_a_layer_s_cache_stays_below_4_gib() -> None:
    """The operation asserts it; the hint names the largest context that can be had."""
    wide = with_mixer(replace(SPEC, context_length=10**7), n_kv_heads=8)
    with pytest.raises(UsageError, match="4 GiB") as caught:
        sure_context(EngineConfig(ctx_size=3 * 10**6), wide)
    largest = int(caught.value.hint.split("--ctx-size ")[1].split()[0])
    assert sure_context(EngineConfig(ctx_size=largest), wide) == largest
    assert (largest + 1) * 8 * 128 * 2 >= 1 << 32


def test_a_layer_s_caches_that_the_device_cannot_allocate_are_refused() -> None:
    """The regions of a layer are one allocation, which has a limit however much memory is free."""
    limits = replace(DISCRETE_12.limits, max_memory_allocation_size=96 * MIB)
    device = replace(DISCRETE_12, limits=limits)
    assert planned(device, EngineConfig(parallel=2, ctx_size=40960))
    with pytest.raises(OutOfMemoryError, match="one piece") as caught:
        planned(device, EngineConfig(parallel=4, ctx_size=40960))
    assert caught.value.hint == "lower --ctx-size or --parallel, or try --cache-type-k q8_0"


def test_latent_layers_have_one_cache_of_compressed_rows() -> None:
    """DeepSeek-V2-Lite's 512 + 64 elements a position, in place of 16 heads' keys and values."""
    mixer = LatentSpec(16, kv_rank=512, nope_dim=128, value_dim=128, rope=RopeSpec(64))
    latent = replace(SPEC, layers=tuple(replace(x, mixer=mixer) for x in SPEC.layers))
    grouped = with_mixer(SPEC, n_kv_heads=16)
    found = [
        next(line.n_bytes for line in made.lines if line.item.startswith("KV cache"))
        for made in (
            planned(DISCRETE_12, EngineConfig(ctx_size=FIRST_POSITIONS), spec=spec)
            for spec in (latent, grouped)
        )
    ]
    n_positions, rounding = SPEC.n_layers * FIRST_POSITIONS, GRANULARITY * SPEC.n_layers
    assert 0 <= found[0] - n_positions * 576 * 2 <= rounding
    assert 0 <= found[1] - 2 * n_positions * 16 * 128 * 2 <= rounding
    largest = (2**32 - 1) // (576 * 2)
    assert sure_context(EngineConfig(ctx_size=largest), replace(latent, context_length=10**7))
    with pytest.raises(UsageError, match=r"4 GiB"):
        sure_context(EngineConfig(ctx_size=largest + 1), replace(latent, context_length=10**7))


# ----- what is decided around the plan -----

FORECAST = CacheSettings("forecast")
PLANNED = MemoryPlan(1024, both("f16"), Cache(), (), expert_slots=(8,) * N_LAYERS)


def decided_for(measure: Callable[[], Speeds], known: bool = False, **asked: Any) -> Decision:
    """The decision for a tiny model."""
    with open_model(model_path("moe_plain")) as file:
        config = EngineConfig(ctx_size=16, **asked)
        return decide(config, file, LAVAPIPE, choosing=Choosing(measure, known))


def decided_lines(**asked: Any) -> list[Allocation]:
    """Of a predictor, in the plan for a tiny model."""
    plan = decided_for(Speeds, **asked).plan
    return [line for line in plan.lines if "predictor" in line.item]


def test_speeds_that_are_at_hand_count_where_there_is_nothing_to_choose() -> None:
    """All experts are on the device, and nothing is measured for that. `vkmoe plan` has speeds."""
    found = decided_for(lambda: Speeds(device=7e9), known=True)
    assert found.plan.mode == RESIDENT and found.machine.speeds.device == 7e9
    usual = decided_for(lambda: Speeds(device=7e9))
    assert usual.machine.speeds.device == TYPICAL["cpu"].speeds.device
    assert usual.candidates[0].prediction.rate != found.candidates[0].prediction.rate


@pytest.mark.parametrize(
    ("asked", "n_measured"), [({}, 0), ({"expert_slots": 4}, 1), ({"expert_cache": "1KiB"}, 1)]
)
def test_the_link_is_measured_once_where_experts_miss(
    asked: dict[str, Any], n_measured: int, caplog: pytest.LogCaptureFixture
) -> None:
    """What was measured decides how, and the log says why."""
    links: list[LinkSpeed] = []

    def measure() -> Speeds:
        links.append(LinkSpeed(1e9, 9e9, 8e9))
        return Speeds().over_link(links[0])

    caplog.set_level("INFO", "vkmoe")
    decided = decided_for(measure, miss="gather", **asked)
    assert (len(links), decided.link) == (n_measured, links[0] if links else None)
    assert decided.plan.mode.gathers == decided.plan.mode.has_slots == ("expert_slots" in asked)
    assert ("gathered on the device first: as --miss" in caplog.text) == decided.plan.mode.has_slots


def test_the_predictor_has_the_bytes_that_its_line_says() -> None:
    assert SPEC.experts is not None
    (line,) = predictor_lines(FORECAST, PLANNED, SPEC, LAVAPIPE)
    made = TokenTable(KeySpace(N_LAYERS, N_EXPERTS), SPEC.experts.n_used)
    arrays = [value for value in vars(made).values() if isinstance(value, np.ndarray)]
    taken = sum(array.nbytes for array in arrays)
    assert line.place == "host" and 0.99 * taken < line.n_bytes <= taken
    assert line.n_bytes > 30 << 20, "of 48 layers that use 8 experts"


def test_a_predictor_that_is_off_has_no_line() -> None:
    assert predictor_lines(CacheSettings("lru"), PLANNED, SPEC, LAVAPIPE) == ()
    at_home = replace(PLANNED, mode=AtHome(), expert_slots=())
    assert predictor_lines(FORECAST, at_home, SPEC, LAVAPIPE) == ()
    assert predictor_lines(FORECAST, PLANNED, DENSE, LAVAPIPE) == ()


@pytest.mark.parametrize(
    ("asked", "n_lines"),
    [
        ({"expert_slots": 4}, 1),
        ({"expert_slots": 4, "expert_policy": "lru"}, 0),
        ({"host_pool": "192KiB"}, 1),
        ({}, 0),
    ],
)
def test_only_what_runs_is_in_the_plan(asked: dict[str, Any], n_lines: int) -> None:
    assert len(decided_lines(**asked)) == n_lines
