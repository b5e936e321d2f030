"""Commands do what they say: fill, copy, dispatch with its constants, addresses, timestamps."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tests.native.conftest import CompileGlsl
from vkmoe.gpu import _native as native

BY_ADDRESS = """#version 450
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_buffer_reference_uvec2 : require
layout(local_size_x_id = 0) in;
layout(buffer_reference, std430, buffer_reference_align = 4) buffer Words { uint words[]; };
layout(push_constant) uniform Push { uvec2 source; uvec2 target; };
void main() {
    uint i = gl_GlobalInvocationID.x;
    Words(target).words[i] = Words(source).words[i] + 1;
}
"""


def words(buffer: native.Buffer) -> np.ndarray:
    return buffer.view().view(np.uint32)


def run(device: native.Device, recorder: native.Recorder, queue: str = "compute") -> None:
    assert device.submit(recorder.finish(), queue).wait() is True


def test_fill_and_copy_touch_their_ranges_only(device, host):
    source, target = device.buffer(64, host), device.buffer(64, host)
    tensor = device.tensor(16)
    words(target)[:] = 0
    recorder = device.recorder()
    recorder.fill(source, 0, 64, 7)
    recorder.fill(tensor, 0, 64, 9)
    recorder.barrier()
    recorder.copy(source, 0, tensor, 8, 16)
    recorder.barrier()
    recorder.copy(tensor, 4, target, 4, 28)
    run(device, recorder)
    assert words(target).tolist() == [0, 9, 7, 7, 7, 7, 9, 9] + [0] * 8


def test_push_and_specialisation_constants_reach_the_shader(device, host, affine):
    tensor, out = device.tensor(48), device.buffer(192, host)
    kernel = device.kernel(affine, [tensor], [8, 3], 4, "affine")
    recorder = device.recorder()
    recorder.fill(tensor, 0, 192, 5)
    recorder.barrier()
    # Two dispatches of one kernel: each must keep its own push constants.
    recorder.dispatch(kernel, (6, 1, 1), struct.pack("<I", 7))  # 5 * 3 + 7
    recorder.barrier()
    recorder.dispatch(kernel, (3, 1, 1), struct.pack("<I", 100))  # 22 * 3 + 100, first half
    recorder.barrier()
    recorder.copy(tensor, 0, out, 0, 192)
    run(device, recorder)
    assert words(out).tolist() == [166] * 24 + [22] * 24


def test_a_recording_can_be_submitted_again(device, host, affine):
    tensor, out = device.tensor(8), device.buffer(32, host)
    kernel = device.kernel(affine, [tensor], [8, 1], 4)
    reset = device.recorder()
    reset.fill(tensor, 0, 32, 0)
    run(device, reset)
    recorder = device.recorder()
    recorder.dispatch(kernel, (1, 1, 1), struct.pack("<I", 2))
    recorder.barrier()
    recorder.copy(tensor, 0, out, 0, 32)
    recording = recorder.finish()
    for n_runs in (1, 2, 3):
        assert device.submit(recording).wait()
        assert words(out).tolist() == [2 * n_runs] * 8


def test_recordings_of_one_submit_run_in_order(device, host, affine):
    """Each sees what those before it wrote; their time is from the first's begin to the last's end.

    One that is in flight, or given twice, keeps all from being submitted.
    """
    tensor, out = device.tensor(8), device.buffer(32, host)
    recordings = []
    for factor, added in ((1, 5), (3, 1), (2, 4)):
        kernel = device.kernel(affine, [tensor], [8, factor], 4)
        recorder = device.recorder(n_timestamps=2)
        recorder.timestamp(0)
        recorder.barrier()
        recorder.dispatch(kernel, (1, 1, 1), struct.pack("<I", added))
        recorder.barrier()
        recorder.copy(tensor, 0, out, 0, 32)
        recorder.timestamp(1)
        recordings.append(recorder.finish())
    reset = device.recorder()
    reset.fill(tensor, 0, 32, 1)
    run(device, reset)
    submission = device.submit(recordings)
    assert submission.wait() is True
    assert words(out).tolist() == [((1 + 5) * 3 + 1) * 2 + 4] * 8
    begun, ended = recordings[0].timestamps()[0], recordings[2].timestamps()[1]
    assert submission.interval() == (begun, ended)
    with pytest.raises(RuntimeError, match="in flight"):
        device.submit([recordings[0], recordings[1], recordings[0]])
    with pytest.raises(ValueError, match="no recording"):
        device.submit([])
    with pytest.raises(TypeError):
        device.submit([recordings[0], None])
    assert device.submit(recordings).wait() is True, "none of them was left in flight"


def test_addresses_reach_buffers_without_descriptors(device, host, compile_glsl: CompileGlsl):
    source, target = device.buffer(256, host), device.buffer(256, host)
    words(source)[:] = np.arange(64)
    kernel = device.kernel(compile_glsl(BY_ADDRESS), [], [8], 16)
    recorder = device.recorder()
    push = struct.pack("<QQ", source.address + 64, target.address)
    recorder.dispatch(kernel, (4, 1, 1), push)
    run(device, recorder)
    assert words(target)[:32].tolist() == list(range(17, 49))


def test_without_the_feature_there_are_no_addresses(instance, host):
    device = instance.open(0, [])
    assert device.buffer(64, host).address == 0
    device.close()


def test_timestamps_are_plausible_and_increase(device, slow):
    kernel = device.kernel(slow, [device.tensor(64)], [], 0)
    recorder = device.recorder(n_timestamps=3)
    recorder.timestamp(0)
    recorder.dispatch(kernel, (4, 1, 1))
    recorder.timestamp(1)
    recorder.barrier()
    recorder.dispatch(kernel, (24, 1, 1))
    recorder.timestamp(2)
    recording = recorder.finish()
    with pytest.raises(RuntimeError, match="no finished submit"):
        recording.timestamps()
    times = []
    for _ in range(5):  # the queries are reset within the recording
        device.submit(recording).wait()
        first, second, third = recording.timestamps()
        assert first < second < third < first + 60e9
        times.append((second - first, third - second))
    short, long = (min(spent) for spent in zip(*times, strict=True))
    assert short < long, "a sixth of the work takes less, unless others have the processor"


def test_buffers_do_not_allow_what_does_not_fit(device, host, instance):
    with pytest.raises(ValueError, match="no bytes"):
        device.buffer(0, host)
    with pytest.raises(ValueError, match="memory type 99"):
        device.buffer(64, 99)
    buffer = device.buffer(64, host, "weights")
    recorder = device.recorder()
    for offset, size in ((0, 65), (64, 1), (2**64 - 1, 2), (0, 0)):
        with pytest.raises(ValueError, match="weights"):
            recorder.copy(buffer, offset, device.buffer(128, host), 0, size)
    with pytest.raises(ValueError, match="whole words"):
        recorder.fill(buffer, 0, 6, 0)
    with pytest.raises(ValueError, match="overlaps"):
        recorder.copy(buffer, 0, buffer, 8, 16)
    with pytest.raises(ValueError, match="timestamp 0"):
        recorder.timestamp(0)
    with pytest.raises(TypeError):
        recorder.fill("buffer", 0, 4, 0)


def test_kernels_do_not_allow_what_does_not_fit(device, affine):
    tensor = device.tensor(8, "activations")
    with pytest.raises(ValueError, match="not a SPIR-V module"):
        device.kernel(b"no shader at all", [tensor], [8], 4, "broken")
    with pytest.raises(ValueError, match="push constants"):
        device.kernel(affine, [tensor], [8], 6)
    kernel = device.kernel(affine, [tensor], [8], 4, "affine")
    recorder = device.recorder()
    for groups in ((0, 1, 1), (1, 2**31, 1)):
        with pytest.raises(ValueError, match="workgroups"):
            recorder.dispatch(kernel, groups, bytes(4))
    with pytest.raises(ValueError, match="expected 4"):
        recorder.dispatch(kernel, (1, 1, 1), bytes(8))
    with pytest.raises(ValueError, match="words, must be"):
        device.tensor(0)


def test_closed_things_say_so(device, host):
    buffer = device.buffer(64, host)
    buffer.close()
    with pytest.raises(RuntimeError, match="closed"):
        buffer.view()
    recorder = device.recorder()
    recording = recorder.finish()
    with pytest.raises(RuntimeError, match="finished"):
        recorder.barrier()
    device.close()
    device.close()
    for call in (device.recorder, device.wait_idle, lambda: device.submit(recording)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_refused_memory_type_is_a_vulkan_error(device, host):
    """RADV lists twin types that hold no buffers: the caller takes the next one."""
    native.inject_failure("vkGetBufferMemoryRequirements", result="VK_ERROR_FEATURE_NOT_PRESENT")
    with pytest.raises(native.VulkanError, match=f"memory type {host} cannot hold") as caught:
        device.buffer(64, host)
    assert caught.value.result == "VK_ERROR_FEATURE_NOT_PRESENT"
    device.buffer(64, host)
