"""A cache over real device memory whose "submits" are read by the host, early and late.

Owns slow and failing uploads, and a reader that stands for a submit in flight: it looks experts up
in the table version it was given and checks their bytes when it begins and again when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter_ns

import numpy as np
import pytest
from numpy.typing import NDArray

from vkmoe.closing import Closing
from vkmoe.errors import GpuError
from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.residency import NOTHING_KNOWN, PoolResidency, Residency
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec
from vkmoe.experts.store.cache import CacheMemory, CacheWays, ExpertCache
from vkmoe.experts.store.copies import Copy, QueueFullError, Upload, Uploader, Uploads
from vkmoe.experts.store.slots import SlotManager
from vkmoe.experts.store.table import AT_HOME, N_VERSIONS, ExpertTable
from vkmoe.experts.store.tier import HostPool
from vkmoe.gpu.arena import Arena, Placement, lay_out_spans
from vkmoe.gpu.device import Device
from vkmoe.gpu.transfer import Transfer

Routing = NDArray[np.uint32]


@dataclass
class DelayedUploads:
    """A second queue that is slow: bytes arrive only after `delay` questions whether they have.

    `failures` counts down: as long as it is positive, an upload fails; at its start with
    `fail_at_start`, otherwise when it is waited for. At most `room` can be under way.
    """

    real: Uploader
    delay: int = 0
    failures: int = 0
    fail_at_start: bool = False
    error: type[BaseException] = GpuError
    copied: list[Copy] = field(default_factory=list)
    room: int | None = None
    n_begun: int = 0

    def start(self, copies: Sequence[Copy], urgent: bool = False) -> Upload:
        if self.room is not None and self.n_begun >= self.room:
            raise QueueFullError("injected", "")
        self.n_begun += 1
        if self.failures > 0 and self.fail_at_start:
            self.failures -= 1
            raise self.error("injected", "", "VK_ERROR_OUT_OF_HOST_MEMORY")
        return _Delayed(self, copies)


class _Delayed:
    def __init__(self, owner: DelayedUploads, copies: Sequence[Copy]) -> None:
        self._owner, self._copies, self._left = owner, copies, owner.delay
        self._began, self._ended = perf_counter_ns(), 0

    def done(self) -> bool:
        self._left -= 1
        return self._left < 0

    def wait(self) -> None:
        self._owner.n_begun -= 1
        if self._owner.failures > 0:
            self._owner.failures -= 1
            raise self._owner.error("injected", "", "VK_ERROR_OUT_OF_HOST_MEMORY")
        self._owner.real.start(self._copies).wait()
        self._owner.copied += self._copies
        self._ended = perf_counter_ns()

    def cancel(self) -> bool:
        return False

    def interval(self) -> tuple[int, int] | None:
        return self._began, self._ended


class _File:
    """The model file: brings an expert's bytes into its place at once."""

    def __init__(self, content: Callable[[int], NDArray[np.uint8]], transfer: Transfer) -> None:
        self._content, self._transfer = content, transfer

    def start(self, copies: Sequence[Copy], urgent: bool = False) -> Upload:
        for number, place, n_bytes in copies:
            data = self._content(number)
            assert data.size == n_bytes
            self._transfer.write(place.buffer, place.offset, data)
        self._transfer.flush()
        return _Arrived()


class _Arrived:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def cancel(self) -> bool:
        return False

    def interval(self) -> tuple[int, int] | None:
        return None


SPACE, N_USED = KeySpace(n_layers=3, n_experts=8), 2
SIZES = [256, 768, 256]  # of the experts of each layer: two share their host slots
FULL = partial(pytest.param, marks=pytest.mark.full)


def random_routing(rng: np.random.Generator, skew: float = 1.0, first: int = 0) -> Routing:
    """Distinct ids of each layer [n_layers, n_used], those from `first` on more often."""
    weights = np.roll(1.0 / np.arange(1, SPACE.n_experts + 1) ** skew, first)
    chances = weights / weights.sum()
    rows = [rng.choice(SPACE.n_experts, N_USED, False, chances) for _ in range(SPACE.n_layers)]
    return np.stack(rows).astype(np.uint32)


