"""The CPU behind the GPU's classes: its facts, memory, copies and fills in their order."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import pytest

from vkmoe.cpu import device as module
from vkmoe.cpu.device import CpuDevice, cpu_info, n_cores
from vkmoe.errors import GpuError, OutOfMemoryError
from vkmoe.gpu.backend import Backend
from vkmoe.gpu.device import memory_type_candidates
from vkmoe.gpu.program import Program, Range, TensorRef, memory_range
from vkmoe.kernels.norms.operations import RMS_NORM


def test_it_is_a_cpu_with_one_memory(native: Any) -> None:
    info = cpu_info()
    assert info.is_cpu and info.is_uma and native.features() in info.driver
    for intent in ("device", "host", "readback", "bar"):
        assert memory_type_candidates(info, intent) == [0]
    with CpuDevice() as device:
        assert device.native.n_queues == 1 and not device.native.has_upload_queue


def test_threads_are_as_many_as_cores(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that this process may use; hyper-threads share one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5})
    monkeypatch.setattr(module, "_core", lambda cpu: str(cpu // 2))
    assert n_cores() == 3
    with CpuDevice() as device:
        assert device.native.pool.n_threads == 3


def test_what_the_system_has_not_got_is_one_clear_error(
    native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CpuDevice(1) as device, pytest.raises(OutOfMemoryError, match="MiB of memory for cache"):
        device.allocate("device", 1 << 55, "cache")

    def refused(n_threads: int) -> None:
        raise RuntimeError("Resource temporarily unavailable")

    monkeypatch.setattr(native, "Pool", refused)
    with pytest.raises(GpuError, match="does not start 7 threads: Resource"):
        CpuDevice(7)


def test_commands_run_in_their_order(native: Any) -> None:
    """What the host wrote goes by way of a tensor to a buffer, which is overwritten in part."""
    with CpuDevice(3) as device:
        backend, words = Backend(device), TensorRef("words", 1 << 16)
        source = device.allocate("host", words.n_bytes, "source")
        target = device.allocate("readback", words.n_bytes, "target")
        source.view().view(np.uint32)[:] = np.arange(words.n_words)
        backend.bind("source", source)
        backend.bind("target", target)
        backend.tensor(words)
        program = Program("copies")
        program.copy(Range("source", 0, words.n_bytes), words.whole, "in")
        program.copy(words.whole, Range("target", 0, words.n_bytes), "out")
        program.copy(Range("source", 0, 7), Range("target", 100, 107), "a part, of odd bytes")
        for _ in range(20):
            target.view()[:] = 0
            backend.run(backend.record(program))
            expected = source.view().copy()
            expected[100:107] = source.view()[:7]
            assert (target.view() == expected).all()
        recorder = device.native.recorder()
        recorder.fill(target, 8, 400_000 // 4 * 4 // 2, 0xABCD)
        device.native.submit(recorder.finish()).wait()
        filled = target.view().view(np.uint32)
        assert (filled[2 : 2 + 50_000] == 0xABCD).all() and filled[1] == 1
        assert filled[2 + 50_000] == 50_002


def test_memory_that_was_let_go_cannot_be_reached(native: Any) -> None:
    with CpuDevice(1) as device:
        backend, x = Backend(device), TensorRef("x", 64)
        buffer = device.allocate("device", 256, "gain")
        address = buffer.address
        assert address % 256 == 0

        def program() -> Program:
            made = Program("norm")
            made.append(
                RMS_NORM.dispatch(
                    "rms_norm",
                    {"gain": address, "x_offset": 0, "width": 64, "x_pitch": 64, "y_pitch": 64,
                     "eps": 1e-6, "workgroup_size": 8},
                    {"x": x, "y": TensorRef("y", 64)},
                    (1, 1, 1),
                    "norm",
                    reads=(memory_range(address, 256),),
                )
            )  # fmt: skip
            return made

        backend.run(backend.record(program()))
        buffer.close()
        with pytest.raises(ValueError, match="gain leads out of all memory"):
            backend.record(program())
        other = device.allocate("device", 256, "gain")
        address = other.address
        backend.record(program())
        del other
        gc.collect()
        with pytest.raises(ValueError, match="leads out of all memory"):
            backend.record(program())
