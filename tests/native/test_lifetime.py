"""Nothing is left behind: after close, after a failure at any creation, under live views."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest

from tests.native.conftest import SLOW, CompileGlsl, host_memory_type, slow_groups_per_ms
from vkmoe.gpu import _native as native

CREATIONS = [
    "vkCreateInstance",
    "vkEnumeratePhysicalDevices",
    "vkCreateDevice",
    "vkCreateBuffer",
    "vkAllocateMemory",
    "vkBindBufferMemory",
    "vkMapMemory",
    "vkCreateDescriptorPool",
    "vkCreateDescriptorSetLayout",
    "vkAllocateDescriptorSets",
    "vkCreateShaderModule",
    "vkCreatePipelineLayout",
    "vkCreatePipelineCache",
    "vkCreateComputePipelines",
    "vkCreateCommandPool",
    "vkAllocateCommandBuffers",
    "vkBeginCommandBuffer",
    "vkEndCommandBuffer",
    "vkResetCommandPool",
    "vkCreateQueryPool",
    "vkCreateFence",
    "vkResetFences",
    "vkQueueSubmit",
    "vkWaitForFences",
    "vkGetQueryPoolResults",
]


def use_everything(
    spirv: bytes, validation: bool = False, messages: list[str] | None = None
) -> list[object]:
    """Make one of each thing and run it; closes in every case, keeps what it returns."""
    messages = [] if messages is None else messages
    instance = native.Instance(validation)
    made: list[object] = [instance]
    try:
        host = host_memory_type(instance)
        device = instance.open(0, ["buffer_device_address"])
        made.append(device)
        try:
            tensor, buffer = device.tensor(8, "tensor"), device.buffer(32, host, "buffer")
            kernel = device.kernel(spirv, [tensor], [8, 1], 4, "kernel")
            recorder = device.recorder(n_timestamps=1)
            recorder.fill(tensor, 0, 32, 0)
            recorder.barrier()
            recorder.dispatch(kernel, (1, 1, 1), bytes(4))
            recorder.barrier()
            recorder.copy(tensor, 0, buffer, 0, 32)
            recorder.timestamp(0)
            recording = recorder.finish()
            submission = device.submit(recording)
            made += [tensor, buffer, kernel, recorder, recording, submission]
            submission.wait()
            recording.timestamps()
            for _ in range(2):
                upload = device.recorder(queue="upload")
                upload.fill(buffer, 0, 32, 1)
                device.submit(upload.finish(), "upload").wait()
                del upload
            crossed = [((tensor, at, 0), (buffer, 16 - at, 0), 16) for at in (0, 16)]
            device.upload(crossed, timed=True).wait()
        finally:
            device.close()
    finally:
        messages += instance.messages()
        instance.close()
    return made


def test_close_releases_everything_that_python_still_holds(affine):
    made = use_everything(affine)
    assert native.live_objects() == {}
    assert len(made) == 8


def test_things_count_while_they_live(device, host):
    before = native.live_objects()
    buffer = device.buffer(64, host)
    assert native.live_objects()["buffer"] == before.get("buffer", 0) + 1
    buffer.close()
    assert native.live_objects() == before


@pytest.mark.parametrize("call", CREATIONS)
def test_a_failure_at_any_call_leaves_nothing(call, affine):
    after = 0
    while True:  # fail the first such call, then the second, until there are no more
        native.inject_failure(call, after)
        try:
            use_everything(affine)
        except native.VulkanError as error:
            assert error.call == call
            assert error.result == "VK_ERROR_OUT_OF_DEVICE_MEMORY"
            assert call in str(error)
        else:
            break
        finally:
            native.clear_injections()
        assert native.live_objects() == {}
        after += 1
        assert after < 20
    assert after > 0, "the scenario never makes this call"


def test_a_messenger_that_fails_leaves_nothing(affine):
    native.inject_failure("vkCreateDebugUtilsMessengerEXT")
    with pytest.raises(native.VulkanError, match="vkCreateDebugUtilsMessengerEXT"):
        use_everything(affine, validation=True)
    assert native.live_objects() == {}


def test_views_outlive_the_device(instance, host):
    device = instance.open(0, [])
    view = device.buffer(4096, host).view()
    part = view[100:200].view(np.uint32)
    device.close()
    instance.close()
    assert native.live_objects() == {"device": 1, "instance": 1, "memory": 1}
    part[:] = 5  # the memory is still mapped
    del view
    assert part.tolist() == [5] * 25
    del part
    assert native.live_objects() == {}


def test_dropping_without_close_releases_too(affine, host):
    instance = native.Instance()
    device = instance.open(0, [])
    kernel = device.kernel(affine, [device.tensor(8)], [8, 1], 4)
    recorder = device.recorder()
    recorder.dispatch(kernel, (1, 1, 1), bytes(4))
    device.submit(recorder.finish())
    del instance, device, kernel, recorder
    # The fixture `host` has opened no device of its own and its instance is the only one left.
    assert {*native.live_objects()} <= {"instance"}


def test_a_recording_keeps_what_it_uses(device, host):
    source, target = device.buffer(64, host), device.buffer(64, host)
    view = target.view()
    source.view()[:] = 3
    recorder = device.recorder()
    recorder.copy(source, 0, target, 0, 64)
    source.close()
    target.close()
    device.submit(recorder.finish()).wait()
    assert view.tolist() == [3] * 64


def test_an_upload_keeps_what_it_uses(device, host):
    n_bytes = 1 << 20
    source, target = device.buffer(n_bytes, host), device.buffer(n_bytes, host)
    view = target.view()
    source.view()[:] = 3
    half = n_bytes // 2
    submission = device.upload(
        [((source, 0, 0), (target, half, 0), half), ((source, half, 0), (target, 0, 0), half)]
    )
    source.close()
    target.close()
    submission.wait()
    assert (view == 3).all()
    del view, submission
    assert "buffer" not in native.live_objects()


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "device.close(); instance.close()"])
def test_the_interpreter_may_exit_with_work_in_flight(ending, compile_glsl: CompileGlsl, tmp_path):
    spirv = tmp_path / "slow.spv"
    spirv.write_bytes(compile_glsl(SLOW))
    n_groups = 1 + round(300 * slow_groups_per_ms(spirv.read_bytes()))
    script = f"""
        from pathlib import Path
        from vkmoe.gpu import _native as native
        instance = native.Instance()
        device = instance.open(0, [])
        kernel = device.kernel(Path({str(spirv)!r}).read_bytes(), [device.tensor(64)], [], 0)
        recorder = device.recorder()
        recorder.dispatch(kernel, ({n_groups}, 1, 1))
        submission = device.submit(recorder.finish())
        {ending}
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (3 if "SystemExit" in ending else 0), done.stderr
    assert done.stderr == ""


