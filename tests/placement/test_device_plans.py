"""Plans of real models' shapes on devices that are not here: none takes more than there is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.needs import need_cpu
from tools.pipelines import MODELS, Described
from vkmoe.config import EngineConfig
from vkmoe.cpu.variants import choose
from vkmoe.errors import OutOfMemoryError, UsageError
from vkmoe.facts import DeltaNetSpec, LatentSpec, LayerSpec, MemoryPlan
from vkmoe.models import ModelFile
from vkmoe.option_fields import parse_mib
from vkmoe.placement.decide import Decision, decide
from vkmoe.placement.forecast.device_profiles import DeviceProfile, known_profiles, read_profile
from vkmoe.placement.forecast.speeds import Speeds
from vkmoe.placement.memory import GRANULARITY, device_budget, host_budget
from vkmoe.placement.typed_json import plain

PROFILES = ("8gb-nobar", "navi31", "rtx3060-12gb", "uma-32gb")
QWEN3 = "qwen3-30b-a3b"
WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "f32 cache": {"cache_type_k": "f32", "cache_type_v": "f32", "ctx_size": 4096},
    "hybrid": {"expert_mode": "hybrid"},
    "cpu": {"cpu_moe": True},
    "some layers": {"n_cpu_moe": 40},
}
MIB, GIB = 1 << 20, 1 << 30


def model_of(name: str) -> ModelFile:
    """A model in Q4_K, from its metadata alone."""
    return Described(name).file("Q4_K")


def decided(model: ModelFile, profile: DeviceProfile, **asked: Any) -> Decision:
    config = EngineConfig(**asked)
    if config.mode in ("cpu", "hybrid"):
        need_cpu()
    return decide(config, model, profile.info, available_host_bytes=profile.available_host_bytes)


def test_the_profiles_are_there() -> None:
    """The one without resizable BAR maps a small window of the device's memory alone."""
    assert tuple(known_profiles()) == PROFILES
    small = read_profile("8gb-nobar").info
    mapped = {
        kind.heap for kind in small.memory_types if kind.flags >= {"DEVICE_LOCAL", "HOST_VISIBLE"}
    }
    assert [small.heaps[heap].size for heap in mapped] == [256 << 20]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("profile_name", PROFILES)
@pytest.mark.sample(35)
def test_no_plan_takes_more_than_there_is(profile_name: str, name: str, way: str) -> None:
    """Where one is refused, the error says what is needed, what there is, and what to try."""
    profile, model = read_profile(profile_name), model_of(name)
    info, free = profile.info, profile.available_host_bytes
    try:
        made = decided(model, profile, **WAYS[way]).plan
    except OutOfMemoryError as error:
        assert "MiB" in str(error) and error.hint
        assert way == "some layers" or model_bytes(model) > device_budget(info, free)
        return
    taken = made.heap_totals()
    if info.is_uma:  # what one heap has no room for, another has
        assert sum(taken.values()) <= sum(heap.size for heap in info.heaps)
    else:
        assert all(n_bytes <= info.heaps[heap].size for heap, n_bytes in taken.items())
    on_device = made.total("device")
    assert on_device <= device_budget(info, free)
    in_host = made.total("host") + (on_device if info.is_uma else 0)
    assert in_host <= free
    if made.kept_bytes:
        assert made.kept_bytes + in_host + made.total("file") <= host_budget(free)
    (cache,) = (line for line in made.lines if line.item.startswith("KV cache"))
    half_bytes = 2 * sum(cached_numbers(layer, made) for layer in model.spec.layers)
    wanted = half_bytes * {"f16": 1, "f32": 2}[made.kv_types.keys]
    wanted += sum(state_bytes(layer, made.n_versions) for layer in model.spec.layers)
    rounding = GRANULARITY * len(model.spec.layers)
    assert wanted <= cache.n_bytes <= wanted * 1.01 + rounding
    assert made.first_positions <= made.ctx_size <= model.spec.context_length


