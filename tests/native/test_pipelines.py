"""Kernels that differ in nothing but their tensors share a pipeline: the driver makes it once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.native.test_commands import run, words
from vkmoe.gpu import _native as native

MOST_UNUSED = 64  # pipelines without a kernel that a device keeps, see pipelines.cpp


def is_made(device: native.Device, *arguments: Any) -> bool:
    """Whether the driver is asked for the pipeline of a kernel: the call would fail."""
    native.inject_failure("vkCreateComputePipelines")
    try:
        device.kernel(*arguments)
    except RuntimeError:
        return True
    finally:
        native.clear_injections()
    return False


def test_kernels_that_share_a_pipeline_keep_their_tensors_and_constants(device, host, affine):
    tensors, out = [device.tensor(16), device.tensor(16)], device.buffer(64, host)
    kernels = [device.kernel(affine, [tensor], [16, 3], 4) for tensor in tensors]
    assert native.live_objects()["pipeline"] == 1
    for addend, tensor in enumerate(tensors):
        recorder = device.recorder()
        recorder.fill(tensor, 0, 64, 5)
        recorder.barrier()
        # The second goes on with the pipeline that the first one had made, and is gone.
        recorder.dispatch(kernels.pop(0), (1, 1, 1), addend.to_bytes(4, "little"))
        recorder.barrier()
        recorder.copy(tensor, 0, out, 0, 64)
        run(device, recorder)
        assert words(out).tolist() == [15 + addend] * 16


def test_what_goes_into_a_pipeline_makes_it_another(device, affine, slow):
    tensor, other = device.tensor(16), device.tensor(16)
    assert is_made(device, affine, [tensor], [16, 3], 4)
    device.kernel(affine, [tensor], [16, 3], 4)
    assert not is_made(device, affine, [other], [16, 3], 4, "another name")
    assert is_made(device, affine, [tensor], [16, 4], 4)
    assert is_made(device, affine, [tensor], [16, 3], 8)
    assert is_made(device, affine, [tensor, other], [16, 3], 4)
    assert is_made(device, slow, [tensor], [16, 3], 4)


def test_pipelines_without_a_kernel_are_kept_but_not_all(device, affine):
    """Those that were left last; none is counted, and all go with the device."""
    tensor = device.tensor(16)
    for k in range(MOST_UNUSED + 1):
        device.kernel(affine, [tensor], [16, k], 4)
    assert "pipeline" not in native.live_objects()
    assert is_made(device, affine, [tensor], [16, 0], 4), "the oldest"
    assert not any(is_made(device, affine, [tensor], [16, k], 4) for k in range(1, MOST_UNUSED))


@pytest.mark.parametrize("fails", [False, True])
def test_threads_that_want_the_same_pipeline_at_once_get_it(device, compile_glsl, fails):
    """A failure is that of the kernel which met it; the others make the pipeline."""
    text = "float x = words[0]; [[unroll]] for (int i = 0; i < 400; ++i) x = sin(x); words[0] = x;"
    spirv = compile_glsl(f"""#version 450
#extension GL_EXT_control_flow_attributes : require
layout(binding = 0) buffer Words {{ float words[]; }};
void main() {{ {text} }}""")
    tensors = [device.tensor(16) for _ in range(8)]
    if fails:
        native.inject_failure("vkCreateComputePipelines")
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(device.kernel, spirv, [tensor], [], 0) for tensor in tensors]
    assert sum(job.exception() is not None for job in jobs) == fails
    assert native.live_objects()["pipeline"] == 1
