"""Transfers: mapped and staged writes leave the same bytes, and no byte beside them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.live import live_objects_but_fences
from vkmoe.gpu import _native as native
from vkmoe.gpu.device import Device
from vkmoe.gpu.transfer import Readback, Transfer

STAGING = 256
N_BYTES = 4096


@pytest.fixture(params=[False, True], ids=["mapped", "staged"])
def transfer(device: Device, request: pytest.FixtureRequest) -> Iterator[Transfer]:
    with Transfer(device, STAGING, force_staging=request.param) as made:
        yield made


@pytest.fixture
def buffer(device: Device) -> Iterator[native.Buffer]:
    made = device.allocate("device", N_BYTES, "target")
    yield made
    made.close()


def random_bytes(n_bytes: int, seed: int = 1) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, n_bytes, np.uint8)


@pytest.mark.parametrize("offset", [0, 4, 252, 1000])
@pytest.mark.parametrize("n_bytes", [1, 2, 3, 4, 5, 255, 256, 257, 2 * STAGING, 1999])
def test_only_the_bytes_given_are_written(
    transfer: Transfer, buffer: native.Buffer, offset: int, n_bytes: int
) -> None:
    """Odd sizes, and sizes of several stagings, leave their neighbours alone."""
    wanted = random_bytes(N_BYTES)
    transfer.write(buffer, 0, wanted)
    transfer.flush()
    data = random_bytes(n_bytes, seed=2)
    transfer.write(buffer, offset, data)
    transfer.flush()
    wanted[offset : offset + n_bytes] = data
    np.testing.assert_array_equal(transfer.read(buffer, 0, N_BYTES), wanted)


def test_the_last_byte_of_a_buffer_can_be_written(device: Device, transfer: Transfer) -> None:
    target = device.allocate("device", 1001, "odd")
    data = random_bytes(1001)
    transfer.write(target, 0, data)
    transfer.flush()
    np.testing.assert_array_equal(transfer.read(target, 0, 1001), data)
    target.close()


def test_many_writes_before_one_flush(transfer: Transfer, buffer: native.Buffer) -> None:
    """The staging is reused while earlier copies are on their way."""
    wanted = random_bytes(N_BYTES, seed=3)
    for start in range(0, N_BYTES, 64):
        transfer.write(buffer, start, wanted[start : start + 64])
    transfer.flush()
    np.testing.assert_array_equal(transfer.read(buffer, 0, N_BYTES), wanted)


def test_small_writes_share_submits(
    device: Device, buffer: native.Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A staging full of them is one submit; bytes written twice keep the later value."""
    recorders = 0

    class Counting:
        def __getattr__(self, name: str) -> object:
            nonlocal recorders
            recorders += name == "recorder"
            return getattr(opened, name)

    opened = device.native
    monkeypatch.setattr(device, "native", Counting())
    wanted = random_bytes(N_BYTES, seed=3)
    with Transfer(device, STAGING, force_staging=True) as transfer:
        for start in range(0, N_BYTES, 16):
            transfer.write(buffer, start, wanted[start : start + 16])
        transfer.flush()
        assert recorders == N_BYTES // STAGING
        transfer.write(buffer, 32, wanted[:32])
        transfer.write(buffer, 16, wanted[:32])
        transfer.flush()
        assert recorders == N_BYTES // STAGING + 2
        found = transfer.read(buffer, 16, 48)
    np.testing.assert_array_equal(found, np.concatenate([wanted[:32], wanted[16:32]]))


def test_tensors_are_always_staged(device: Device, transfer: Transfer) -> None:
    tensor = device.native.tensor(300, "words")
    words = np.arange(300, dtype=np.uint32)
    transfer.write(tensor, 0, words.view(np.uint8))
    transfer.flush()
    found = transfer.read(tensor, 8, 292 * 4).view(np.uint32)
    np.testing.assert_array_equal(found, words[2:294])


def test_what_is_read_is_a_copy(transfer: Transfer, buffer: native.Buffer) -> None:
    wanted = random_bytes(N_BYTES)
    transfer.write(buffer, 0, wanted)
    transfer.flush()
    found = transfer.read(buffer, 0, N_BYTES)
    transfer.write(buffer, 0, random_bytes(N_BYTES, seed=4))
    transfer.flush()
    np.testing.assert_array_equal(found, wanted)


def test_a_readback_reads_what_is_there_now(device: Device, transfer: Transfer) -> None:
    """One buffer and one recording, made once; what was read before stays as it was."""
    tensor = device.native.tensor(300, "words")
    with Readback(device, tensor, 8, 64) as readback:
        found = []
        made = []
        for seed in (5, 6):
            transfer.write(tensor, 0, random_bytes(1200, seed))
            transfer.flush()
            found.append(readback.read())
            made.append(live_objects_but_fences())
        assert made[0] == made[1]
        for seed, data in zip((5, 6), found, strict=True):
            np.testing.assert_array_equal(data, random_bytes(1200, seed)[8:72])


def test_nothing_is_left_behind(device: Device) -> None:
    counts = []
    for _ in range(3):
        target = device.allocate("device", N_BYTES, "target")
        with Transfer(device, STAGING, force_staging=True) as transfer:
            transfer.write(target, 0, random_bytes(N_BYTES))
            transfer.read(target, 0, 16)
        target.close()
        counts.append(live_objects_but_fences())
    assert counts[0] == counts[1] == counts[2]
