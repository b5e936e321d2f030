"""Another expert cache in an engine that is open, and the law it has to keep.

Opening an engine takes far longer than a few tokens, and weights, slots and programs are the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vkmoe.engine import Engine
from vkmoe.experts.decide.residency import Residency
from vkmoe.experts.decide.settings import CacheSettings
from vkmoe.experts.store.cache import CacheWays, ExpertCache
from vkmoe.experts.store.copies import Uploader, Uploads
from vkmoe.experts.store.tracker import ExpertTracker
from vkmoe.weights import span_reader

Rows = NDArray[np.float32]  # [n_tokens, n_vocab]
# The largest difference of logits between rows of prompts and rows that are decoded, of the largest
# logit, with caches in f16: at most 7e-4 was seen in 1,500 tokens of every tiny model.
ROUNDING = 2e-3
# The same with caches in q8_0, whose steps are 1/127 of a block's largest number: 3e-3 was seen.
Q8_ROUNDING = 1e-2
# The same where prompts multiply in f16: 5e-3 was seen of tiny models on an H100, and 1.7e-2 with
# caches in q8_0 besides.
F16_PROMPTS = 2e-2


def rounding(engine: Engine, most: float) -> float:
    """What prompts may differ by, of the largest logit; `most` where they multiply in f32."""
    return max(most, F16_PROMPTS) if engine.tuning.rounds_factors else most


def rows(engine: Engine, tokens: Sequence[int]) -> Rows:
    """The logits after each token."""
    found = []
    for position, token in enumerate(tokens):
        engine.run_token(token, position)
        found.append(engine.full_logits())
    return np.stack(found)


def assert_same_bits(found: Rows, wanted: Rows) -> None:
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))
    assert not np.isnan(wanted).any() and np.ptp(wanted) > 1


def recache(
    engine: Engine,
    settings: CacheSettings,
    uploads: Uploader | None = None,
    wait: bool = True,
) -> ExpertCache:
    """A new, empty cache over the slots of the old one; checked after every token."""
    old = engine.cache
    assert old is not None, engine.plan
    old.settle()
    residency = Residency(old._space, old._memory.slots._pools, settings)
    uploads = uploads or Uploads(engine.device)
    cache = ExpertCache(residency, old._memory, uploads, CacheWays(wait=wait))
    cache.start()
    numbers = engine._experts.profiler.layer_numbers
    engine._experts = ExpertTracker(numbers, engine._table, residency, cache, checks=True)
    return cache


def slow_reads(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let each batch of reads of the file begin later."""
    start = span_reader.FileReads.start

    def slow(self: Any, reads: Any, urgent: bool = False) -> Any:
        time.sleep(seconds)
        return start(self, reads, urgent)

    monkeypatch.setattr(span_reader.FileReads, "start", slow)
