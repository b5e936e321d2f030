"""Signals at checkpoints: what is put off, where it acts, and who is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import pytest

from vkmoe import interrupts
from vkmoe.interrupts import acquired, at_checkpoints, checkpoint, result_of


class Ended(BaseException):
    """Stands for what a program's own handler raises."""


def end(number: int, frame: FrameType | None) -> None:
    raise Ended(number)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """That of Ctrl-C is the same afterwards, and nothing is left to come."""
    before = signal.getsignal(signal.SIGTERM)
    interrupts.handle(signal.SIGTERM, end)
    yield
    signal.signal(signal.SIGTERM, before)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and not interrupts._came


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Ended)]
)
def test_a_signal_waits_for_the_next_checkpoint(
    number: int, error: type[BaseException], nested: bool
) -> None:
    done = []
    with pytest.raises(error), at_checkpoints():
        checkpoint()
        if nested:
            with at_checkpoints():
                signal.raise_signal(number)
            done.append("the end of an inner one is none")
        else:
            signal.raise_signal(number)
        done.append("before")
        checkpoint()
        done.append("behind")
    assert done[-1] == "before"
    checkpoint()


def test_the_end_is_a_checkpoint() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), at_checkpoints():
        signal.raise_signal(signal.SIGINT)
        done.append("all")
    assert done == ["all"]


def test_a_signal_outlives_an_error() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, at_checkpoints():
        signal.raise_signal(signal.SIGINT)
        raise OSError("the terminal is gone")
    assert isinstance(caught.value.__context__, OSError)


def test_several_signals_act_in_turn() -> None:
    with pytest.raises(Ended) as caught, at_checkpoints():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        checkpoint()
    assert isinstance(caught.value.__context__, KeyboardInterrupt)


def test_outside_signals_are_the_programs() -> None:
    for _ in range(2):
        with at_checkpoints():
            checkpoint()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(Ended):
            signal.raise_signal(signal.SIGTERM)


def test_a_handler_may_set_another() -> None:
    def ignore_more(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)

    signal.signal(signal.SIGINT, ignore_more)
    for _ in range(2):
        with at_checkpoints():
            signal.raise_signal(signal.SIGINT)
            checkpoint()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_get_no_signals() -> None:
    def work() -> None:
        with at_checkpoints():
            checkpoint()

    with pytest.raises(KeyboardInterrupt), at_checkpoints():
        signal.raise_signal(signal.SIGINT)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert interrupts._came
        checkpoint()


@pytest.mark.parametrize("what", ["lock", "future"])
def test_waiting_is_interrupted_within_a_fifth_of_a_second(what: str) -> None:
    lock, go_on = threading.Lock(), threading.Event()
    lock.acquire()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(go_on.wait)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt), at_checkpoints():
            if what == "future":
                result_of(future)
            with acquired(lock):
                raise AssertionError("it is taken")
        assert time.monotonic() - began < 0.25
        go_on.set()
        assert result_of(future)
    lock.release()
    with acquired(lock):
        assert lock.locked()
    assert not lock.locked()


HANGING = """
import signal, sys, time
from vkmoe.interrupts import at_checkpoints
if "own" in sys.argv:
    signal.signal(signal.SIGINT, lambda *_: None)
with at_checkpoints():
    print("works", flush=True)
    time.sleep(3)
print("ends", flush=True)
"""


def hanging(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HANGING, *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == "works\n"
    return process


def test_the_second_ctrl_c_ends_a_process_that_does_not_answer() -> None:
    with hanging() as process:
        for _ in range(3):  # at once, and so the same wish
            process.send_signal(signal.SIGINT)
        time.sleep(0.8)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(1) == interrupts.INTERRUPTED == 130
        assert process.communicate() == ("", "")


def test_a_handler_of_the_programs_own_is_asked_each_time() -> None:
    with hanging("own") as process:
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.8)
        assert process.communicate() == ("ends\n", "") and process.returncode == 0
