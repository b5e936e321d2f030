"""The memory plan, on devices that are not here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.gpu.invented import (
    AMD,
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
from vkmoe.config import EngineConfig
from vkmoe.errors import OutOfMemoryError, UsageError
from vkmoe.facts import DeviceInfo, Heap, MemoryPlan, ModelSpec, RopeSpec, WeightBytes
from vkmoe.placement.planner import DEFAULT_CTX_SIZE, context_size, device_budget, plan

SPEC = ModelSpec(
    architecture="qwen3moe", name="model", n_layers=48, width=2048, n_heads=32, n_kv_heads=4,
    head_dim=128, n_vocab=151936, context_length=40960, norm_eps=1e-6, rope=RopeSpec(128, 1e6),
    qk_norm="per_head", feed_forward_width=0, experts=None, tied_embeddings=False,
)  # fmt: skip
WEIGHTS = WeightBytes(trunk=GIB, experts=17 * GIB)
SCRATCH = 2 * MIB
RAM = 32 * GIB
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


@pytest.mark.parametrize(
    ("info", "experts_in"),
    [
        (DISCRETE_12, "host"),
        (SMALL_WINDOW, "host"),
        (AMD, "host"),
        (APU, "device"),
        (LAVAPIPE, "device"),
        (replace(DISCRETE_12, heaps=(Heap(24 * GIB, True), Heap(64 * GIB, False))), "device"),
    ],
    ids=lambda item: getattr(item, "name", item),
)
def test_where_experts_lie(info: DeviceInfo, experts_in: str) -> None:
    """17 GiB of experts: in place on shared memory, on the card if they fit, else in the host's."""
    made = planned(info)
    assert made.experts_in == experts_in
    assert made.lines[-1].item == "experts" and made.lines[-1].place == experts_in


@pytest.mark.parametrize("info", [*DEVICES, SMALL_APU], ids=lambda info: info.name)
def test_a_plan_fits_and_explains_itself(info: DeviceInfo) -> None:
    small = info.name in (SMALL_APU.name, NOT_COHERENT.name)
    weights = WeightBytes(GIB, 3 * GIB) if small else WEIGHTS
    made = planned(info, weights=weights)
    assert made.total("device") <= device_budget(info, RAM)
    assert made.total("device") + made.total("host") == (
        weights.trunk + weights.experts + SCRATCH
        + DEFAULT_CTX_SIZE * (KV_BYTES_PER_TOKEN + 4 * SPEC.rope.dim)
    )  # fmt: skip
    assert all(line.reason and line.n_bytes > 0 for line in made.lines)


def test_a_dense_model_has_no_expert_line() -> None:
    made = planned(DISCRETE_12, weights=WeightBytes(GIB, 0))
    assert all(line.item != "experts" for line in made.lines)


def test_f32_keys_and_values_take_twice_the_memory() -> None:
    sizes = {
        kind: next(line.n_bytes for line in planned(DISCRETE_12, EngineConfig(kv_type=kind)).lines
                   if line.item.startswith("KV cache"))
        for kind in ("f16", "f32")
    }  # fmt: skip
    assert sizes["f16"] == DEFAULT_CTX_SIZE * KV_BYTES_PER_TOKEN
    assert sizes["f32"] == 2 * sizes["f16"]


# ----- the device's budget -----


def test_a_card_keeps_room_for_others() -> None:
    """Half a GiB for the desktop, and a twentieth for what the driver adds."""
    assert device_budget(SMALL_WINDOW, RAM) == (8 * GIB - 512 * MIB) * 95 // 100


def test_a_reported_budget_counts_what_others_use() -> None:
    heaps = (Heap(12 * GIB, True, 6 * GIB, GIB), Heap(64 * GIB, False))
    assert device_budget(replace(DISCRETE_12, heaps=heaps), RAM) == 5 * GIB * 95 // 100
    full = (Heap(12 * GIB, True, GIB, 2 * GIB), Heap(64 * GIB, False))
    assert device_budget(replace(DISCRETE_12, heaps=full), RAM) == 0