@pytest.mark.parametrize("profile_name", PROFILES)
def test_kept_prompts_take_what_experts_leave(profile_name: str) -> None:
    """As much as was asked for, if that is left; what experts have is the same with any number."""
    profile, model = read_profile(profile_name), model_of(QWEN3)
    found = {
        asked: decided(model, profile, cache_ram=asked).plan
        for asked in (None, "0", "64", "0.5GiB", "-1")
    }
    most = found["-1"].kept_bytes
    assert profile_name == "uma-32gb" or most > 256 * MIB
    for asked, plan in found.items():
        others = [line for line in plan.lines if line.place != "spare"]
        assert others == list(found["0"].lines)
        wanted = 8 * GIB if asked is None else parse_mib(asked)
        assert plan.kept_bytes == min(wanted, most)
        assert plan.heap_totals() == found["0"].heap_totals()
        if 0 < wanted <= most and asked is not None:
            assert plan.lines[-1].reason == "as --cache-ram"


def cached_numbers(layer: LayerSpec, made: MemoryPlan) -> int:
    """What a layer caches of all positions, or of those of its window and of a chunk."""
    mixer, n_positions = layer.mixer, made.first_positions
    if isinstance(mixer, DeltaNetSpec):
        return 0
    if isinstance(mixer, LatentSpec):
        return n_positions * mixer.row
    n_places = n_positions
    if mixer.window:  # a power of two
        n_places = min(n_positions, 1 << (mixer.window + made.chunk_rows - 1).bit_length())
    return n_places * 2 * mixer.kv_width


def state_bytes(layer: LayerSpec, n_versions: int) -> int:
    """What a recurrent layer keeps in f32: 16 rows of a convolution, and versions of its state."""
    mixer = layer.mixer
    if not isinstance(mixer, DeltaNetSpec):
        return 0
    n_rows = 16 * (2 * mixer.n_key_heads + mixer.n_heads)
    return 4 * mixer.head_dim * (n_rows + n_versions * mixer.n_heads * mixer.head_dim)


@pytest.mark.parametrize("name", [name for name in MODELS if "qwen3.6" not in name])
def test_a_type_takes_the_bits_that_docs_say(name: str) -> None:
    """34, 24 or 18 bytes hold the 32 numbers of a block, where f16 has 64; none are lost where rows
    are pairs of blocks."""
    profile, model = read_profile("rtx3060-12gb"), model_of(name)
    is_latent = any(isinstance(mixer, LatentSpec) for mixer in model.spec.mixers)
    bytes_of = {}
    asked = [(kind, kind, kind) for kind in ("f16", "q8_0", "q5_1", "q4_0")]
    asked += [] if is_latent else [("q8_0", "f16", "K q8_0, V f16")]
    for keys, values, named in asked:
        types = {"cache_type_k": keys, "cache_type_v": values}
        made = decided(model, profile, ctx_size=4096, n_cpu_moe=1000, **types).plan
        (line,) = (line for line in made.lines if line.item.startswith("KV cache"))
        assert line.item == f"KV cache, 4096 tokens, {named}"
        bytes_of[named] = line.n_bytes
    half, rounding = bytes_of.pop("f16"), GRANULARITY * len(model.spec.layers)
    for kind, n_bytes in (("q8_0", 34), ("q5_1", 24), ("q4_0", 18)):
        assert bytes_of.pop(kind) == pytest.approx(half * n_bytes / 64, abs=rounding)
    for n_bytes in bytes_of.values():
        assert n_bytes == pytest.approx(half * (34 + 64) / 128, abs=rounding)


def test_a_row_that_is_key_and_value_has_one_type() -> None:
    profile, model = read_profile("rtx3060-12gb"), model_of("deepseek-v2-lite")
    for asked in ({"cache_type_v": "q8_0"}, {"cache_type_k": "q8_0", "cache_type_v": "f16"}):
        with pytest.raises(UsageError, match=r"--cache-type-v .* --cache-type-k") as caught:
            decided(model, profile, **asked)
        assert "--cache-type-v" in caught.value.hint
    assert decided(model, profile, cache_type_k="q8_0").plan.kv_types == ("q8_0", "q8_0")


def model_bytes(model: ModelFile) -> int:
    return sum(tensor.n_bytes for tensor in model.file.tensors.values())


@pytest.mark.parametrize("way", ["hybrid", "cpu"])
def test_experts_of_the_cpu_stay_in_the_file(way: str) -> None:
    profile, model = read_profile("8gb-nobar"), model_of(QWEN3)
    made = decided(model, profile, **WAYS[way]).plan
    assert (made.mode.name, made.cpu_layers) == (way, 48)
    experts = sum(tensor.n_bytes for name, tensor in model.file.tensors.items() if "_exps" in name)
    assert made.total("file") == experts and made.total("host") < 2 * GIB


