"""The device counts its bytes by heap: buffers, Kompute's tensors, after failures and closing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vkmoe.gpu import _native as native

KIB = 1 << 10
# A driver rounds a buffer up to whole pages or blocks, of 64 KiB at most.
ROUNDING = 64 * KIB
MAKERS: dict[str, Callable[[native.Device, int, int], object]] = {
    "buffer": lambda device, n_bytes, host: device.buffer(n_bytes, host, "counted"),
    "tensor": lambda device, n_bytes, host: device.tensor(n_bytes // 4, "counted"),
}
make_all = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@make_all
def test_bytes_count_while_they_are_allocated(device, host, make):
    assert sum(device.memory_bytes()) == 0
    made = [make(device, n_bytes, host) for n_bytes in (1000 * KIB, 300 * KIB)]
    both = sum(device.memory_bytes())
    assert 0 <= both - 1300 * KIB <= 2 * ROUNDING
    made.pop()
    one = sum(device.memory_bytes())
    assert 0 <= one - 1000 * KIB <= ROUNDING
    made.clear()
    assert sum(device.memory_bytes()) == 0
    assert sum(device.memory_peak_bytes()) == both


def test_bytes_count_in_the_heap_of_their_type(device, instance):
    facts = instance.physical_devices()[0]
    for memory_type, item in enumerate(facts["memory_types"]):
        try:
            buffer = device.buffer(100 * KIB, memory_type)
        except native.VulkanError:
            continue  # a type that holds no buffers
        counted = device.memory_bytes()
        assert len(counted) == len(facts["heaps"])
        assert [heap for heap, n_bytes in enumerate(counted) if n_bytes] == [item["heap"]]
        buffer.close()
    assert sum(device.memory_peak_bytes()) > 0


def test_a_recording_holds_the_bytes_it_uses(device, host):
    source, target = device.buffer(KIB, host), device.tensor(256)
    recorder = device.recorder()
    recorder.copy(source, 0, target, 0, KIB)
    recording = recorder.finish()
    before = device.memory_bytes()
    source.close()
    del target
    assert device.memory_bytes() == before
    del recorder, recording
    assert sum(device.memory_bytes()) == 0


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        *((kind, call) for kind in MAKERS for call in ("vkCreateBuffer", "vkAllocateMemory")),
        *((kind, "vkBindBufferMemory") for kind in MAKERS),
        ("buffer", "vkMapMemory"),
    ],
)
def test_what_failed_counts_nothing(device, host, kind, call):
    first = MAKERS[kind](device, 100 * KIB, host)
    before = device.memory_bytes()
    native.inject_failure(call)
    with pytest.raises(native.VulkanError, match=call):
        MAKERS[kind](device, 200 * KIB, host)
    assert device.memory_bytes() == before
    was_allocated = call in ("vkBindBufferMemory", "vkMapMemory")
    assert (device.memory_peak_bytes() > before) == was_allocated
    del first
    assert sum(device.memory_bytes()) == 0


def test_the_tensor_behind_a_kernel_without_tensors_counts(device, affine):
    assert sum(device.memory_bytes()) == 0
    kernel = device.kernel(affine, [], [8, 1], 4)
    assert 0 < sum(device.memory_bytes()) <= ROUNDING
    del kernel


def test_two_devices_count_apart(instance, host):
    one, other = instance.open(0, []), instance.open(0, [])
    one.buffer(100 * KIB, host)
    kept, tensor = other.buffer(KIB, host), other.tensor(64)
    assert sum(one.memory_bytes()) == 0 < sum(other.memory_bytes()) < 100 * KIB
    one.close()
    assert sum(other.memory_bytes()) > 0
    other.close()
    assert sum(other.memory_bytes()) == 0, "closing frees what Python still holds"
    del kept, tensor


def test_after_closing_only_live_views_count(instance, host):
    device = instance.open(0, [])
    buffer, tensor = device.buffer(100 * KIB, host), device.tensor(KIB)
    view = buffer.view()
    device.close()
    assert 0 <= sum(device.memory_bytes()) - 100 * KIB <= ROUNDING
    assert sum(device.memory_peak_bytes()) > sum(device.memory_bytes())
    del view
    assert sum(device.memory_bytes()) == 0
    del buffer, tensor
