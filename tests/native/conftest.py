"""Fixtures of the native tests: an open device, and shaders compiled from text."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.live import live_objects
from tools.compile_shaders import compile_glsl as compile_file
from vkmoe.gpu import _native as native

CompileGlsl = Callable[[str], bytes]

# Adds a push constant to K times each word; workgroup size and K are specialisation constants.
AFFINE = """#version 450
layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint K = 1;
layout(push_constant) uniform Push { uint addend; };
layout(binding = 0) buffer Words { uint words[]; };
void main() {
    uint i = gl_GlobalInvocationID.x;
    if (i < words.length()) words[i] = words[i] * K + addend;
}
"""

# Keeps a core busy for about a millisecond per workgroup. One loop stays below 65536 turns,
# where lavapipe ends it.
SLOW = """#version 450
layout(local_size_x = 64) in;
layout(binding = 0) buffer Words { uint words[]; };
void main() {
    uint x = gl_GlobalInvocationID.x + 1;
    for (uint i = 0; i < 60000; ++i) {
        x ^= x << 13; x ^= x >> 17; x ^= x << 5;
    }
    words[gl_GlobalInvocationID.x % words.length()] = x;
}
"""


@pytest.fixture(scope="session")
def compile_glsl(tmp_path_factory: pytest.TempPathFactory) -> CompileGlsl:
    """GLSL text of a compute shader -> SPIR-V."""
    folder: Path = tmp_path_factory.mktemp("spirv")
    done: dict[str, bytes] = {}

    def compiled(text: str) -> bytes:
        if text not in done:
            source, out = folder / f"{len(done)}.comp", folder / f"{len(done)}.spv"
            source.write_text(text)
            compile_file(source, out)
            done[text] = out.read_bytes()
        return done[text]

    return compiled


@pytest.fixture
def affine(compile_glsl: CompileGlsl) -> bytes:
    return compile_glsl(AFFINE)


@pytest.fixture
def slow(compile_glsl: CompileGlsl) -> bytes:
    return compile_glsl(SLOW)


@pytest.fixture
def instance() -> Iterator[native.Instance]:
    made = native.Instance()
    yield made
    made.close()


@pytest.fixture
def device(instance: native.Instance) -> Iterator[native.Device]:
    """The first device, open with buffer addresses; nothing may be left when it is closed."""
    assert live_objects() == {"instance": 1}
    made = instance.open(0, ["buffer_device_address"])
    yield made
    native.clear_injections()
    made.close()
    instance.close()
    assert native.live_objects() == {}


def host_memory_type(instance: native.Instance) -> int:
    """Index of a memory type that is mapped and coherent."""
    types = instance.physical_devices()[0]["memory_types"]
    return next(
        i for i, t in enumerate(types) if {"HOST_VISIBLE", "HOST_COHERENT"} <= {*t["flags"]}
    )


@pytest.fixture
def host(instance: native.Instance) -> int:
    return host_memory_type(instance)


def record_slow(device: native.Device, slow: bytes, n_groups: int) -> native.Recording:
    """A recording of one dispatch of SLOW."""
    kernel = device.kernel(slow, [device.tensor(64)], [], 0, "slow")
    recorder = device.recorder()
    recorder.dispatch(kernel, (n_groups, 1, 1))
    return recorder.finish()


@functools.cache
def slow_groups_per_ms(slow: bytes) -> float:
    """How many workgroups of SLOW this driver does in a millisecond: the best of five runs.

    Other work on the machine makes a run longer, and the recordings made from it too short.
    """
    instance = native.Instance()
    device = instance.open(0, [])
    recording = record_slow(device, slow, 8)
    device.submit(recording).wait()  # the first run may compile
    elapsed_ms = float("inf")
    for _ in range(5):
        started = time.monotonic()
        device.submit(recording).wait()
        elapsed_ms = min(elapsed_ms, (time.monotonic() - started) * 1e3)
    device.close()
    instance.close()
    return 8 / elapsed_ms


def slow_recording(device: native.Device, slow: bytes, duration_ms: int) -> native.Recording:
    """A recording that keeps the device busy for about `duration_ms`, at least a workgroup."""
    n_groups = max(1, min(65535, round(duration_ms * slow_groups_per_ms(slow))))
    return record_slow(device, slow, n_groups)
