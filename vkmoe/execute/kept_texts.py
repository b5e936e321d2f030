"""Keeps texts that leave the KV cache in host memory, so that they come back by a copy.

It owns that memory, which is taken as it is needed, and decides which text leaves it. The plan says
how much there is at most; what other programs, or a longer context, need goes first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vkmoe.batch import TextForm
from vkmoe.closing import Closing
from vkmoe.cpu.host_memory import available_bytes
from vkmoe.errors import OutOfMemoryError
from vkmoe.execute.region_rows import Piece, RegionRows, blocks_of
from vkmoe.gpu.device import Device
from vkmoe.interrupts import works_at_checkpoints
from vkmoe.placement.memory import host_budget

if TYPE_CHECKING:
    from vkmoe.gpu._native import Buffer

# Memory comes in blocks of one size, so that what one text leaves serves the next. Devices allow
# some thousand allocations.
MOST_BLOCKS, LEAST_BLOCK = 1024, 64 << 10
MOST_STOPS = 4  # positions at which a text can go on: each may take as much as thousands of rows


class KeptText:
    """Is a text in host memory, until that is needed for others."""

    def __init__(self, owner: KeptTexts, form: TextForm, blocks: list[Buffer]) -> None:
        self._owner, self.form, self.blocks = owner, form, blocks
        self.is_spared = False  # no other text may take its place

    @property
    def n_positions(self) -> int:
        """Return how many positions of a region it has rows of."""
        return self.form.n_positions

    @property
    def n_bytes(self) -> int:
        """Count the bytes of memory that it takes."""
        return len(self.blocks) * self._owner.block_bytes

    @property
    def is_there(self) -> bool:
        """Say whether its memory was not needed for others."""
        return bool(self.blocks)

    @works_at_checkpoints
    def bring_back(self, region: int, n_positions: int, n_least: int) -> int:
        """Make a region hold the first positions of this text, and no others.

        Returns how many: fewer where the state cannot stop just there. Nothing is copied, and 0
        returned, if they are fewer than `n_least`. Raises DeviceLostError. Must hold: it is there,
        the region has room for so many, and no submit is in flight.
        """
        return self._owner.bring_back(self, region, n_positions, n_least)

    def drop(self) -> None:
        """Let other texts have its memory. May be called again. Mutates."""
        self._owner.drop(self)


class KeptTexts(Closing):
    """Owns the memory of kept texts, `n_most` bytes at most.

    The text that was unused for longest goes first.
    """

    def __init__(self, device: Device, rows: RegionRows, n_most: int) -> None:
        self._device, self._rows = device, rows
        self.block_bytes = max(LEAST_BLOCK, 1 << (n_most // MOST_BLOCKS).bit_length() >> 1)
        self._n_most = n_most // self.block_bytes  # blocks
        self._texts: list[KeptText] = []  # the one unused for longest first
        self._free: list[Buffer] = []

    @property
    def n_bytes(self) -> int:
        """Count the bytes that are taken now."""
        return self._n_blocks * self.block_bytes

    @works_at_checkpoints
    def keep(self, region: int, n_positions: int) -> KeptText | None:
        """Copy the first positions of a region; return None where memory has no room for them.

        They are fewer where the state cannot stop just there. Raises DeviceLostError. Must hold: no
        submit is in flight.
        """
        form = self._rows.form(region, n_positions, MOST_STOPS)
        if not form.n_positions or not self._n_most:
            return None
        n_bytes = self._rows.n_bytes(form)
        blocks = self._room(-(-n_bytes // self.block_bytes))
        if blocks is None:
            return None
        text = KeptText(self, form, blocks)
        self._texts.append(text)
        self._copy(text, self._rows.pieces(region, form), back=False)
        return text

    def bring_back(self, text: KeptText, region: int, n_positions: int, n_least: int) -> int:
        """Do what `KeptText.bring_back` says."""
        assert text.is_there
        n_positions = text.form.stop(n_positions)
        if n_positions < max(1, n_least):
            return 0
        self._copy(text, self._rows.places(region, text.form, n_positions), back=True)
        self._rows.landed(region, text.form, n_positions)
        self._texts.remove(text)
        self._texts.append(text)
        return n_positions

    def drop(self, text: KeptText) -> None:
        """Let other texts have the memory of one."""
        if text.is_there:
            self._texts.remove(text)
            self._free += text.blocks
            text.blocks = []

    def missing(self) -> int:
        """Say how many bytes other programs lack of host memory, that texts can give back.

        They may use half of what vkmoe leaves to them, before they get all of it.
        """
        if not self._n_blocks:
            return 0
        free = available_bytes()
        left = free + self.n_bytes - host_budget(free + self.n_bytes)
        return left - free if free < left // 2 else 0

    def give_back(self, n_bytes: int) -> int:
        """Free so many bytes, or all; return how many these were. Mutates."""
        before = self.n_bytes
        self.fit(before - n_bytes)
        return before - self.n_bytes

    def fit(self, n_bytes: int) -> None:
        """Take no more than so many bytes from now on, until texts are kept again. Mutates."""
        while self.n_bytes > max(0, n_bytes):
            if not self._free:
                self.drop(self._texts[0])
            self._free.pop().close()

    def close(self) -> None:
        """Free all. May be called twice."""
        self.fit(0)

    # ----- inside -----

    @property
    def _n_blocks(self) -> int:
        return len(self._free) + sum(len(text.blocks) for text in self._texts)

    def _room(self, n_blocks: int) -> list[Buffer] | None:
        """Find so many blocks: free ones, new ones, or those of texts unused for longest."""
        leaving = [text for text in self._texts if not text.is_spared]
        n_new = max(0, min(n_blocks - len(self._free), self._n_most - self._n_blocks))
        if n_new:
            n_new = min(n_new, host_budget(available_bytes()) // self.block_bytes)
        n_found = len(self._free) + n_new + sum(len(text.blocks) for text in leaving)
        if n_found < n_blocks or not self._allocate(n_new):
            return None
        for text in leaving:
            if len(self._free) < n_blocks:
                self.drop(text)
        found, self._free = self._free[:n_blocks], self._free[n_blocks:]
        return found

    def _allocate(self, n_blocks: int) -> bool:
        """Take so many blocks more; return whether they were there."""
        try:
            for _ in range(n_blocks):
                block = self._device.allocate("readback", self.block_bytes, "kept texts")
                self._free.append(block)
        except OutOfMemoryError:
            self._n_most = self._n_blocks  # as many as there are
            return False
        return True

    def _copy(self, text: KeptText, pieces: list[Piece], back: bool) -> None:
        """Copy pieces of a region to a text's blocks, or `back`."""
        n_bytes = len(text.blocks) * self.block_bytes
        blocks = blocks_of(pieces, n_bytes, self.block_bytes)
        with self._device.recorded("copying rows to host memory, or back") as recorder:
            for block, (_, parts) in zip(text.blocks, blocks, strict=True):
                for offset, (buffer, first, n) in parts:
                    if back:
                        recorder.copy(block, offset, buffer, first, n)
                    else:
                        recorder.copy(buffer, first, block, offset, n)
