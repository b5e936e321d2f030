"""Keeps copies of states in host memory, so that a text can go back to where it was.

A state is what holds for one position alone: what recurrent layers keep, and windows in rings. It
is copied before the last token of a prompt, where the next prompt of a conversation goes on, and
now and then within a long one. A copy is used at its own position only: what comes between that
and where a text wants to go on is computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vkmoe.closing import Closing
from vkmoe.errors import OutOfMemoryError
from vkmoe.gpu.device import Device
from vkmoe.models.kv_caches import KvCaches

if TYPE_CHECKING:
    from vkmoe.gpu._native import Buffer

COPIED_EVERY = 1024  # tokens of a prompt


@dataclass(eq=False)
class _Copy:
    """Holds a state that a region had when `position` was its next one."""

    region: int
    position: int
    buffer: Buffer = field(repr=False)


class StateCopies(Closing):
    """Holds copies for all regions, `n_most` in all; the one unused for longest goes first.

    A copy is of the text that a region holds now: `forget` drops those behind where it changes.
    """

    def __init__(self, device: Device, caches: KvCaches, n_most: int) -> None:
        self._device, self._caches = device, caches
        self.n_most = n_most if caches.saved_bytes else 0
        self._copies: list[_Copy] = []  # the one unused for longest first
        self._free: list[Buffer] = []

    def last(self, region: int, position: int) -> int:
        """Return the last position up to `position` at which a region can go on; 0: its begin."""
        return max((copy.position for copy in self._of(region, position)), default=0)

    def take(self, region: int, position: int) -> None:
        """Copy the state of a region whose next position this is, where it lies on the device.

        Without memory for it nothing is copied. Must hold: no submit is in flight. Raises
        DeviceLostError.
        """
        if self.last(region, position) == position:
            return
        buffer = self.put(region, position)
        if buffer is not None:
            self._caches.save_state(region, position, buffer)

    def put(self, region: int, position: int) -> Buffer | None:
        """Find memory for a copy of a region at a position, which the caller fills. Mutates.

        Another copy may go for it. Must hold: there is none at this position. Returns None without
        memory for it.
        """
        buffer = self._room() if self.n_most else None
        if buffer is not None:
            self._copies.append(_Copy(region, position, buffer))
        return buffer

    def of(self, region: int) -> dict[int, Buffer]:
        """Return the copies of a region by their positions."""
        return {copy.position: copy.buffer for copy in self._copies if copy.region == region}

    def restore(self, source: int, position: int, target: int) -> None:
        """Give a region the state that another one, or itself, had at a position. Raises
        DeviceLostError. Must hold: there is a copy, and no submit is in flight."""
        (copy,) = (copy for copy in self._of(source, position) if copy.position == position)
        self._copies.remove(copy)
        self._copies.append(copy)
        self._caches.restore_state(target, position, copy.buffer)

    def forget(self, region: int, position: int) -> None:
        """Drop the copies of a region behind a position: another text follows there."""
        for copy in [copy for copy in self._copies if copy.region == region]:
            if copy.position > position:
                self._copies.remove(copy)
                self._free.append(copy.buffer)

    def close(self) -> None:
        """Free all."""
        for buffer in (*self._free, *(copy.buffer for copy in self._copies)):
            buffer.close()
        self._free.clear()
        self._copies.clear()

    def _of(self, region: int, position: int) -> list[_Copy]:
        ours = (copy for copy in self._copies if copy.region == region)
        return [copy for copy in ours if copy.position <= position]

    def _room(self) -> Buffer | None:
        """Find memory for a copy: some that is free, new one, or that of the oldest copy."""
        if self._free:
            return self._free.pop()
        if len(self._copies) < self.n_most:
            try:
                return self._device.allocate("readback", self._caches.saved_bytes, "copied states")
            except OutOfMemoryError:
                self.n_most = len(self._copies)  # as many as there are
        return self._copies.pop(0).buffer if self._copies else None