class Rig(Closing):
    """A cache with tiny spans. Byte b of expert n is (7 n + b + 1) mod 251: never poison.

    With `n_host_slots`, host memory has so many for each size of expert, and a file the rest.
    """

    def __init__(
        self,
        device: Device,
        space: KeySpace,
        pools: Sequence[PoolSpec],
        settings: CacheSettings,
        delay: int | None = None,
        seed: NDArray[np.float64] | None = None,
        n_host_slots: int | None = None,
        sizes: Sequence[int] | None = None,
        n_landing: int = 0,
    ) -> None:
        """`delay` in tokens of the uploads; None is the plain way. `sizes` of each layer's experts
        where they have no slots. `n_landing` slots a layer, in which `token` stores what it misses.
        """
        self.space, self.pools = space, pools
        self.versions: dict[int, int] = {}  # of the table, that each submit reads
        self.table = ExpertTable(device, space.n_layers, space.n_experts, n_landing)
        known = {layer: pool.slot_bytes for pool in pools for layer in pool.layers}
        self.span_bytes = list(sizes or [known.get(i, 256) for i in range(space.n_layers)])
        homes = [size for size in self.span_bytes for _ in range(space.n_experts)]
        self.arena = Arena(device, "host", "homes", lay_out_spans(device.info, homes))
        self.transfer = Transfer(device, 1 << 16)
        self.homes = [
            [self._home(layer, expert) for expert in range(space.n_experts)]
            for layer in range(space.n_layers if n_host_slots is None else 0)
        ]
        self.slots = SlotManager(device, pools, poison=True, n_landing=n_landing)
        self.uploads = DelayedUploads(Uploads(device), delay or 0)
        memory = CacheMemory(self.table, self.slots, self.homes, self.span_bytes)
        self.residency = Residency(space, pools, settings, seed)
        ways = CacheWays(wait=delay is None)
        host_pools = self._host_pools(n_host_slots)
        self.host_slots = SlotManager(device, host_pools, poison=True, intent="host")
        self.file = DelayedUploads(_File(self.content, self.transfer), delay or 0)
        pool, self.hinted = None, list[int]()
        if n_host_slots is not None:
            order = PoolResidency(space, host_pools, "slru", self.residency.counts)
            here = self.residency.locations
            reads, sizes = self.file, self.span_bytes
            hint = self.hinted.append
            pool = HostPool(order, self.host_slots, reads, self.table, sizes, here, hint)
        self.cache = ExpertCache(self.residency, memory, self.uploads, ways, pool)
        self.cache.start(self.file.real.start)
        self.table.publish()

    def content(self, number: int) -> NDArray[np.uint8]:
        """The bytes of an expert."""
        n_bytes = self.span_bytes[self.space.layer(number)]
        return ((7 * number + np.arange(n_bytes) + 1) % 251).astype(np.uint8)

    def token(self, routing: Routing) -> NDArray[np.bool_]:
        """One token: its submit begins, reads, ends. Checks everything; returns the hits."""
        reader = self.begin()
        self.read(reader, routing)
        self.cache.meanwhile()
        hits = self.end(reader, routing)
        self.cache.check_integrity()
        return hits

    def run(self, routing: Routing) -> None:
        """One token in the engine's order: copies that it began may wait until the next one."""
        self.cache.decide(NOTHING_KNOWN)
        reader = self.begin()
        self.read(reader, routing)
        self.cache.meanwhile()
        self.read(reader, routing)
        filled = self._land(reader, routing)[None] if self.table.landing.size else None
        self.table.end(reader)
        self.cache.after_run(routing[None], filled)
        self.cache.check_integrity()

    def stepped_token(self, routing: Routing) -> NDArray[np.bool_]:
        """One token whose layers are a submit each, with a look at the routing before it."""
        self.table.end(self.begin())
        for layer in range(self.space.n_layers):
            self.cache.need(layer, routing[layer][None])
            reader = self.begin(first=False)
            self.read(reader, routing, [layer])
            self.cache.meanwhile()
            self.read(reader, routing, [layer])
            self.table.end(reader)
        hits: NDArray[np.bool_] = self.over(routing[None])[0]
        self.cache.check_integrity()
        return hits

    def begin(self, first: bool = True) -> int:
        reader = self.cache.begin(first)
        self.versions[reader] = self.table.version
        return reader

    def end(self, reader: int, routing: Routing) -> NDArray[np.bool_]:
        self.read(reader, routing)
        filled = self._land(reader, routing)[None] if self.table.landing.size else None
        self.table.end(reader)
        hits: NDArray[np.bool_] = self.over(routing[None], filled)[0]
        return hits

    def over(self, routing: Routing, filled: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
        """A run [n_tokens, n_layers, n_used] is over: it is learned from and decided on."""
        hits: NDArray[np.bool_] = self.cache.after_run(routing, filled)
        self.cache.decide(NOTHING_KNOWN)
        return hits

    def read(self, reader: int, routing: Routing, layers: Sequence[int] | None = None) -> None:
        """What a submit reads now, through its version: of all experts used, the right bytes."""
        version = self.versions[reader]
        table, _ = self._tables(version)
        by_address = {slot.address: slot.memory for slot in (*self.slots.all, *self.host_slots.all)}
        by_address |= {home.address: home for row in self.homes for home in row}
        for layer, row in enumerate(routing.tolist()):
            for expert in row if layers is None or layer in layers else ():
                number = layer * self.space.n_experts + expert
                place = by_address[int(table[layer, expert]) & ~AT_HOME]
                found = self._bytes(place, 0, self.span_bytes[layer])
                assert (found == self.content(number)).all(), (version, layer, expert, found[:4])

    def _land(self, reader: int, routing: Routing) -> NDArray[np.bool_]:
        """Store what is at home where it is to land, as kernels do; returns what was stored."""
        entries, landing = self._tables(self.versions[reader])
        places = {slot.address: slot.memory for slot in self.slots.all}
        filled = np.zeros(routing.shape, np.bool_)
        for layer, row in enumerate(routing.tolist()):
            at_home = [i for i, expert in enumerate(row) if entries[layer, expert] & AT_HOME]
            for i, address in zip(at_home, landing[layer].tolist(), strict=False):
                if address:
                    data = self.content(layer * self.space.n_experts + row[i])
                    self.transfer.write(places[address].buffer, places[address].offset, data)
                    filled[layer, i] = True
        self.transfer.flush()
        return filled

    def _tables(self, version: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Entries and landing places of a version in the device's memory."""
        shapes = self.table.entries.shape, self.table.landing.shape
        n_entries, n_landing = self.table.entries.size, self.table.landing.size
        n_bytes = 8 * (n_entries + n_landing)
        raw = self._bytes(self.table_place(), (version % N_VERSIONS) * n_bytes, n_bytes)
        words = raw.view(np.uint64)
        return words[:n_entries].reshape(shapes[0]), words[n_entries:].reshape(shapes[1])

    def table_place(self) -> Placement:
        buffer = self.table._buffer
        return Placement(buffer, 0, buffer.address)

    def close(self) -> None:
        for part in (self.table, self.slots, self.host_slots, self.transfer, self.arena):
            part.close()

    def _host_pools(self, n_slots: int | None) -> tuple[PoolSpec, ...]:
        """Host slots for each size of expert, shared by the layers that have it."""
        if n_slots is None:
            return ()
        found = []
        for size in dict.fromkeys(self.span_bytes):
            layers = tuple(i for i, other in enumerate(self.span_bytes) if other == size)
            found.append(PoolSpec(layers, n_slots, 0, size))
        return tuple(found)

    def _home(self, layer: int, expert: int) -> Placement:
        place = self.arena.place(self.span_bytes[layer])
        self.transfer.write(place.buffer, place.offset,
                            self.content(layer * self.space.n_experts + expert))  # fmt: skip
        self.transfer.flush()
        self.table.set(layer, expert, place.address)
        return place

    def _bytes(self, place: Placement, offset: int, n_bytes: int) -> NDArray[np.uint8]:
        start = place.offset + offset
        if place.buffer.mapped:
            return place.buffer.view()[start : start + n_bytes]
        return self.transfer.read(place.buffer, start, n_bytes)


MakeRig = Callable[..., Rig]  # as store/conftest.py makes one
