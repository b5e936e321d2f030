"""What happens to the model file while experts are read from it: the same logits, or an error that
says what is wrong; never a hang, a crash or other logits.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.caches import Rows, assert_same_bits, rows
from tests.engine.tiny import model_path
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import ModelFileError, VkmoeError
from vkmoe.weights.span_reader import SpanReader

TOKENS = [1, 5, 9, 2, 44, 17, 3, 60]
LIMIT_S = 10
ALL = 10**9  # calls that fail
pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def wanted() -> Rows:
    """The logits with all experts in memory."""
    with Engine(model_path("moe_plain"), EngineConfig(ctx_size=32)) as engine:
        return rows(engine, TOKENS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    copy = tmp_path / "model.gguf"
    copy.write_bytes(model_path("moe_plain").read_bytes())
    return copy


@contextmanager
def opened(path: Path) -> Iterator[Engine]:
    """With the least pool there is, so that every token needs the file. Leaves no thread behind."""
    before = set(threading.enumerate())
    config = EngineConfig(ctx_size=32, host_pool=str(64 << 10), expert_slots=1)
    started = time.monotonic()
    with Engine(path, config, checks=True) as engine:
        assert engine.plan.host_slots and engine.plan.executor == "stepped"
        yield engine
    assert set(threading.enumerate()) <= before
    assert time.monotonic() - started < LIMIT_S


def remove(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)


def cut(path: Path) -> None:
    os.truncate(path, 4096)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def write_over(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))
    os.utime(path, ns=(0, 0))  # a coarse clock may not have moved on


@pytest.mark.parametrize("harm", [remove, replace])
def test_the_open_file_is_read_whatever_its_name_leads_to(
    path: Path, wanted: Rows, harm: Callable[[Path], None]
) -> None:
    with opened(path) as engine:
        harm(path)
        assert_same_bits(rows(engine, TOKENS), wanted)


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [(cut, "ends after 4096 bytes"), (empty, "ends after 0 bytes"), (write_over, "was written to")],
)
def test_a_harmed_file_ends_the_run_with_an_error(
    path: Path, harm: Callable[[Path], None], complaint: str, wanted: Rows
) -> None:
    """Also when asked again."""
    with opened(path) as engine:
        assert_same_bits(rows(engine, TOKENS[:2]), wanted[:2])
        harm(path)
        for _ in range(2):
            with pytest.raises(ModelFileError, match=complaint) as caught:
                rows(engine, TOKENS)
            assert caught.value.hint


ERRORS: dict[str, Callable[[], BaseException]] = {  # made anew: a raised one holds on to memory
    "of the disk": lambda: OSError(errno.EIO, "Input/output error"),
    "of memory": MemoryError,
    "of ours": lambda: RuntimeError("injected"),
}
every_error = pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)


class Failing:
    """Stands in for a function; its first calls fail."""

    def __init__(
        self, call: Callable[..., int], error: Callable[[], BaseException], n_failures: int
    ) -> None:
        self._call, self._error, self.n_left = call, error, n_failures

    def __call__(self, *args: object) -> int:
        if self.n_left > 0:
            self.n_left -= 1
            raise self._error()
        return self._call(*args)


@every_error
def test_reads_that_fail_once_are_tried_again(
    path: Path,
    wanted: Rows,
    error: Callable[[], BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(path) as engine:
        failing = Failing(os.preadv, error, 1)
        monkeypatch.setattr(os, "preadv", failing)
        assert_same_bits(rows(engine, TOKENS), wanted)
        assert failing.n_left == 0


@pytest.mark.usefixtures("nothing_left")
@every_error
def test_reads_that_always_fail_are_an_error(
    path: Path,
    wanted: Rows,
    error: Callable[[], BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And once the disk is back, so are the logits."""
    with opened(path) as engine:
        monkeypatch.setattr(os, "preadv", Failing(os.preadv, error, ALL))
        with pytest.raises(VkmoeError) as caught:
            rows(engine, TOKENS)
        assert isinstance(caught.value, ModelFileError) == isinstance(error(), OSError)
        del caught
        monkeypatch.undo()
        assert_same_bits(rows(engine, TOKENS), wanted)


def test_a_slow_disk_is_waited_for(
    path: Path, wanted: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = SpanReader.read

    def slow(reader: SpanReader, number: int, out: NDArray[np.uint8]) -> None:
        time.sleep(0.02)
        read(reader, number, out)

    with opened(path) as engine:
        monkeypatch.setattr(SpanReader, "read", slow)
        assert_same_bits(rows(engine, TOKENS), wanted)
