"""Ctrl-C at every checkpoint of loading, of prompts and of tokens: what comes after it is the same
as if nothing had been, bit by bit."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests.engine.tiny import model_path
from tests.samples import sampled
from vkmoe import interrupts
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.gpu.backend import N_COMPILERS, Backend
from vkmoe.gpu.program import Dispatch
from vkmoe.llm import LLM

TINY = model_path("moe_plain")
CTX_SIZE, TOKENS = 64, (3, 17, 5, 9, 17, 40)
# Without admission all that are missed get a slot: whether experts still move shows at once.
MOVING: dict[str, Any] = {"expert_slots": 3, "expert_copies": "overlap", "promote_on_read": True,
                          "expert_policy": "slru"}  # fmt: skip
POOL = {"host_pool": "25%", "executor": "stepped"}
WAYS: dict[str, dict[str, Any]] = {
    "resident": {"ubatch_size": 4},
    "slots": {**MOVING, "expert_copies": "wait", "ubatch_size": 4},
    "overlap, landing": {**MOVING, "moe_warmpin_after": 4},
    "small pool": {**POOL, "ubatch_size": 4},
    "small pool, overlap": {**MOVING, **POOL, "miss": "gather"},
    "cpu": {"cpu_moe": True, "ubatch_size": 4},
}
pytestmark = pytest.mark.usefixtures("nothing_left", "cpu_native", "one_device")


class _CtrlC(deque[int]):
    """Stands for the signals that came: at the n-th checkpoint, Ctrl-C is one of them."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n_left, self.main = n, threading.current_thread()

    def __bool__(self) -> bool:
        if threading.current_thread() is self.main and self.n_left > 0:
            self.n_left -= 1
            if not self.n_left:
                signal.raise_signal(signal.SIGINT)
        return len(self) > 0


@contextmanager
def ctrl_c_at(n: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C comes at the n-th checkpoint in here, and is passed on; not if there are fewer."""
    coming = _CtrlC(n)
    with monkeypatch.context() as patched:
        patched.setattr(interrupts, "_came", coming)
        try:
            yield
        except KeyboardInterrupt:
            assert not coming.n_left
        else:
            assert coming.n_left, "it was lost"
        finally:
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def at_each_checkpoint(
    work: Callable[[], object], after: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> int:
    """Interrupt the work at one checkpoint after the other; return how many there are."""
    is_over, n = False, 0
    while not is_over:
        n += 1
        with ctrl_c_at(n, monkeypatch):
            work()
            is_over = True
        after()
    return n - 1


def config_of(way: str) -> EngineConfig:
    options = dict(WAYS[way])
    if "host_pool" in options:
        with Engine(TINY, EngineConfig(ctx_size=CTX_SIZE)) as engine:
            n_bytes = next(line.n_bytes for line in engine.plan.lines if line.item == "experts")
        options["host_pool"] = str(n_bytes * int(options["host_pool"].rstrip("%")) // 100)
    return EngineConfig(ctx_size=CTX_SIZE, **options)


def logits_of(engine: Engine) -> bytes:
    """All logits after a prompt in chunks, and after each token behind it."""
    engine.run_prompt(TOKENS)
    found = [engine.full_logits()]
    for position, token in enumerate(TOKENS[:2], len(TOKENS)):
        engine.run_token(token, position)
        found.append(engine.full_logits())
    return np.stack(found).tobytes()


def moved(engine: Engine) -> int:
    """Count the experts that came to the device, and to the host pool."""
    if engine.cache is None:
        return 0
    counters, pool = engine.cache.counters, engine.cache.pool
    n_reads = pool.counters.n_reads if pool is not None else 0
    return counters.n_uploads + counters.n_landed + n_reads


@pytest.mark.parametrize("way", sampled(WAYS, ("small pool, overlap", "cpu").__contains__))
@pytest.mark.sample(1)
def test_ctrl_c_at_any_checkpoint_changes_no_bit(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(TINY, config_of(way), checks=True) as fresh:
        wanted = logits_of(fresh)
    with Engine(TINY, config_of(way), checks=True) as engine:

        def is_same() -> None:
            assert logits_of(engine) == wanted

        n_checkpoints = at_each_checkpoint(lambda: logits_of(engine), is_same, monkeypatch)
        assert n_checkpoints > 7
        n_moved = moved(engine)
        logits_of(engine)
        assert engine.cache is None or moved(engine) > n_moved, "nothing moves any more"


def test_ctrl_c_at_any_checkpoint_leaves_the_model_to_other_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And to other threads."""
    asked: dict[str, Any] = {"max_tokens": 3, "temp": 0.9, "seed": 1, "ignore_eos": True}
    found: list[list[int]] = []
    with LLM(TINY, ctx_size=CTX_SIZE, expert_slots=2) as llm:
        wanted = llm.generate([1, 2, 3], **asked).token_ids

        def generate() -> None:
            llm.last_statistics = None
            llm.forget()
            llm.generate([1, 2, 3], **asked)

        def is_usable() -> None:
            statistics = llm.last_statistics
            assert statistics is None or statistics.finish_reason in ("interrupt", "length")
            assert not llm.scheduler.has_work and llm.scheduler.regions.n_free == 1
            llm.forget()
            thread = threading.Thread(
                target=lambda: found.append(llm.generate([1, 2, 3], **asked).token_ids),
                daemon=True,
            )
            thread.start()
            thread.join(60)

        n_checkpoints = at_each_checkpoint(generate, is_usable, monkeypatch)
        assert n_checkpoints > 8 and found == [wanted] * (n_checkpoints + 1)


@pytest.mark.parametrize("way", ["overlap, landing", "small pool, overlap", "cpu"])
def test_ctrl_c_while_loading_leaves_nothing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither Vulkan objects, which the fixture counts, nor threads; then loading works."""
    config, n, before = config_of(way), 1, set(threading.enumerate())
    for n in itertools.accumulate(itertools.count(1)):
        is_over = False
        with ctrl_c_at(n, monkeypatch):
            Engine(TINY, config).close()
            is_over = True
        threads = set(threading.enumerate()) - before
        assert not [each.name for each in threads if each.name.startswith("vkmoe")]
        if is_over:
            break
    assert n > 20


def test_a_model_that_is_loaded_when_ctrl_c_acts_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Engine._load

    def late(*arguments: Any) -> None:
        real(*arguments)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Engine, "_load", late)
    for load in (lambda: LLM(TINY, ctx_size=CTX_SIZE), lambda: Engine(TINY, config_of("slots"))):
        with pytest.raises(KeyboardInterrupt):
            load()


def test_ctrl_c_while_compiling_waits_for_no_kernel_that_has_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n_begun, real = 0, Backend._make_kernel

    def make_kernel(self: Backend, command: Dispatch) -> object:
        nonlocal n_begun
        n_begun += 1
        if n_begun == 1:
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.5)
        return real(self, command)

    monkeypatch.setattr(Backend, "_make_kernel", make_kernel)
    with pytest.raises(KeyboardInterrupt):
        Engine(TINY, config_of("resident"))
    assert n_begun <= 2 * N_COMPILERS


def test_waiting_for_another_threads_turn_is_interruptible() -> None:
    with LLM(TINY, ctx_size=CTX_SIZE) as llm:
        llm._turns._turn.acquire()
        threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([1, 2], max_tokens=1)
        llm._turns._turn.release()
        assert llm.generate([1, 2], max_tokens=1, ignore_eos=True).token_ids
