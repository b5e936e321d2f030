"""A link slower than this machine's, by injection: misses and copies wait as if they crossed it.

`throttle` slows an engine whose kernels compute: its misses are waited for after the submit.
`SlowPrompts` does so for prompts: what is between two barriers runs beside what it moves.

For CPU devices, where experts in host memory cost no more than those in slots. The bytes still move
at once; what is added is the time they would take. Misses are waited for after the token's submit,
on the engine's thread; copies by whoever waits for them, which is the copying thread where there is
one. Both share the link's speed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkmoe.engine import Engine
from vkmoe.execute import recorder
from vkmoe.execute.segments import Part
from vkmoe.experts.store.cache import ExpertCache
from vkmoe.experts.store.copies import Copy, Prefetcher, Upload, Uploader
from vkmoe.gpu.hazards import plan_barriers
from vkmoe.gpu.link_speed import LinkSpeed
from vkmoe.gpu.program import Command, Dispatch
from vkmoe.gpu.transfer import Readback
from vkmoe.kernels.matmul.operations import TILE_HEADER_WORDS
from vkmoe.kernels.memory.operations import UNIT_BYTES

# The word of its pushed constants in which a kernel has the number of its round.
_ROUND_WORDS = {"expert_matmul_gate_up": 10, "expert_matmul_down": 8}
SLICE_S = 0.001  # what one of those who share the link sends before it is the other's turn


class SlowLink:
    """Carries so many bytes per second, for all threads together."""

    def __init__(self, bytes_per_second: float) -> None:
        assert bytes_per_second > 0
        self.bytes_per_second = bytes_per_second
        self.n_bytes = 0  # carried
        self._lock = threading.Lock()
        self._end = 0.0  # when it is free again

    def carry(self, n_bytes: int, since: float | None = None) -> None:
        """Wait as long as these bytes take, in turns with others' bytes; from `since` on."""
        ready = time.perf_counter() if since is None else since
        slice_bytes = max(1, int(self.bytes_per_second * SLICE_S))
        for start in range(0, n_bytes, slice_bytes):
            size = min(slice_bytes, n_bytes - start)
            with self._lock:
                # From when it was ready, not from now: sleeping too long must not slow the link.
                ready = max(ready, self._end) + size / self.bytes_per_second
                self._end = ready
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
    span_bytes = np.array(cache._span_bytes)
    _slow_copies(cache, link)
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


def _slow_copies(cache: ExpertCache, link: SlowLink) -> None:
    """Let the copies to slots cross `link`."""
    uploads = cache._tier.uploads
    if isinstance(uploads, Prefetcher):
        uploads._uploads = SlowUploads(uploads._uploads, link)
    else:
        cache._tier.uploads = SlowUploads(uploads, link)


class SlowPrompts:
    """Lets what prompts of an engine bring, and read at home, cross a slow link.

    Programs of prompts are cut at every barrier. What lies between two runs on the device while the
    link carries the bytes that it asks for; what follows waits for both. Chunks have as many rows
    as there can be, and programs of prompts are recorded anew.
    """

    def __init__(self, engine: Engine, link: SlowLink) -> None:
        assert engine.plan.executor == "fused"
        self._link, self._programs, backend = link, engine._programs, engine._backend
        space, self._decoder = engine.workspace, self._programs._recorder.decoder
        assert space.prompt is not None and space.prompt.routed is not None
        tiles, brought = space.prompt.routed.tiles, space.prompt.routed.brought
        self._tiles = Readback(engine.device, backend.tensor(tiles), 0, tiles.n_bytes)
        self._brought = Readback(engine.device, backend.tensor(brought), 0, brought.n_bytes)
        tier = engine.cache._tier if engine.cache is not None else None
        self._slots = tier.slots.addresses if tier is not None else np.zeros(0, np.uint64)
        self._programs._fits_chunks = False
        self._programs.prompt_rows = space.row_sizes["prompt"][-1]
        vars(recorder)["cut_at_marks"] = cut_at_barriers
        for kind in [kind for kind in self._programs.recorded if kind.phase == "prompt"]:
            del self._programs.recorded[kind]
        if engine.cache is not None:
            _slow_copies(engine.cache, link)
        self._run_now = backend.run
        backend.run = self._run  # type: ignore[method-assign]

    def close(self) -> None:
        self._tiles.close()
        self._brought.close()

    def _run(self, *recordings: Any, meanwhile: Any = None, **options: Any) -> list[Any]:
        """Run one part after the other, each beside its bytes."""
        done = []
        for recording in recordings:
            began = time.perf_counter()
            done += self._run_now(recording, meanwhile=meanwhile, **options)
            meanwhile = None
            self._link.carry(self._n_bytes(recording), since=began)
        return done

    def _n_bytes(self, recording: Any) -> int:
        """The bytes that a part moves over the link."""
        for recorded in self._programs.recorded.values():
            for segment in recorded.segments if recorded.stand_alone else ():
                if segment.recording is recording:
                    return sum(map(self._of_command, segment.program.commands))
        return 0

    def _of_command(self, command: Command) -> int:
        if not isinstance(command, Dispatch):
            return 0
        push = np.frombuffer(command.push, np.uint32)
        if command.kernel == "bring_experts":
            first, _, n_units = push.tolist()
            homes = self._brought.read().view(np.uint64).reshape(-1, 2)[:, 0]
            n_brought = np.count_nonzero(homes[first : first + command.groups[2]])
            return int(UNIT_BYTES * n_units * n_brought)
        if command.kernel not in _ROUND_WORDS or push[_ROUND_WORDS[command.kernel]]:
            return 0
        assert command.mark.layer is not None
        block = self._decoder.weights.layers[command.mark.layer].feed_forward.block
        gate_up, n_bytes = block.shape.down.offset, block.shape.span_bytes
        part = gate_up if command.kernel == "expert_matmul_gate_up" else n_bytes - gate_up
        return part * self._n_tiles_at_home()

    def _n_tiles_at_home(self) -> int:
        """The tiles of round 0 whose experts are in no slot: each reads its expert anew."""
        words = self._tiles.read().view(np.uint32)
        tiles = words[TILE_HEADER_WORDS:].view(np.uint64).reshape(-1, 2)[words[0] : words[1], 0]
        return int((~np.isin(tiles, self._slots)).sum())


def cut_at_barriers(commands: Sequence[Command]) -> list[Part]:
    """Cut commands wherever a barrier comes between them."""
    ends = [i for i, barrier in enumerate(plan_barriers(commands)) if barrier and i]
    return [Part(list(commands[a:b])) for a, b in pairwise([0, *ends, len(commands)])]
