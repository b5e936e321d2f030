"""Kernels may require a subgroup size: the driver is told it, and what it cannot do is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.native.conftest import CompileGlsl, host_memory_type
from vkmoe.gpu import _native as native

FEATURES = ["subgroup_size_control", "compute_full_subgroups"]
# Each word becomes the sum over its subgroup.
SUMS = """#version 450
#extension GL_KHR_shader_subgroup_arithmetic : require
layout(local_size_x_id = 0) in;
layout(binding = 0) buffer Words { uint words[]; };
void main() { words[gl_GlobalInvocationID.x] = subgroupAdd(words[gl_GlobalInvocationID.x]); }
"""


@pytest.fixture
def sums(compile_glsl: CompileGlsl) -> bytes:
    return compile_glsl(SUMS)


def sums_and_messages(sums: bytes, n: int, subgroup_size: int) -> tuple[list[int], list[str]]:
    """What a workgroup of `n` makes of n ones, and what the validation layer says."""
    instance = native.Instance(validation=True)
    device = instance.open(0, FEATURES)
    tensor, out = device.tensor(n), device.buffer(4 * n, host_memory_type(instance))
    kernel = device.kernel(sums, [tensor], [n], 0, "sums", subgroup_size)
    recorder = device.recorder()
    recorder.fill(tensor, 0, 4 * n, 1)
    recorder.barrier()
    recorder.dispatch(kernel, (1, 1, 1))
    recorder.barrier()
    recorder.copy(tensor, 0, out, 0, 4 * n)
    device.submit(recorder.finish()).wait()
    found: list[int] = out.view().view(np.uint32).tolist()
    messages = instance.messages()
    device.close()
    instance.close()
    return found, messages


def test_every_size_of_the_device_can_be_required(instance, sums):
    facts = instance.physical_devices()[0]
    assert facts["takes_subgroup_size"], "the tests' drivers do"
    size = facts["min_subgroup_size"]
    while size <= facts["max_subgroup_size"]:
        assert sums_and_messages(sums, 4 * size, size) == ([size] * 4 * size, [])
        size *= 2


def test_the_driver_is_told_the_size_and_to_fill_subgroups(instance, sums):
    """The layer sees both: a workgroup that is not whole subgroups breaks the rule about them."""
    size = instance.physical_devices()[0]["max_subgroup_size"]
    n = size + size // 2
    assert sums_and_messages(sums, n, 0)[1] == []
    (message,) = sums_and_messages(sums, n, size)[1]
    assert "VUID-VkPipelineShaderStageCreateInfo-pNext-02757" in message


def test_other_sizes_are_refused(instance, sums):
    facts = instance.physical_devices()[0]
    device = instance.open(0, FEATURES)
    sizes = (facts["min_subgroup_size"] // 2, 2 * facts["max_subgroup_size"], 7)
    for size in sizes:
        with pytest.raises(ValueError, match=f'"sums": subgroups of {size} cannot be required'):
            device.kernel(sums, [device.tensor(64)], [64], 0, "sums", size)
    device.close()


@pytest.mark.parametrize("features", [[], FEATURES[:1], FEATURES[1:]], ids=len)
def test_without_the_features_every_size_is_refused(instance, sums, features):
    device = instance.open(0, features)
    size = instance.physical_devices()[0]["subgroup_size"]
    with pytest.raises(ValueError, match="cannot be required of this device as it was opened"):
        device.kernel(sums, [device.tensor(64)], [64], 0, "sums", size)
    device.close()
