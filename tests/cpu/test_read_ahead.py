"""Experts of a file too large for memory: those that are used are read, whole, and no others."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.needs import need_cpu
from tools.make_synthetic_model import write_shape
from tools.synthetic.presets import PRESETS
from vkmoe import engine as engine_module
from vkmoe.batch import TokenBatch
from vkmoe.config import EngineConfig
from vkmoe.cpu.variants import native
from vkmoe.engine import Engine
from vkmoe.gguf_file import GgufFile

N_EXPERTS, PAGE = 64, mmap.PAGESIZE


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Matrices of 17 pages: what the system reads at a fault is more than one, or ends within."""
    need_cpu()
    made = tmp_path_factory.mktemp("models") / "experts.gguf"
    write_shape("experts", replace(PRESETS["tiny"], n_experts=N_EXPERTS), made, "q8_0")
    with made.open("r+b") as file:
        os.fsync(file.fileno())  # what is not on the disk is not dropped
    return made


def forget(file: GgufFile, name: str) -> None:
    """Take a tensor out of memory; another use reads it from the disk."""
    file.drop_pages(name)
    tensor = file.tensors[name]
    with file.path.open("rb") as opened:
        start, n_bytes = tensor.offset, tensor.n_bytes
        os.posix_fadvise(opened.fileno(), start, n_bytes, os.POSIX_FADV_DONTNEED)


def present(data: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which pages that lie wholly in `data` are in memory (mincore)."""
    first = -data.ctypes.data % PAGE
    n_pages = (data.nbytes - first) // PAGE
    found = np.zeros(n_pages, np.uint8)
    address = ctypes.c_void_p(data.ctypes.data + first)
    target = found.ctypes.data_as(ctypes.c_void_p)
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(n_pages * PAGE), target) == 0
    return (found & 1).astype(np.bool_)


def experts_of(file: GgufFile) -> Iterator[tuple[int, str]]:
    """The layer and name of every stack of experts."""
    for name in file.tensors:
        if name.endswith("_exps.weight"):
            yield int(name.split(".")[1]), name


@pytest.mark.parametrize("n_rows", [1, 9], ids=["decoded", "prompt"])
def test_experts_that_are_used_are_read_whole_and_no_others(
    path: Path, monkeypatch: pytest.MonkeyPatch, n_rows: int
) -> None:
    monkeypatch.setattr(engine_module, "available_bytes", lambda: 0)
    with Engine(path, EngineConfig("cpu", 64)) as engine:
        file = engine.model.file
        for _, name in experts_of(file):
            forget(file, name)
            assert not present(file.data(name)).any(), "the system keeps what it was to drop"
        wants = (False,) * (n_rows - 1) + (True,)
        rows = (tuple(range(7, 7 + n_rows)), tuple(range(n_rows)), (0,) * n_rows, wants)
        batch = TokenBatch(*rows, "decode" if n_rows == 1 else "prompt")
        routing = engine.run(batch).routing
        for layer, name in experts_of(file):
            matrices = file.data(name).reshape(N_EXPERTS, -1)
            found = [present(matrix) for matrix in matrices]
            is_last = layer == engine.spec.n_layers - 1  # which computes what wants logits alone
            used = set(routing[-1 if is_last else 0 :, layer].reshape(-1).tolist())
            assert {n for n, pages in enumerate(found) if pages.all()} == used, name
            assert {n for n, pages in enumerate(found) if pages.any()} == used, name


def test_nothing_is_asked_for_while_nothing_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are asked for until layers have read nothing for a while, and when they read again.

    What is not known counts as reading: the first token asks.
    """
    monkeypatch.setattr(engine_module, "available_bytes", lambda: 0)
    with Engine(path, EngineConfig("cpu", 64)) as engine:
        file, experts = engine.model.file, engine.spec.experts
        assert experts is not None
        n_of_token = engine.spec.n_layers * experts.n_used

        def asked(n_tokens: int) -> int:
            before: int = native().n_read_ahead()
            for _ in range(n_tokens):
                engine.run_token(7, 0)
            behind: int = native().n_read_ahead()
            return behind - before

        def asked_where_all_is_read() -> int:
            for _, name in experts_of(file):
                forget(file, name)
            return asked(1)

        assert asked(1) == n_of_token
        for _ in range(2):
            assert 0 < asked(300) < 300 * n_of_token  # the average is over 64 layers
            assert asked(1) == 0
            assert asked_where_all_is_read() == 0, "one token is not enough"
            assert n_of_token in (asked_where_all_is_read() for _ in range(50))
