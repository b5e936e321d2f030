"""Ctrl-C at random moments while experts move on threads."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.interrupter import (
    CTX_SIZE,
    TOKENS,
    logits_of,
    opening,
    options_of,
    rounds,
    threads_left,
)
from tests.engine.tiny import model_path
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.gpu.backend import N_COMPILERS, Backend
from vkmoe.gpu.program import Dispatch

TINY = model_path("moe_plain")
N_ROUNDS = 12
pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True)
def old_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def right() -> tuple[bytes, int]:
    """The logits with all experts resident, and the bytes of these."""
    with Engine(TINY, EngineConfig(ctx_size=CTX_SIZE)) as engine:
        n_bytes = next(line.n_bytes for line in engine.plan.lines if line.item == "experts")
        return logits_of(engine, TOKENS), n_bytes


@pytest.mark.parametrize("way", ["overlap, landing", "small pool, overlap, landing"])
def test_ctrl_c_while_experts_move_changes_no_bit(way: str, right: tuple[bytes, int]) -> None:
    wanted, n_bytes = right
    config = EngineConfig(ctx_size=CTX_SIZE, **options_of(way, n_bytes))
    with Engine(TINY, config, checks=True) as engine:
        assert rounds(engine, wanted, random.Random(0), N_ROUNDS) > N_ROUNDS // 3
        cache = engine.cache
        assert cache is not None
        n_moved = cache.counters.n_uploads + cache.counters.n_landed
        logits_of(engine, TOKENS)
        assert cache.counters.n_uploads + cache.counters.n_landed > n_moved, (
            "nothing moves any more"
        )
    assert not threads_left()


def test_a_second_ctrl_c_leaves_the_submit_to_the_next_token(
    right: tuple[bytes, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which waits for it before it touches anything that the submit reads."""
    events: list[str] = []
    with Engine(TINY, EngineConfig(ctx_size=CTX_SIZE)) as engine:
        native: Any = engine.device.native

        class Impatient:
            """The device, but waiting for a submit, and then for it to end, is interrupted."""

            def submit(self, recording: object) -> Impatient:
                events.append("submit")
                native.submit(recording)
                return self

            def wait(self, expected_ns: int) -> None:
                raise KeyboardInterrupt

            def settle(self, timeout_ns: int, only: object = None) -> None:
                events.append("settle")
                raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(engine.device, "native", Impatient())
            engine.run_token(TOKENS[0], 0)
        assert events == ["submit", "settle"]
        begin = engine._experts.begin

        def noted(first: bool = True) -> int:
            events.append(f"in flight: {engine._backend._settle_ns > 0}")
            return begin(first)

        monkeypatch.setattr(engine._experts, "begin", noted)
        assert logits_of(engine, TOKENS) == right[0]
        assert set(events[2:]) == {"in flight: False"}


def test_ctrl_c_while_opening_and_closing_leaves_nothing(right: tuple[bytes, int]) -> None:
    """Neither Vulkan objects nor threads."""
    options = options_of("small pool, overlap, landing", right[1])
    assert opening(TINY, options, random.Random(0), 4) > 0


def test_ctrl_c_while_compiling_waits_for_no_kernel_that_has_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n_begun, real = 0, Backend._make_kernel

    def make_kernel(self: Backend, command: Dispatch) -> object:
        nonlocal n_begun
        n_begun += 1
        if n_begun == 1:
            raise KeyboardInterrupt
        time.sleep(0.5)
        return real(self, command)

    monkeypatch.setattr(Backend, "_make_kernel", make_kernel)
    with pytest.raises(KeyboardInterrupt):
        Engine(TINY, EngineConfig(ctx_size=CTX_SIZE))
    assert n_begun <= 1 + N_COMPILERS
