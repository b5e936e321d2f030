"""A device that refuses memory, and one that hangs: what a user is told, what stays safe."""

from __future__ import annotations

from typing import Any

import pytest

from vkmoe.errors import DeviceLostError, GpuError, OutOfMemoryError
from vkmoe.gpu import _native as native
from vkmoe.gpu import device as module
from vkmoe.gpu.backend import Backend
from vkmoe.gpu.device import Device, memory_type_candidates


def test_allocation_falls_back_then_says_what_failed(device: Device) -> None:
    """With every memory type refused, the user learns the size, the purpose and the heap."""
    n_types = len(memory_type_candidates(device.info, "host"))
    native.inject_failure("vkAllocateMemory", 0)
    if n_types > 1:
        device.allocate("host", 4096, "staging").close()
        for _ in range(n_types):
            native.inject_failure("vkAllocateMemory", 0)
    with pytest.raises(OutOfMemoryError, match=r"0 MiB of host memory for staging") as caught:
        device.allocate("host", 4096, "staging")
    native.clear_injections()
    assert caught.value.result == "VK_ERROR_OUT_OF_DEVICE_MEMORY" and caught.value.hint


TWINS = [0, 0, 0]  # memory types by index: the same one, as if a driver listed twins


def refuse(call: str, result: str, after: int = 0) -> None:
    native.inject_failure(call, after, result)


def test_a_type_that_holds_no_buffers_is_passed_over(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "memory_type_candidates", lambda info, intent: TWINS)
    refuse("vkGetBufferMemoryRequirements", "VK_ERROR_FEATURE_NOT_PRESENT")
    device.allocate("device", 4096, "weights").close()


def test_running_out_of_memory_is_told_before_refused_types(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full heap, then twins that hold no buffers: the heap is what the user can act on."""
    monkeypatch.setattr(module, "memory_type_candidates", lambda info, intent: TWINS)
    refuse("vkGetBufferMemoryRequirements", "VK_ERROR_FEATURE_NOT_PRESENT")
    refuse("vkAllocateMemory", "VK_ERROR_OUT_OF_DEVICE_MEMORY")
    refuse("vkGetBufferMemoryRequirements", "VK_ERROR_FEATURE_NOT_PRESENT", 1)
    with pytest.raises(OutOfMemoryError, match=r"weights .*OUT_OF_DEVICE_MEMORY") as caught:
        device.allocate("device", 4096, "weights")
    native.clear_injections()
    assert caught.value.result == "VK_ERROR_OUT_OF_DEVICE_MEMORY"


def test_only_refused_types_are_no_lack_of_memory(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "memory_type_candidates", lambda info, intent: TWINS)
    for _ in TWINS:
        refuse("vkGetBufferMemoryRequirements", "VK_ERROR_FEATURE_NOT_PRESENT")
    with pytest.raises(GpuError, match="FEATURE_NOT_PRESENT") as caught:
        device.allocate("device", 4096, "weights")
    native.clear_injections()
    assert not isinstance(caught.value, OutOfMemoryError) and caught.value.hint


class Hung:
    """A native device whose work never ends."""

    lost = False

    def submit(self, recording: object) -> Hung:
        return self

    def wait(self, expected_ns: int) -> bool:
        raise MemoryError

    def wait_idle(self) -> None:
        raise AssertionError("this would wait for ever")

    def settle(self, timeout_ns: int, only: object = None) -> bool:
        assert 0 < timeout_ns <= 30 * 10**9
        self.lost = True
        return False

    def close(self) -> None:
        error = native.VulkanError("vkWaitForFences: VK_TIMEOUT")
        error.result, error.call = "VK_TIMEOUT", "vkWaitForFences"
        raise error


def test_a_hung_gpu_that_cannot_be_waited_for_is_lost(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung: Any = Hung()
    monkeypatch.setattr(device, "native", hung)
    with pytest.raises(MemoryError):
        Backend(device).run(hung)
    assert hung.lost


def test_closing_a_hung_gpu_is_told_and_lets_go_of_vulkan() -> None:
    opened = Device()
    opened.native.close()
    hung: Any = Hung()
    opened.native = hung
    with pytest.raises(DeviceLostError, match="did not finish its work in time while closing"):
        opened.close()
    with pytest.raises(RuntimeError, match="already closed"):
        opened.validation_messages()
