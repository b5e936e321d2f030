"""How large the host pool is: all experts, what --host-pool says, or what host memory allows.

Pure; a part of `plan`. How many places some bytes make is the subject of pool_places.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkmoe.config import EngineConfig, parse_size
from vkmoe.errors import OutOfMemoryError, UsageError, VkmoeError
from vkmoe.facts import DeviceInfo, PlanLine
from vkmoe.placement.allocations import heap_of
from vkmoe.placement.expert_facts import PoolRoom
from vkmoe.placement.pool_places import least_places, most_places, places_bytes
from vkmoe.placement.slots import SlotLayout
from vkmoe.placement.words import in_mib, size_option

__all__ = ["READING_BYTES", "HostPool", "PoolPlanner"]

# What reading from the file takes: threads (loaded.py) times staging (span_reader.py).
READING_BYTES = 4 << 20


@dataclass(frozen=True)
class HostPool:
    """What was decided. `places` of each size of expert; () where there is one for each expert."""

    places: tuple[int, ...]
    n_bytes: int  # as they are allocated, at most
    n_all: int  # experts of the model
    reason: str = ""

    @property
    def taken_bytes(self) -> int:
        """Bytes of all its lines."""
        return self.n_bytes + READING_BYTES * bool(self.places)

    @property
    def share(self) -> str:
        """In words: how many experts it holds."""
        return f"{sum(self.places):,} of {self.n_all:,} experts" if self.places else "all experts"

    def lines(self, device: DeviceInfo, home_reason: str) -> tuple[PlanLine, ...]:
        """The plan's lines; `home_reason` says what a pool of all experts is good for."""
        heap = heap_of(device, "host")
        reason = self.reason if self.places else home_reason
        pool = PlanLine(f"host pool, {self.share}", "host", self.n_bytes, reason, heap)
        if not self.places:
            return (pool,)
        reading = "rows laid out anew; the file's own pages are dropped behind"
        return pool, PlanLine("reading from the file", "host", READING_BYTES, reading, heap)


class PoolPlanner:
    """Decides for experts of known sizes; `total` are the bytes of a pool of all of them."""

    def __init__(self, config: EngineConfig, layout: SlotLayout, total: int) -> None:
        self._layout, self._total = layout, total
        self._text = config.host_pool.strip() if config.host_pool is not None else ""
        self._asked = parse_size(self._text, "--host-pool") if self._text else None

    @property
    def wants_few(self) -> bool:
        """Whether a pool was asked for that does not hold all experts."""
        return self._asked is not None and self._asked < self._total

    @property
    def all(self) -> HostPool:
        """A pool of all experts."""
        return HostPool((), self._total, self._layout.n_experts * len(self._layout.span_bytes))

    @property
    def least_bytes(self) -> int:
        """Of the smallest pool there can be, and what reading takes."""
        return self._least_bytes + READING_BYTES

    def decide(self, room: PoolRoom) -> HostPool:
        """Raises OutOfMemoryError or UsageError where not even the experts of a token fit."""
        if self._asked is None and self._total <= room.unasked:
            return self.all
        if self._asked is not None:
            n_bytes = min(self._asked, self._total)
            if n_bytes + READING_BYTES * self.wants_few > room.most:
                raise self._too_much(n_bytes, room)
            if n_bytes == self._total:
                return self.all
            places, reason = self._most(n_bytes), "as --host-pool"
        else:
            places = self._most(room.unasked - READING_BYTES)
            if places is None and self.least_bytes <= room.most:
                places = least_places(self._layout.span_bytes, self._layout.n_used)
            reason = "what host memory allows"
        if places is None:
            raise self._too_little(room)
        n_bytes = places_bytes(self._layout.device, places, self._layout.span_bytes)
        reason += "; the others are read from the file"
        return HostPool(places, n_bytes, self.all.n_all, reason)

    def _most(self, n_bytes: int) -> tuple[int, ...] | None:
        layout = self._layout
        sizes, n_experts, n_used = layout.span_bytes, layout.n_experts, layout.n_used
        return most_places(layout.device, n_bytes, sizes, n_experts, n_used)

    @property
    def _least_bytes(self) -> int:
        layout = self._layout
        places = least_places(layout.span_bytes, layout.n_used)
        return places_bytes(layout.device, places, layout.span_bytes)

    def _too_much(self, n_bytes: int, room: PoolRoom) -> OutOfMemoryError:
        largest = size_option(room.most - READING_BYTES, at_most=True)
        return OutOfMemoryError(
            f"--host-pool {self._text} needs {in_mib(n_bytes)}; {in_mib(room.most)} of host memory "
            "can be used for experts",
            f"use --host-pool {largest} or less, or leave it out"
            if room.most >= self.least_bytes
            else "close other programs, or choose a smaller model or quantisation",
        )

    def _too_little(self, room: PoolRoom) -> VkmoeError:
        least, n_used = size_option(self._least_bytes, at_most=False), self._layout.n_used
        needs = (
            f"the {n_used} experts of a layer that a token uses need {in_mib(self._least_bytes)}"
        )
        if self._asked is not None:
            return UsageError(
                f"--host-pool {self._text} is too small: {needs}",
                f"use --host-pool {least} or more",
            )
        return OutOfMemoryError(
            f"{needs} of host memory, the least --host-pool there can be; {in_mib(room.most)} can "
            "be used",
            "close other programs, or choose a smaller model or quantisation",
        )
