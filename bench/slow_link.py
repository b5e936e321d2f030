"""A link slower than this machine's, by injection: misses and copies wait as if they crossed it.

`throttle` slows an engine whose kernels compute: its misses are waited for after the submit.
`SlowGpu` models the GPU too, for an engine whose programs are empty: what the host does beside a
token costs nothing unless it takes longer than the token, and what it does in between costs all.

For CPU devices, where experts in host memory cost no more than those in slots. The bytes still move
at once; what is added is the time they would take. Misses are waited for after the token's submit,
on the engine's thread; copies by whoever waits for them, which is the copying thread where there is
one. Both share the link's speed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkmoe.engine import Engine
from vkmoe.experts.store.copies import Copy, Prefetcher, Upload, Uploader
from vkmoe.gpu.link_speed import LinkSpeed

__all__ = ["SlowGpu", "SlowLink", "SlowUploads", "throttle"]

SLICE_S = 0.001  # what one of those who share the link sends before it is the other's turn


class SlowLink:
    """Carries so many bytes per second, for all threads together."""

    def __init__(self, bytes_per_second: float) -> None:
        assert bytes_per_second > 0
        self.bytes_per_second = bytes_per_second
        self.n_bytes = 0  # carried
        self._lock = threading.Lock()
        self._ends = [0.0]  # when it is free again; shared with links that are the same

    def share(self, other: SlowLink) -> None:
        """Be the same link as another one, for bytes of another size."""
        self._lock, self._ends = other._lock, other._ends

    def carry(self, n_bytes: int, since: float | None = None) -> None:
        """Wait as long as these bytes take, in turns with others' bytes; from `since` on."""
        ready = time.perf_counter() if since is None else since
        slice_bytes = max(1, int(self.bytes_per_second * SLICE_S))
        for start in range(0, n_bytes, slice_bytes):
            size = min(slice_bytes, n_bytes - start)
            with self._lock:
                # From when it was ready, not from now: sleeping too long must not slow the link.
                ready = max(ready, self._ends[0]) + size / self.bytes_per_second
                self._ends[0] = ready
                self.n_bytes += size
            time.sleep(max(0.0, ready - time.perf_counter()))
        time.sleep(max(0.0, ready - time.perf_counter()))


class SlowUploads:
    """Copies that arrive when a slow link has carried their bytes, too."""

    def __init__(self, inner: Uploader, link: SlowLink) -> None:
        self._inner, self._link = inner, link

    def start(self, copies: Sequence[Copy], urgent: bool = False) -> Upload:
        n_bytes = sum(n_bytes for _, _, n_bytes in copies)
        return _Slow(self._inner.start(copies, urgent), self._link, n_bytes)

    def drain(self) -> bool:
        return self._inner.drain()


class _Slow:
    def __init__(self, inner: Upload, link: SlowLink, n_bytes: int) -> None:
        self._inner, self._link, self._n_bytes = inner, link, n_bytes

    def done(self) -> bool:
        return not self._n_bytes and self._inner.done()

    def wait(self) -> None:
        self._inner.wait()
        n_bytes, self._n_bytes = self._n_bytes, 0
        self._link.carry(n_bytes)

    def cancel(self) -> bool:
        return self._inner.cancel()

    def interval(self) -> tuple[int, int] | None:
        return self._inner.interval()


def throttle(engine: Engine, link: SlowLink, compute_s: float) -> None:
    """Let the misses and copies of `engine` cross `link`, and its copies know of that.

    Their budget is that of tokens which take `compute_s` and the time of their misses, so that what
    moves does not depend on how busy this machine is. Must hold: a cache in one tier, and whole
    tokens.
    """
    cache, tracker = engine.cache, engine._experts
    assert cache is not None and cache.pool is None and engine.plan.executor == "fused"
    tier, span_bytes = cache._tier, np.array(cache._span_bytes)
    uploads = tier.uploads
    if isinstance(uploads, Prefetcher):
        uploads._uploads = SlowUploads(uploads._uploads, link)
    else:
        tier.uploads = SlowUploads(uploads, link)
    if cache._ways.budget is not None:
        cache._ways.budget._link = LinkSpeed(link.bytes_per_second, link.bytes_per_second)
    after_run = tracker.after_run

    def later(
        routing: NDArray[np.uint32],
        filled: NDArray[np.bool_] | None = None,
        n_decoded: int = 0,
        tokens: Sequence[int | None] | None = None,
    ) -> None:
        n_misses = (~cache.residency.hits(routing)).sum(axis=(0, 2))
        missed_bytes = int((n_misses * span_bytes).sum())
        link.carry(missed_bytes)
        tracker._host_ns = int((compute_s + missed_bytes / link.bytes_per_second) * 1e9)
        after_run(routing, filled, n_decoded, tokens)

    tracker.after_run = later  # type: ignore[method-assign]


class SlowGpu:
    """An engine with empty programs, whose tokens take as long as on a GPU behind a link."""

    def __init__(
        self, engine: Engine, link: SlowLink, compute_s: float, expert_bytes: float
    ) -> None:
        """Count each expert as `expert_bytes`; a token takes `compute_s` without misses."""
        cache = engine.cache
        assert cache is not None and cache.pool is None and engine.plan.executor == "fused"
        self.engine, self._link, self._compute_s = engine, link, compute_s
        self._expert_bytes, self._cache = expert_bytes, cache
        self._is_timed = False
        self._routing: NDArray[np.uint32] | None = None
        self.n_hits = self.n_uses = 0
        real_bytes = max(cache._span_bytes)
        uploads = cache._tier.uploads
        scaled = SlowLink(link.bytes_per_second * real_bytes / expert_bytes)
        scaled.share(link)
        if isinstance(uploads, Prefetcher):
            uploads._uploads = SlowUploads(uploads._uploads, scaled)
        else:
            cache._tier.uploads = SlowUploads(uploads, scaled)
        if cache._ways.budget is not None:
            speed = scaled.bytes_per_second
            cache._ways.budget._link = LinkSpeed(speed, speed)
        self._real_run = engine._backend.run
        engine._backend.run = self._run  # type: ignore[method-assign]

    def begin(self) -> None:
        """From here on tokens take their time."""
        self._is_timed, self.n_hits, self.n_uses = True, 0, 0

    def expect(self, routing: NDArray[np.uint32]) -> None:
        """The next token uses `routing` [n_layers, n_used]."""
        self._routing = routing

    def _run(self, *recordings: Any, **options: Any) -> Any:
        """Submit, let the host go on beside it, and wait for the end that the model says."""
        began = time.perf_counter()
        assert self._routing is not None
        hits = int(self._cache.residency.hits(self._routing).sum())
        self.n_hits += hits
        self.n_uses += self._routing.size
        done = self._real_run(*recordings, **options)
        if self._is_timed:
            n_bytes = int((self._routing.size - hits) * self._expert_bytes)
            self._link.carry(n_bytes, since=began + self._compute_s)
        return done
