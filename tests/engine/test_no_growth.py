"""Nothing grows while tokens run through a tiny cache."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine import growth as growth_module
from tests.engine.growth import PYTHON_SLACK, RSS_SLACK, Sample, growth, options_of, soak
from tests.engine.tiny import model_path
from vkmoe.llm import LLM

N_TOKENS, N_SAMPLES = 270, 6
TINY = model_path("moe_plain")
THREADS = {"plain": 0, "overlap": 1, "pool": 2}  # "kept" does in part what "pool" does
pytestmark = pytest.mark.usefixtures("one_device")


def invented(**last: Any) -> list[Sample]:
    """A run in which nothing grows, but what `last` says of its last third."""
    steady = [Sample(100 * i, 50 << 20, 9 << 20, 10 << 20, 2, 30, 80, (7, 5)) for i in range(9)]
    return [*steady[:6], *(sample._replace(**last) for sample in steady[6:])]


@pytest.mark.parametrize("way", THREADS)
@pytest.mark.sample(1)
def test_two_hundred_tokens_leave_the_process_as_it_was(way: str) -> None:
    """With two slots in each layer, so that experts come and go all the time."""
    options, n_threads = options_of(way, TINY, n_slots=2), threading.active_count()
    tracemalloc.start()
    try:
        with LLM(TINY, **options) as llm:
            samples = list(soak(llm, N_TOKENS, N_SAMPLES))
            assert llm.engine.cache is not None
            counters = llm.engine.cache.counters
            assert counters.n_evictions > N_TOKENS / 6
            assert (counters.n_landed > N_TOKENS / 6) == (way == "pool")
            pool = llm.engine.cache.pool
            assert (pool is not None) == (way == "pool")
            assert pool is None or pool.counters.n_reads > N_TOKENS / 6
    finally:
        tracemalloc.stop()
    assert samples[-1].n_threads - n_threads == THREADS[way]
    assert threading.active_count() == n_threads
    assert [sample.n_tokens for sample in samples] == sorted({s.n_tokens for s in samples})
    assert samples[-1].n_tokens >= N_TOKENS
    assert growth(samples) == []


@pytest.mark.full
def test_where_no_expert_moves_nothing_is_kept_of_what_tokens_used() -> None:
    """With the demo model: what a token of the tiny one uses is too little to be noticed."""
    tracemalloc.start()
    try:
        with LLM(None, ctx_size=64, device="vulkan") as llm:
            assert llm.engine.cache is None
            samples = list(soak(llm, 2 * N_TOKENS, N_SAMPLES))
    finally:
        tracemalloc.stop()
    assert growth(samples) == []


@pytest.mark.parametrize(
    ("what", "last"),
    [
        ("resident memory", {"rss_bytes": (50 << 20) + RSS_SLACK + 1}),
        ("Python's memory", {"python_bytes": (9 << 20) + PYTHON_SLACK + 1}),
        ("the peak of Python's memory", {"python_peak": (10 << 20) + PYTHON_SLACK + 1}),
        ("threads", {"n_threads": 3}),
        ("open files", {"n_files": 31}),
        ("Vulkan objects", {"n_objects": 81}),
        ("device memory", {"device_bytes": (7, 6)}),
    ],
)
def test_whatever_grows_is_named(what: str, last: dict[str, Any]) -> None:
    assert growth(invented()) == []
    assert growth(invented(rss_bytes=1, python_bytes=1, n_threads=1)) == []
    (sentence,) = growth(invented(**last))
    assert sentence.startswith(f"{what} grew by ") and "in 300 tokens" in sentence


def test_a_list_that_keeps_something_of_each_token_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[bytearray] = []
    take: Callable[..., Sample] = Sample.take

    def leaky(n_tokens: int, device_bytes: list[int]) -> Sample:
        kept.append(bytearray(40_000))
        return take(n_tokens, device_bytes)

    monkeypatch.setattr(growth_module.Sample, "take", leaky)
    tracemalloc.start()
    try:
        with LLM(TINY, ctx_size=64, expert_slots=1) as llm:
            found = growth(list(soak(llm, N_TOKENS, N_SAMPLES)))
    finally:
        tracemalloc.stop()
    assert any(line.startswith("Python's memory grew") for line in found)


def test_where_the_system_does_not_tell_of_memory_and_files_the_rest_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(growth_module, "STATUS", tmp_path / "status")
    monkeypatch.setattr(growth_module, "OPEN_FILES", tmp_path / "fd")
    tracemalloc.start()
    try:
        sample = Sample.take(5, [1, 2])
    finally:
        tracemalloc.stop()
    assert sample.rss_bytes == 0 and sample.n_files == 0
    assert sample.device_bytes == (1, 2) and sample.python_peak > 0
