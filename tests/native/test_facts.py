"""What physical_devices() tells, and what open() refuses."""

from __future__ import annotations

import pytest

from vkmoe.gpu import _native as native

KEYS = {
    *("index", "name", "type", "vendor_id", "device_id", "api_version", "driver_name"),
    *("driver_info", "driver_id", "uuid", "subgroup_size", "min_subgroup_size"),
    *(
        "max_subgroup_size",
        "subgroup_arithmetic",
        "subgroup_shuffle",
        "heaps",
        "memory_types",
        "queue_families",
    ),
    *("takes_subgroup_size", "features", "matrix_shapes", "limits"),
}
FEATURES = {
    *("storage_8bit", "storage_16bit", "float16", "int8", "int16", "int64", "scalar_layout"),
    *("subgroup_size_control", "integer_dot_product"),
    *("buffer_device_address", "cooperative_matrix", "host_query_reset"),
    *("memory_model", "memory_model_device_scope"),
    "compute_full_subgroups",
}
COMPONENTS = {"f16", "f32", "f64", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64"}


def test_facts_are_complete_and_consistent(instance):
    devices = instance.physical_devices()
    assert devices, "no Vulkan driver here"
    for index, facts in enumerate(devices):
        assert {*facts} == KEYS
        assert {*facts["features"]} <= FEATURES
        assert facts["index"] == index
        assert facts["type"] in {"discrete", "integrated", "virtual", "cpu", "other"}
        low, usual, high = (facts[f"{end}subgroup_size"] for end in ("min_", "", "max_"))
        assert 1 <= low <= usual <= high <= 128
        assert all(0 <= t["heap"] < len(facts["heaps"]) for t in facts["memory_types"])
        assert any("HOST_VISIBLE" in t["flags"] for t in facts["memory_types"])
        assert any("COMPUTE" in family["flags"] for family in facts["queue_families"])
        assert len(facts["uuid"]) == 32
        assert bool(facts["matrix_shapes"]) <= ("cooperative_matrix" in facts["features"])
        for *sizes, factors, sums in facts["matrix_shapes"]:
            assert len(sizes) == 3 and min(sizes) >= 1 and {factors, sums} <= COMPONENTS
        limits = facts["limits"]
        assert limits["max_push_constants"] >= 128
        assert limits["max_buffer_size"] >= 2**27
        assert len(limits["max_workgroup_size"]) == len(limits["max_workgroup_count"]) == 3


def test_every_listed_feature_can_be_enabled(instance):
    for facts in instance.physical_devices():
        device = instance.open(facts["index"], facts["features"])
        assert device.n_queues == 1 + device.has_upload_queue
        device.close()


def features_not_there() -> list[str]:
    """Features that the first device lacks; lavapipe and SwiftShader lack some each."""
    made = native.Instance()
    devices = made.physical_devices()
    made.close()
    return sorted(FEATURES - set(devices[0]["features"])) if devices else []


@pytest.mark.parametrize("name", features_not_there())
def test_missing_features_are_listed(instance, name):
    with pytest.raises(native.VulkanError, match=f"lacks {name}") as caught:
        instance.open(0, ["buffer_device_address", name])
    assert caught.value.result == "VK_ERROR_FEATURE_NOT_PRESENT"
    assert native.live_objects() == {"instance": 1}


def test_the_version_of_kompute_is_known():
    assert native.kompute_version == "0.9.0"