@pytest.mark.parametrize(("info", "reserve"), [(APU, 4 * GIB), (LAVAPIPE, GIB)], ids=("APU", "CPU"))
def test_shared_memory_is_the_host_s(info: DeviceInfo, reserve: int) -> None:
    """The heaps of an APU can be larger than what is free, or than RAM: the host's memory binds,
    less what the rest of the machine needs."""
    assert device_budget(info, 5 * GIB) == 5 * GIB - reserve
    assert device_budget(info, GIB // 2) == 0


def test_heaps_of_an_apu_can_be_smaller_than_ram() -> None:
    """Of 32 GiB, only the heaps that weights can come from count, less what is used of them."""
    assert device_budget(SMALL_APU, RAM) == 6 * GIB * 95 // 100
    assert device_budget(SMALL_APU, 7 * GIB) == 3 * GIB
    used = (replace(SMALL_APU.heaps[0], usage=GIB), *SMALL_APU.heaps[1:])
    assert device_budget(replace(SMALL_APU, heaps=used), RAM) == 5 * GIB * 95 // 100
    with pytest.raises(OutOfMemoryError, match="experts need 17,408 MiB"):
        planned(SMALL_APU)


def test_a_cpu_s_heap_is_no_limit() -> None:
    """Mesa 22.3's lavapipe reports 2 GiB, whatever the machine has, and allocates more."""
    small = replace(LAVAPIPE, heaps=(Heap(2 * GIB, True),))
    assert device_budget(small, RAM) == RAM - GIB


def test_the_window_is_not_the_card() -> None:
    """The largest local heap counts, not the first."""
    heaps = (SMALL_WINDOW.heaps[2], SMALL_WINDOW.heaps[1], SMALL_WINDOW.heaps[0])
    shuffled = replace(SMALL_WINDOW, heaps=heaps)
    assert device_budget(shuffled, RAM) == device_budget(SMALL_WINDOW, RAM)


# ----- what does not fit -----


def test_experts_that_fit_nowhere() -> None:
    with pytest.raises(OutOfMemoryError, match=r"experts need 17,408 MiB.*12 GB discrete"):
        planned(DISCRETE_12, ram=20 * GIB)
    with pytest.raises(OutOfMemoryError, match="experts need") as caught:
        planned(APU, ram=16 * GIB)
    assert caught.value.hint


def test_a_host_heap_smaller_than_ram_binds_too() -> None:
    """Some drivers give the GPU only a part of the host's memory."""
    heaps = (Heap(12 * GIB, True), Heap(16 * GIB, False))
    with pytest.raises(OutOfMemoryError, match="experts need"):
        planned(replace(DISCRETE_12, heaps=heaps), ram=64 * GIB)


def test_a_trunk_that_does_not_fit() -> None:
    with pytest.raises(OutOfMemoryError, match="without its experts") as caught:
        planned(SMALL_WINDOW, weights=WeightBytes(9 * GIB, 0))
    assert "smaller model" in caught.value.hint
    with pytest.raises(OutOfMemoryError, match="KV cache 7,680 MiB") as caught:
        planned(SMALL_WINDOW, EngineConfig(ctx_size=40960, kv_type="f32"))
    assert "--ctx-size" in caught.value.hint


# ----- the context -----


def test_the_default_context_is_the_model_s_up_to_a_limit() -> None:
    assert context_size(EngineConfig(), SPEC) == DEFAULT_CTX_SIZE
    assert context_size(EngineConfig(), replace(SPEC, context_length=512)) == 512
    assert context_size(EngineConfig(ctx_size=20000), SPEC) == 20000


def test_a_context_beyond_the_model_s_is_refused() -> None:
    with pytest.raises(UsageError, match="40961 is more than the 40960 tokens"):
        context_size(EngineConfig(ctx_size=40961), SPEC)


def test_a_layer_s_cache_stays_below_4_gib() -> None:
    """ops/attention.py asserts it; the hint names the largest context that can be had."""
    wide = replace(SPEC, context_length=10**7, n_kv_heads=8)
    with pytest.raises(UsageError, match="4 GiB") as caught:
        context_size(EngineConfig(ctx_size=3 * 10**6), wide)
    largest = int(caught.value.hint.split("--ctx-size ")[1].split()[0])
    assert context_size(EngineConfig(ctx_size=largest), wide) == largest
    assert (largest + 1) * 8 * 128 * 2 >= 1 << 32
