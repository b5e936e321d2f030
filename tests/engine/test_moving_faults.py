"""What goes wrong while experts move: the same text or a clear error, and never a hang."""

from __future__ import annotations

import faulthandler
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.caches import Rows, assert_same_bits, rows
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import DeviceLostError, ModelFileError, OutOfMemoryError
from vkmoe.experts.store.copies import Uploads
from vkmoe.llm import demo_model_path

pytestmark = pytest.mark.usefixtures("one_device")

LIMIT_S = 10
TOKENS = [3, 17, 5, 9, 17, 3, 40, 41, 5, 9, 60, 61]


@pytest.fixture(autouse=True)
def no_hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What takes longer than the limit ends the run; `pytest -s` shows the stacks of all threads.

    Opening, each token, waiting for copies, and closing may take so long each.
    """

    def limited(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)
            return step(*arguments, **named)

        return run

    before = set(threading.enumerate())
    for name in ("__init__", "run", "settle", "close"):
        monkeypatch.setattr(Engine, name, limited(getattr(Engine, name)))
    yield
    faulthandler.cancel_dump_traceback_later()
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("vkmoe")], "a thread is left"


@pytest.fixture(scope="module")
def wanted() -> Rows:
    with Engine(demo_model_path(), EngineConfig(ctx_size=32)) as engine:
        return rows(engine, TOKENS)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A model file of our own to damage."""
    return Path(shutil.copy(demo_model_path(), tmp_path / "model.gguf"))


def pooled(path: Path, **choices: Any) -> Engine:
    """A model whose host pool holds a third of the experts."""
    return Engine(path, EngineConfig(ctx_size=32, host_pool="8MiB", **choices), checks=True)


def test_a_file_cut_off_while_running_is_a_clear_error(copy: Path) -> None:
    with pooled(copy) as engine:
        rows(engine, TOKENS[:2])
        os.truncate(copy, copy.stat().st_size // 3)
        with pytest.raises(ModelFileError, match="expert") as told:
            rows(engine, TOKENS)
        assert told.value.hint


def test_a_file_overwritten_while_running_is_a_clear_error(copy: Path) -> None:
    with pooled(copy) as engine:
        rows(engine, TOKENS[:2])
        n_bytes = copy.stat().st_size
        with copy.open("r+b") as file:
            file.seek(n_bytes // 2)
            file.write(os.urandom(n_bytes // 2))
        with pytest.raises(ModelFileError):
            rows(engine, TOKENS)


def test_a_file_deleted_while_running_does_not_matter(copy: Path, wanted: Rows) -> None:
    with pooled(copy, expert_slots=2) as engine:
        copy.unlink()
        assert_same_bits(rows(engine, TOKENS), wanted)


def test_a_file_that_is_no_longer_mapped_does_not_matter(copy: Path, wanted: Rows) -> None:
    """Experts are read by position: the mapping is needed while loading only."""
    with pooled(copy) as engine:
        engine.model.file.close()
        assert_same_bits(rows(engine, TOKENS), wanted)


@pytest.mark.parametrize("error", [OutOfMemoryError("injected"), MemoryError(), OSError("x")])
@pytest.mark.parametrize("always", [False, True])
def test_what_a_copying_thread_cannot_allocate_is_not_needed(
    error: Exception, always: bool, wanted: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts stay at home; if it was once, later copies work."""
    n_started, real = 0, Uploads.start

    def start(self: Uploads, *arguments: Any, **named: Any) -> Any:
        nonlocal n_started
        n_started += 1
        if always or n_started == 2:
            raise error
        return real(self, *arguments, **named)

    monkeypatch.setattr(Uploads, "start", start)
    config = EngineConfig(ctx_size=32, expert_slots=3, expert_copies="overlap")
    with Engine(demo_model_path(), config, checks=True) as engine:
        assert_same_bits(rows(engine, TOKENS), wanted)
        engine.settle()
        assert engine.cache is not None
        counters = engine.cache.counters
        assert counters.n_failed_uploads > 0 and (counters.n_uploads == 0) == always


def test_a_lost_device_in_the_thread_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: Uploads, *arguments: Any, **named: Any) -> Any:
        raise DeviceLostError("injected", "", "VK_ERROR_DEVICE_LOST")

    monkeypatch.setattr(Uploads, "start", lost)
    config = EngineConfig(ctx_size=32, expert_slots=3, expert_copies="overlap")
    with Engine(demo_model_path(), config) as engine, pytest.raises(DeviceLostError):
        for _ in range(50):
            rows(engine, TOKENS)