def small(profile: DeviceProfile, n_bytes: int) -> DeviceProfile:
    """The same with less memory of its own."""
    heaps = tuple(replace(heap, size=n_bytes, budget=n_bytes) if heap.size > GIB and
                  heap.device_local else heap for heap in profile.info.heaps)  # fmt: skip
    return replace(profile, info=replace(profile.info, heaps=heaps))


def test_a_build_without_kernels_for_the_cpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vkmoe.placement.decide.variant", lambda: choose({}, ()))
    model, device = model_of(QWEN3), read_profile("8gb-nobar").info
    for way, flag in (("cpu", "--cpu-moe"), ("hybrid", "--expert-mode hybrid")):
        match = f"{flag} needs the CPU: this vkmoe was built without kernels for the CPU"
        with pytest.raises(UsageError, match=match) as caught:
            decide(EngineConfig(**WAYS[way]), model, device)
        assert caught.value.hint == "leave it out, or build vkmoe without -DVKMOE_CPU=OFF"


def test_a_context_that_was_not_asked_for_gives_way() -> None:
    """It is halved until it fits, and that is said; one that was asked for stays."""
    profile, model = small(read_profile("8gb-nobar"), 7 * GIB // 4), model_of("olmoe-1b-7b")
    made = decided(model, profile, cache_type_k="f32", cache_type_v="f32").plan
    assert made.ctx_size < 4096
    assert f"the context is {made.ctx_size} tokens, because 4096 do not fit" in made.notes
    (cache,) = (line for line in made.lines if line.item.startswith("KV cache"))
    assert cache.reason == "reduced from 4096, which does not fit; --ctx-size changes it"
    twice = {"cache_type_k": "f32", "cache_type_v": "f32", "ctx_size": 2 * made.ctx_size}
    kept = decided(model, profile, **twice).plan
    assert kept.ctx_size == 2 * made.ctx_size and kept.host_layers > 0, "layers give way"
    with pytest.raises(OutOfMemoryError, match="KV cache"):
        decided(model, profile, gpu_layers=99, **twice)
    with pytest.raises(OutOfMemoryError, match="without its experts"):
        decided(model, small(profile, GIB // 2))


def test_layers_that_do_not_fit_go_to_host_memory() -> None:
    """As few as need to, after the context has given way; asked for, both stay what they are."""
    profile, model = small(read_profile("8gb-nobar"), 5 * GIB // 4), model_of(QWEN3)
    made = decided(model, profile).plan
    assert 0 < made.host_layers < 48 and made.ctx_size == 512
    assert f"{made.host_layers} of 48 layers are in host memory" in made.notes[-1]
    (line,) = (line for line in made.lines if line.name == "host weights")
    assert line.place == "host" and "--gpu-layers changes it" in line.reason
    one_more = {"ctx_size": 512, "gpu_layers": 48 - made.host_layers + 1}
    with pytest.raises(OutOfMemoryError, match="without its experts"):
        decided(model, profile, **one_more)
    asked = decided(model, profile, gpu_layers=10).plan
    (line,) = (line for line in asked.lines if line.name == "host weights")
    assert (asked.host_layers, line.reason) == (38, "as --gpu-layers")
    assert line.item == "weights of the last 38 of 48 layers" and asked.ctx_size > 512
    assert not any("in host memory, because" in note for note in asked.notes)
    with pytest.raises(OutOfMemoryError):
        decided(model, small(read_profile("8gb-nobar"), 5 * GIB // 8))


def test_a_context_stays_where_something_else_that_was_asked_does_not_fit() -> None:
    profile, model = read_profile("rtx3060-12gb"), model_of(QWEN3)
    for asked, flag in (
        ({"expert_slots": 120}, "--expert-slots"),
        ({"n_cpu_moe": 2}, "--n-cpu-moe"),
    ):
        with pytest.raises(OutOfMemoryError, match=flag):
            decided(model, profile, **asked)


def test_the_margin_is_left_to_others() -> None:
    model, plain = model_of(QWEN3), read_profile("rtx3060-12gb")
    n_bytes = [decided(model, plain, **asked).plan.total("device")
               for asked in ({}, {"vram_margin": "512MiB"}, {"vram_margin": "2GiB"})]  # fmt: skip
    assert n_bytes[0] == n_bytes[1] > n_bytes[2], "512 MiB are the default"
    assert n_bytes[2] <= (12 * GIB - 2 * GIB) * 95 // 100
    assert n_bytes[1] - n_bytes[2] == pytest.approx(1.5 * GIB, rel=0.1)


def test_a_host_that_would_swap_is_an_error() -> None:
    """All experts are in host memory or on the CPU's side: neither may take more than is free."""
    model, profile = model_of(QWEN3), read_profile("rtx3060-12gb")
    poor = replace(profile, available_host_bytes=GIB // 64)
    with pytest.raises(
        OutOfMemoryError, match=r"of host memory \(staging .*\); 16 MiB can be used"
    ) as caught:
        decided(model, poor, cpu_moe=True)
    assert "close other programs" in caught.value.hint


# ----- profiles of users -----


def written(tmp_path: Path, **changes: Any) -> Path:
    found = {
        "device": plain(read_profile("navi31").info) | changes.pop("device", {}),
        "host_memory_bytes": 8 * GIB,
        "gb_per_second": {"device": 500},
    }
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(found | changes))
    return path


def test_a_profile_of_ones_own_is_read(tmp_path: Path) -> None:
    found = read_profile(str(written(tmp_path)))
    navi = read_profile("navi31")
    assert found.info == navi.info
    assert (found.available_host_bytes, found.speeds) == (8 * GIB, Speeds(device=500e9))
    assert replace(found, available_host_bytes=1).sources == {}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"device": {"heaps": []}}, "there are no heaps"),
        ({"device": {"heaps": [{"size": 0, "device_local": True}]}}, "a heap has no size"),
        ({"device": {"heaps": [{"size": 1, "device_local": "no"}]}}, "'no' is not a yes or no"),
        (
            {"device": {"heaps": [{"size": 1, "device_local": True, "budget": -1}]}},
            "-1 is not a number",
        ),
        ({"device": {"memory_types": []}}, "no memory type can be used"),
        ({"device": {"memory_types": [{"heap": 0, "flags": []}]}}, "no memory type can be used"),
        ({"device": {"subgroup_size": 0}}, "a size of subgroups, is 0"),
        ({"device": {"subgroup_range": [32]}}, "[32] is not"),
        ({"device": {"type": "abacus"}}, "its type is none of"),
        ({"device": {"type": {}}}, "{} is not a text"),
        ({"device": {"limits": {"max_push_constants": 0}}}, "a limit, or"),
        ({"device": {"layout": "file"}}, "its layout is not planes"),
        ({"device": {"limits": None}}, "None is not"),
        ({"device": {"memory_types": [{"heap": 9, "flags": []}]}}, "a memory type is of no heap"),
        ({"device": {"colour": "red"}}, "colour"),
        ({"host_memory_bytes": -1}, "-1 is not a number of bytes"),
        ({"host_memory_bytes": True}, "True is not a number of bytes"),
        ({"gb_per_second": {"device": "fast"}}, "'fast' is not a speed"),
        ({"gb_per_second": {"moon": 1}}, "moon"),
        ({"device": {"limits": {"max_moons": 3}}}, "max_moons"),
    ],
)
def test_a_damaged_profile_is_one_error(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match="is no device profile") as caught:
        read_profile(str(written(tmp_path, **changes)))
    assert told in str(caught.value) and "navi31.json" in caught.value.hint


@pytest.mark.parametrize("text", ["", "{}", "[1]", "not json", "[" * 100_000, '{"device": 3}'])
def test_what_is_no_profile_at_all_is_one_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="is no device profile"):
        read_profile(str(path))


def test_a_name_that_is_none_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no device profile 'navi99'") as caught:
        read_profile("navi99")
    assert "8gb-nobar, navi31, rtx3060-12gb, uma-32gb" in caught.value.hint
    with pytest.raises(UsageError, match="no device profile"):
        read_profile(str(tmp_path))
    with pytest.raises(UsageError, match="no device profile"):
        read_profile("x" * 300)
    large = tmp_path / "large.json"
    large.write_bytes(b" " * (2 << 20))
    with pytest.raises(UsageError, match="larger than 1 MiB"):
        read_profile(str(large))
