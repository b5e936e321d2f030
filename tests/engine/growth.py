"""What a process holds while tokens run through a tiny expert cache, and what of it grew.

Watches resident memory, Python's own memory (tracemalloc), threads, open files, Vulkan objects and
the bytes of device memory. A way is how experts move: `plain`, between tokens; `overlap`, beside
them; `kept`, as they are read; `pool`, so and from a small host pool.
"""

from __future__ import annotations

import gc
import statistics
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vkmoe.gpu import _native as native
from vkmoe.llm import LLM

CTX_SIZE = 128
PROMPT_TOKENS, REPLY_TOKENS = 10, 30  # of each reply in the soak
N_SAMPLES = 30
# What may come and go: pages of the C library, and Python's free lists.
RSS_SLACK, PYTHON_SLACK = 4 << 20, 64 << 10
STATUS, OPEN_FILES = Path("/proc/self/status"), Path("/proc/self/fd")
POOL_SHARE = 0.4  # of all experts
# Whatever is missed gets a slot, so that experts come and go all the time.
COPIED: dict[str, Any] = {
    "expert_copies": "overlap", "promote_on_read": False, "expert_policy": "lru",
}  # fmt: skip
KEPT = {**COPIED, "promote_on_read": True}
WAYS: dict[str, dict[str, Any]] = {"plain": {}, "overlap": COPIED, "kept": KEPT, "pool": KEPT}


class Sample(NamedTuple):
    """What the process holds after `n_tokens`."""

    n_tokens: int
    rss_bytes: int  # 0 where the system does not say
    python_bytes: int
    python_peak: int  # since the sample before
    n_threads: int
    n_files: int  # open; 0 where the system does not say
    n_objects: int  # of Vulkan
    device_bytes: tuple[int, ...]  # by heap

    @classmethod
    def take(cls, n_tokens: int, device_bytes: Sequence[int]) -> Sample:
        gc.collect()
        current, peak = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        return cls(
            n_tokens,
            _rss_bytes(),
            current,
            peak,
            threading.active_count(),
            len(list(OPEN_FILES.iterdir())) if OPEN_FILES.exists() else 0,
            sum(native.live_objects().values()),
            tuple(device_bytes),
        )


def growth(samples: Sequence[Sample]) -> list[str]:
    """What grew between the second and the last third of a run, as sentences; [] if nothing did."""
    third = len(samples) // 3
    assert third >= 2, f"{len(samples)} samples are too few"
    early, late = samples[third : 2 * third], samples[-third:]

    def rise(value: Callable[[Sample], float]) -> float:
        return statistics.median(map(value, late)) - statistics.median(map(value, early))

    tokens = rise(lambda sample: sample.n_tokens)
    measured = (
        ("resident memory", RSS_SLACK, rise(lambda sample: sample.rss_bytes)),
        ("Python's memory", PYTHON_SLACK, rise(lambda sample: sample.python_bytes)),
        ("the peak of Python's memory", PYTHON_SLACK, rise(lambda sample: sample.python_peak)),
        ("threads", 0, rise(lambda sample: sample.n_threads)),
        ("open files", 0, rise(lambda sample: sample.n_files)),
        ("Vulkan objects", 0, rise(lambda sample: sample.n_objects)),
        ("device memory", 0, rise(lambda sample: sum(sample.device_bytes))),
    )
    return [
        f"{what} grew by {risen:,.0f} in {tokens:,.0f} tokens (allowed: {slack:,})"
        for what, slack, risen in measured
        if risen > slack
    ]


def options_of(way: str, model: Path, n_slots: int) -> dict[str, Any]:
    """The options of a way; what a small host pool is depends on the model."""
    options = {"ctx_size": CTX_SIZE, "expert_slots": n_slots, **WAYS[way]}
    if way == "pool":
        with LLM(model, ctx_size=CTX_SIZE) as llm:
            n_bytes = next(line.n_bytes for line in llm.plan.lines if line.item == "experts")
        options["host_pool"] = str(int(POOL_SHARE * n_bytes))
    return options


def soak(llm: LLM, n_tokens: int, n_samples: int = N_SAMPLES) -> Iterator[Sample]:
    """Generate replies to random prompts; sample at even distances. tracemalloc must be running."""
    rng = np.random.default_rng(0)
    done = n_taken = n_replies = 0
    while n_taken < n_samples:
        prompt = rng.integers(0, llm.spec.n_vocab, PROMPT_TOKENS).tolist()
        llm.generate(prompt, max_tokens=REPLY_TOKENS, temp=1.0, seed=n_replies, ignore_eos=True)
        n_replies += 1
        done += PROMPT_TOKENS + REPLY_TOKENS - 1  # the last one's successor is never computed
        while n_taken < n_samples and done * n_samples >= (n_taken + 1) * n_tokens:
            n_taken += 1
            yield Sample.take(done, llm.engine.device.native.memory_bytes())


def _rss_bytes() -> int:
    if not STATUS.exists():
        return 0
    lines = (line.split() for line in STATUS.read_text().splitlines())
    return next(int(words[1]) << 10 for words in lines if words and words[0] == "VmRSS:")
