"""Chains of submits that take turns with the host: in order, to the end, let go on failure."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.live import live_objects
from tests.native.conftest import host_memory_type, slow_recording
from vkmoe.gpu import _native as native

N = 5


class Chain:
    """Recordings that each store their number in a word the host sees; it is asked after each."""

    def __init__(self, device: native.Device, memory_type: int) -> None:
        self.device, self.handshake = device, device.handshake()
        self.buffer = device.buffer(16, memory_type)
        self.words = self.buffer.view().view(np.uint32)
        self.recordings = [self._storing(number) for number in range(1, N + 1)]

    def _storing(self, number: int) -> native.Recording:
        recorder = self.device.recorder()
        recorder.fill(self.buffer, 0, 4, number)
        return recorder.finish()

    def begin(self) -> native.Submission:
        """The first waits for nothing, the others for the host."""
        waits, asks = [False] + [True] * (N - 1), [True] * N
        return self.device.submit_chain(self.recordings, self.handshake, waits, asks)


@pytest.fixture
def device(instance: native.Instance) -> Iterator[native.Device]:
    assert live_objects() == {"instance": 1}
    made = instance.open(0, ["buffer_device_address", "timeline_semaphore"])
    yield made
    native.clear_injections()
    made.close()
    instance.close()
    assert native.live_objects() == {}


@pytest.fixture
def chain(device: native.Device, instance: native.Instance) -> Iterator[Chain]:
    made = Chain(device, host_memory_type(instance))
    yield made
    del made.words, made.buffer


def test_each_waits_for_the_answer_to_the_one_before(chain: Chain) -> None:
    for _ in range(3):  # the same recordings again and again
        submission = chain.begin()
        for number in range(1, N + 1):
            chain.handshake.wait()
            time.sleep(0.002)  # time enough for the next, if it did not wait
            assert chain.words[0] == number
            chain.handshake.answer()
        assert submission.wait()
        assert chain.words[0] == N


def test_one_that_does_not_wait_runs_beside_the_host(chain: Chain) -> None:
    """Drivers of newer Mesa join submits that signal nothing with the next, which waits here."""
    waits, asks = [False, False, True], [True, False, False]
    submission = chain.device.submit_chain(chain.recordings[:3], chain.handshake, waits, asks)
    chain.handshake.wait()
    deadline = time.monotonic() + 5
    while chain.words[0] != 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert chain.words[0] == 2, "the second ran, the third has not"
    chain.handshake.answer()
    assert submission.wait() and chain.words[0] == 3


def test_turns_out_of_order_are_refused(chain: Chain) -> None:
    for turn in (chain.handshake.wait, chain.handshake.answer):
        with pytest.raises(RuntimeError, match="no submit asks"):
            turn()
    submission = chain.begin()
    with pytest.raises(RuntimeError, match="not answered"):
        chain.begin()
    chain.handshake.let_go()
    assert submission.wait()
    with pytest.raises(ValueError, match="two lengths"):
        chain.device.submit_chain(chain.recordings, chain.handshake, [False], [True])
    with pytest.raises(ValueError, match="no or two lengths"):
        chain.device.submit_chain([], chain.handshake, [], [])


@pytest.mark.parametrize("n_answered", [0, 2])
def test_what_is_let_go_runs_to_its_end(chain: Chain, n_answered: int) -> None:
    submission = chain.begin()
    for _ in range(n_answered):
        chain.handshake.wait()
        chain.handshake.answer()
    chain.handshake.let_go()
    chain.handshake.let_go()  # nothing is open any more
    assert submission.wait() and chain.words[0] == N
    assert chain.begin()
    chain.handshake.let_go()


@pytest.mark.parametrize("way", ["settle", "close"])
def test_a_device_waits_for_no_answer_that_never_comes(chain: Chain, way: str) -> None:
    chain.begin()
    began = time.monotonic()
    if way == "settle":
        assert chain.device.settle(5_000_000_000)
    else:
        chain.device.close()
    assert time.monotonic() - began < 3
    if way == "close":
        with pytest.raises(RuntimeError, match="closed"):
            chain.handshake.wait()


def test_a_chain_that_is_not_queued_leaves_no_turn_open(chain: Chain) -> None:
    native.inject_failure("vkQueueSubmit")
    with pytest.raises(native.VulkanError, match="vkQueueSubmit"):
        chain.begin()
    with pytest.raises(RuntimeError, match="no submit asks"):
        chain.handshake.wait()
    submission = chain.begin()
    chain.handshake.let_go()
    assert submission.wait()


def test_a_recording_in_flight_keeps_a_chain_from_beginning(chain: Chain) -> None:
    """The others are not in flight then."""
    first = chain.begin()
    other = chain.device.handshake()
    with pytest.raises(RuntimeError, match="in flight"):
        chain.device.submit_chain(chain.recordings, other, [False] * N, [False] * N)
    chain.handshake.let_go()
    assert first.wait()
    assert chain.device.submit_chain(chain.recordings, other, [False] * N, [False] * N).wait()


def test_waiting_for_a_turn_is_interruptible(chain: Chain, slow: bytes) -> None:
    """And other threads run meanwhile."""
    recordings = [slow_recording(chain.device, slow, 1500)]
    submission = chain.device.submit_chain(recordings, chain.handshake, [False], [True])
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        chain.handshake.wait()
    assert submission.done() is False, "it was not the interrupt that ended the wait"
    timer.join()
    chain.handshake.let_go()
    assert submission.wait() is True


@pytest.mark.parametrize("call", ["vkGetSemaphoreCounterValue", "vkSignalSemaphore"])
def test_a_lost_device_is_told_at_any_turn(chain: Chain, call: str) -> None:
    submission = chain.begin()
    native.inject_failure(call, 0, "VK_ERROR_DEVICE_LOST")
    with pytest.raises(native.DeviceLost, match=call):
        chain.handshake.wait()
        chain.handshake.answer()
    assert chain.device.lost
    chain.handshake.let_go()
    del submission


def test_a_handshake_that_cannot_be_made_leaves_nothing(device: native.Device) -> None:
    before = native.live_objects()
    for after in (0, 1):
        native.inject_failure("vkCreateSemaphore", after)
        with pytest.raises(native.VulkanError, match="vkCreateSemaphore"):
            device.handshake()
        assert native.live_objects() == before


@pytest.mark.parametrize("delay", [0.0, 0.05], ids=["polling", "sleeping"])
@pytest.mark.parametrize("way", ["let_go", "settle", "close"])
def test_a_thread_that_waits_for_its_turn_ends_when_another_lets_go(
    chain: Chain, slow: bytes, way: str, delay: float
) -> None:
    """The semaphore it waits for may be gone by then."""
    slowly = slow_recording(chain.device, slow, 500)
    submission = chain.device.submit_chain([slowly], chain.handshake, [False], [True])
    acts = {
        "let_go": chain.handshake.let_go,
        "settle": lambda: chain.device.settle(20_000_000_000),
        "close": lambda: chain.device.close(20_000_000_000),
    }
    timer = threading.Timer(delay, acts[way])
    timer.start()
    with pytest.raises(RuntimeError, match=r"let go|no submit asks|closed"):
        chain.handshake.wait()
    timer.join()
    if way != "close":
        assert submission.wait()


def test_waiting_for_one_submit_lets_no_chain_go(chain: Chain) -> None:
    before = chain.device.submit(chain.device.recorder().finish())
    submission = chain.begin()
    assert chain.device.settle(5_000_000_000, before) and before.done()
    for number in range(1, N + 1):
        chain.handshake.wait()
        assert chain.words[0] == number
        chain.handshake.answer()
    assert submission.wait()
