"""Moves bytes between NumPy and GPU memory: directly where memory is mapped, else through staging.

Owns the staging buffers. Does not decide what goes where.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from vkmoe.closing import Closing
from vkmoe.gpu.device import Device, translate_errors

if TYPE_CHECKING:
    from vkmoe.gpu import _native

Bytes = NDArray[np.uint8]
N_LANES, STAGING_BYTES = 2, 16 << 20
COPY_ALIGNMENT = 16  # of what is copied, in the staging buffer; drivers copy such bytes fastest


class Transfer(Closing):
    """Writes to and reads from device memory.

    Staged bytes are sent when a staging buffer is full, or by `flush`: small writes share a submit.
    """

    def __init__(
        self, device: Device, staging_bytes: int = STAGING_BYTES, force_staging: bool = False
    ) -> None:
        """Take the staged path on mapped memory too if `force_staging` is set (tests)."""
        self._device, self._staging_bytes = device, staging_bytes
        self._force_staging = force_staging
        self._lanes: list[_Lane] = []
        self._filling: _Lane | None = None  # has bytes that were not sent yet

    def view(self, target: _native.Buffer | _native.Tensor) -> Bytes | None:
        """View all bytes of `target` in place, as `write` finds them; None if it is not mapped."""
        if self._force_staging or not getattr(target, "mapped", False):  # of a tensor not known
            return None
        return cast("_native.Buffer", target).view()

    def write(self, target: _native.Buffer | _native.Tensor, offset: int, data: Bytes) -> None:
        """Write bytes at `offset`, and no others. Visible to the next submit after `flush()`."""
        view = self.view(target)
        if view is not None:
            view[offset : offset + data.size] = data
            return
        for start in range(0, data.size, self._staging_bytes):
            piece = data[start : start + self._staging_bytes]
            if self._filling is None or not self._filling.takes(target, offset + start, piece.size):
                self._send()
                self._filling = self._free_lane()
            self._filling.add(target, offset + start, piece)

    def flush(self) -> None:
        """Wait until everything written has arrived."""
        self._send()
        for lane in self._lanes:
            lane.wait()

    def read(self, source: _native.Buffer | _native.Tensor, offset: int, n_bytes: int) -> Bytes:
        """Read bytes back (a copy). Never reads device-local memory through a mapping."""
        self._send()
        readback = Readback(self._device, source, offset, n_bytes)
        data = readback.read()
        readback.close()  # not after Ctrl-C: the copy may still be under way
        return data

    def close(self) -> None:
        self.flush()
        for lane in self._lanes:
            lane.close()
        self._lanes.clear()

    def _send(self) -> None:
        """Send what waits in the lane that is being filled."""
        lane, self._filling = self._filling, None
        if lane is not None:
            lane.send()

    def _free_lane(self) -> _Lane:
        """Return an empty lane, made at first use: while one is on its way, the other is filled."""
        if len(self._lanes) < N_LANES:
            lane = _Lane(self._device, self._staging_bytes)
        else:
            lane = self._lanes.pop(0)  # the one sent longest ago
            lane.wait()
        self._lanes.append(lane)
        return lane


class Readback(Closing):
    """Reads the same bytes again and again, by a copy recorded once. Raises GpuErrors."""

    def __init__(
        self, device: Device, source: _native.Buffer | _native.Tensor, offset: int, n_bytes: int
    ) -> None:
        self._device, self._n_bytes = device, n_bytes
        self._buffer = device.allocate("readback", max(n_bytes, 4), "readback")
        try:
            with translate_errors("reading GPU memory"):
                recorder = device.native.recorder()
                recorder.copy(source, offset, self._buffer, 0, n_bytes)
                self._recording: _native.Recording | None = recorder.finish()
        except BaseException:
            self._buffer.close()
            raise

    def read(self) -> Bytes:
        """Read the bytes as they are now (a copy). No submit may be in flight that writes them."""
        assert self._recording is not None, "closed"
        with translate_errors("reading GPU memory"):
            self._device.native.submit(self._recording).wait()
            self._buffer.invalidate(0, self._n_bytes)
        return self._buffer.view()[: self._n_bytes].copy()

    def close(self) -> None:
        self._recording = None
        self._buffer.close()


class _Lane:
    """Owns one staging buffer: the copies that wait in it for a common submit, or are in flight."""

    def __init__(self, device: Device, n_bytes: int) -> None:
        self._device = device
        self._buffer = device.allocate("host", n_bytes, "staging")
        self._submission: _native.Submission | None = None
        self._view = self._buffer.view()
        self._copies: list[tuple[_native.Buffer | _native.Tensor, int, int, int]] = []
        self._ends: dict[int, int] = {}  # by the target's identity: behind its last byte written
        self._used = 0

    def takes(self, target: _native.Buffer | _native.Tensor, offset: int, n_bytes: int) -> bool:
        """Say whether these bytes may join those that wait here.

        There must be room, and the copies of one submit have no order, so no two may write the same
        bytes: a target is written upwards only.
        """
        has_room = self._used + n_bytes <= self._view.size
        return has_room and offset >= self._ends.get(id(target), 0)

    def add(self, target: _native.Buffer | _native.Tensor, offset: int, data: Bytes) -> None:
        """Keep a copy of `data` for the next `send`. `takes` must hold."""
        self._view[self._used : self._used + data.size] = data
        self._copies.append((target, offset, self._used, data.size))
        self._ends[id(target)] = offset + data.size
        self._used += -(-data.size // COPY_ALIGNMENT) * COPY_ALIGNMENT

    def send(self) -> None:
        """Submit all copies that wait, as one."""
        with translate_errors("uploading"):
            recorder = self._device.native.recorder()
            for target, offset, start, n_bytes in self._copies:
                recorder.copy(self._buffer, start, target, offset, n_bytes)
            self._submission = self._device.native.submit(recorder.finish())
        self._copies.clear()
        self._ends.clear()
        self._used = 0

    def wait(self) -> None:
        if self._submission is not None:
            with translate_errors("uploading"):
                self._submission.wait()
            self._submission = None

    def close(self) -> None:
        del self._view
        self._buffer.close()
