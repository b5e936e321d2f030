"""When copies run beside tokens: their order on one queue, and that their times are believed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.experts.records.profiler import Interval, Overlap
from vkmoe.llm import demo_model_path

pytestmark = pytest.mark.usefixtures("one_device")

N_TOKENS = 12


class Watched(Overlap):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[Interval] = []
        self.copies: list[Interval] = []

    def computed(self, submits: Sequence[Interval], host: Interval) -> None:
        assert host[0] < host[1]
        self.tokens += submits
        super().computed(submits, host)

    def copied(self, interval: Interval | None, host: Interval) -> None:
        if interval is not None:
            self.copies.append(interval)
        super().copied(interval, host)


def test_copies_beside_tokens_are_timed_and_on_one_queue_in_turns() -> None:
    config = EngineConfig(ctx_size=64, expert_slots=6, expert_copies="overlap")
    with Engine(demo_model_path(), config, checks=True) as engine:
        native = engine.device.native
        watched = Watched()
        assert engine._experts.overlap is not None and engine.cache is not None
        engine.cache._tier.overlap = watched
        for position in range(N_TOKENS):
            engine.run_token(100 + position, position)
        engine.settle()
        if not (native.has_timestamps() and native.has_timestamps("upload")):
            assert watched.fraction is None
            return
        assert len(watched.tokens) == N_TOKENS and watched.n_unknown == 0
        assert len(watched.copies) >= 3, "hardly anything was copied"
        assert watched.tokens == sorted(watched.tokens) and watched.copies == sorted(watched.copies)
        if native.n_queues > 1:
            assert watched.fraction is None or 0 <= watched.fraction <= 1
            return
        for earlier, later in pairwise(sorted([*watched.tokens, *watched.copies])):
            assert earlier[1] <= later[0]
        assert watched.fraction == 0.0, "on one queue nothing can be hidden"


@pytest.mark.parametrize(
    ("copies", "host_pool", "in_order"),
    [("wait", None, True), ("wait", "2MiB", False), ("overlap", None, False)],
)
def test_the_host_need_not_wait_where_only_the_device_touches_what_is_copied(
    copies: Any, host_pool: str | None, in_order: bool
) -> None:
    """It writes into places of a host pool, and a thread submits copies beside tokens."""
    config = EngineConfig(ctx_size=64, expert_slots=6, expert_copies=copies, host_pool=host_pool)
    with Engine(demo_model_path(), config) as engine:
        assert engine.cache is not None and (engine.cache.pool is not None) == bool(host_pool)
        has_one = not engine.device.native.has_upload_queue
        assert engine.cache._ways.in_order == (in_order and has_one)
