"""Ctrl-C at random moments while experts move, or while a model is opened and closed.

A round runs a few tokens into a Ctrl-C, and then the same ones from the start, which must have the
logits of an engine with all experts resident. A timer's signal stands for Ctrl-C: it raises
KeyboardInterrupt wherever the engine is. A round that takes longer than 10 s ends the process with
the stacks of all threads.
"""

from __future__ import annotations

import faulthandler
import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.gpu import _native as native

__all__ = ["LIMIT_S", "WAYS", "Interrupter", "logits_of", "rounds"]

CTX_SIZE = 32
TOKENS = (3, 17, 5, 9, 17, 3, 40, 41)
LIMIT_S = 10.0
# Without admission everybody who is missed gets a slot: whether experts still move shows at once.
MOVING: dict[str, Any] = {"expert_slots": 3, "expert_copies": "overlap", "promote_on_read": True,
                          "expert_predictor": "correlation", "expert_admission": False}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "overlap": {"expert_slots": 2, "expert_copies": "overlap"},
    "overlap, landing": {**MOVING, "moe_warmpin_after": 4},
    "small pool": {"host_pool": "25%"},
    "small pool, overlap, landing": {**MOVING, "host_pool": "25%", "miss": "gather"},
    "small pool, waited for": {"host_pool": "40%", "expert_slots": 2, "expert_copies": "wait"},
}


class Interrupter:
    """Raises KeyboardInterrupt in the main thread at a moment, unless what runs is over before."""

    def __init__(self) -> None:
        self._armed = False
        signal.signal(signal.SIGALRM, self._fire)

    def run(self, what: Callable[[], object], after_s: float) -> bool:
        """Whether `what` was interrupted."""
        try:
            self._armed = True
            signal.setitimer(signal.ITIMER_REAL, after_s)
            what()
            self._armed = False
        except KeyboardInterrupt:
            return True
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        return False

    def _fire(self, number: int, frame: object) -> None:
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt


def options_of(way: str, experts_bytes: int) -> dict[str, Any]:
    """A way's options, with a pool of a share of all experts in bytes."""
    options = dict(WAYS[way])
    if "host_pool" in options:
        share = int(options["host_pool"].rstrip("%")) / 100
        options["host_pool"] = str(int(share * experts_bytes))
    return options


def logits_of(engine: Engine, tokens: Sequence[int]) -> bytes:
    """All logits after each token."""
    found = []
    for position, token in enumerate(tokens):
        engine.run_token(token, position)
        found.append(engine.full_logits())
    return np.stack(found).tobytes()


def rounds(engine: Engine, wanted: bytes, rng: random.Random, n_rounds: int) -> int:
    """Interrupt so many runs, and look at the one after each. Returns how many were interrupted.

    Raises AssertionError at a difference.
    """
    interrupter, n_interrupted = Interrupter(), 0
    for _ in range(2):  # drivers compile during the first
        began = time.perf_counter()
        assert logits_of(engine, TOKENS) == wanted, "before any Ctrl-C"
        run_s = time.perf_counter() - began
    for _ in range(n_rounds):
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        n_at_once = 2 if rng.random() < 0.2 else 1  # the second hits what cleans up
        for _ in range(n_at_once):
            n_interrupted += interrupter.run(
                lambda: logits_of(engine, TOKENS), 1e-4 + 1.1 * run_s * rng.random() ** 2
            )
        assert logits_of(engine, TOKENS) == wanted, "after Ctrl-C"
        faulthandler.cancel_dump_traceback_later()
    return n_interrupted


def opening(model: Path, options: dict[str, Any], rng: random.Random, n_rounds: int) -> int:
    """Interrupt opening, a token and closing. Returns how many were interrupted."""
    interrupter, n_interrupted = Interrupter(), 0

    def once() -> None:
        with Engine(model, EngineConfig(ctx_size=CTX_SIZE, **options)) as engine:
            logits_of(engine, TOKENS[:2])

    for _ in range(2):  # drivers compile during the first
        began = time.perf_counter()
        once()
        once_s = time.perf_counter() - began
    gc.collect()
    before = native.live_objects()
    for _ in range(n_rounds):
        faulthandler.dump_traceback_later(2 * LIMIT_S, exit=True)
        n_interrupted += interrupter.run(once, 1e-4 + 1.05 * once_s * rng.random())
        assert not (found := left(before)), f"left: {found}"
        faulthandler.cancel_dump_traceback_later()
    return n_interrupted


def left(before: dict[str, int]) -> dict[str, int]:
    """Vulkan objects and threads there are more than `before`, after some time to go away.

    A thread that compiles kernels, or loads, ends the one it is at.
    """
    give_up = time.monotonic() + LIMIT_S
    while True:
        gc.collect()
        found = {kind: n - before.get(kind, 0) for kind, n in native.live_objects().items()}
        found |= dict.fromkeys(threads_left(), 1)
        if not any(found.values()) or time.monotonic() > give_up:
            return {kind: n for kind, n in found.items() if n}
        time.sleep(0.05)


def threads_left() -> list[str]:
    """The threads of vkmoe that live."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("vkmoe")]
