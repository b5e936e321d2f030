"""The Khronos layer sees our commands: a missing barrier is reported, correct use is silent."""

from __future__ import annotations

import struct

import pytest

from tests.native.conftest import CompileGlsl
from tests.native.test_lifetime import use_everything
from vkmoe.gpu import _native as native

# The layer does not report write-after-write between bound descriptors (it takes the two for one
# algorithm), so the control is a reader after a writer.
READER = """#version 450
layout(local_size_x_id = 0) in;
layout(binding = 0) readonly buffer Source { uint source[]; };
layout(binding = 1) writeonly buffer Target { uint target[]; };
void main() { target[gl_GlobalInvocationID.x] = source[gl_GlobalInvocationID.x]; }
"""


def messages_of_two_dispatches(writer: bytes, reader: bytes, barrier: bool) -> list[str]:
    """Write a tensor in one dispatch and read it in the next."""
    instance = native.Instance(validation=True)
    device = instance.open(0, ["buffer_device_address"])
    source, target = device.tensor(8, "activations"), device.tensor(8, "sums")
    write = device.kernel(writer, [source], [8, 1], 4)
    read = device.kernel(reader, [source, target], [8], 0)
    recorder = device.recorder()
    recorder.dispatch(write, (1, 1, 1), struct.pack("<I", 1))
    if barrier:
        recorder.barrier()
    recorder.dispatch(read, (1, 1, 1))
    device.submit(recorder.finish()).wait()
    messages = instance.messages()
    assert instance.messages() == [], "messages drain"
    device.close()
    instance.close()
    return messages


def test_a_missing_barrier_is_reported(affine, compile_glsl: CompileGlsl):
    messages = messages_of_two_dispatches(affine, compile_glsl(READER), barrier=False)
    assert any("SYNC-HAZARD-READ-AFTER-WRITE" in message for message in messages)
    assert any("activations" in message for message in messages), "the tensor is named"


def test_with_the_barrier_nothing_is_reported(affine, compile_glsl: CompileGlsl):
    assert messages_of_two_dispatches(affine, compile_glsl(READER), barrier=True) == []


@pytest.mark.parametrize("barrier", [False, True])
def test_copies_and_fills_are_seen_too(affine, barrier):
    instance = native.Instance(validation=True)
    device = instance.open(0, [])
    tensor = device.tensor(8)
    recorder = device.recorder()
    recorder.dispatch(device.kernel(affine, [tensor], [8, 1], 4), (1, 1, 1), bytes(4))
    if barrier:
        recorder.barrier()
    recorder.fill(tensor, 0, 32, 0)
    device.submit(recorder.finish()).wait()
    assert any("SYNC-HAZARD" in message for message in instance.messages()) is not barrier
    device.close()
    instance.close()


def test_using_everything_and_closing_is_silent(affine):
    messages: list[str] = []
    use_everything(affine, validation=True, messages=messages)
    assert messages == []


def test_without_validation_there_are_no_messages(instance):
    assert instance.messages() == []