UNFINISHED = """
    import sys
    import time
    from pathlib import Path
    from vkmoe.gpu import _native as native
    instance = native.Instance()
    device = instance.open(0, [])
    host = next(i for i, t in enumerate(instance.physical_devices()[0]["memory_types"])
                if "HOST_COHERENT" in t["flags"])
    buffer = device.buffer(4096, host)
    spirv = Path(sys.argv[1]).read_bytes()
    kernel = device.kernel(spirv, [device.tensor(64)], [], 0)
    recorder = device.recorder()
    recorder.dispatch(kernel, (int(sys.argv[2]), 1, 1))
    submission = device.submit(recorder.finish())
    before = native.live_objects()
    started = time.monotonic()
    try:
        device.close(timeout_ns=50_000_000)
    except native.VulkanError as error:
        print(error.result, time.monotonic() - started < 0.5)
    buffer.close()
    del kernel, recorder, submission
    device.close()
    del device
    instance.close()
    after = native.live_objects()
    print({kind: n for kind, n in before.items() if after.get(kind, 0) < n})
"""


def test_a_device_that_does_not_finish_keeps_its_memory(compile_glsl: CompileGlsl, tmp_path):
    """Closing it fails in time, frees nothing of what may still be read, and fails only once."""
    spirv = tmp_path / "slow.spv"
    spirv.write_bytes(compile_glsl(SLOW))
    n_groups = 1 + round(1000 * slow_groups_per_ms(spirv.read_bytes()))
    command = [sys.executable, "-c", textwrap.dedent(UNFINISHED), str(spirv), str(n_groups)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["VK_TIMEOUT True", "{}"]
