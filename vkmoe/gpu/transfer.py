"""Moves bytes between NumPy and GPU memory: directly where memory is mapped, through staging where
not.

Owns the staging buffers. Does not decide what goes where.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vkmoe.closing import Closing
from vkmoe.gpu.device import Device, translate_errors

if TYPE_CHECKING:
    from vkmoe.gpu import _native

__all__ = ["Readback", "Transfer"]

Bytes = NDArray[np.uint8]
STAGING_BYTES = 16 << 20


class Transfer(Closing):
    """Writes to and reads from device memory. Close it (or leave its `with`) to free the
    staging.
    """

    def __init__(
        self, device: Device, staging_bytes: int = STAGING_BYTES, force_staging: bool = False
    ) -> None:
        """`force_staging` takes the staged path on mapped memory too (tests)."""
        self._device = device
        self._staging_bytes = staging_bytes
        self._force_staging = force_staging
        self._lanes: list[_Lane] = []
        self._next_lane = 0

    def view(self, target: _native.Buffer | _native.Tensor) -> Bytes | None:
        """All its bytes in place, as `write` finds them; None where they are not mapped."""
        from vkmoe.gpu import _native

        if self._force_staging or not isinstance(target, _native.Buffer) or not target.mapped:
            return None
        return target.view()

    def write(self, target: _native.Buffer | _native.Tensor, offset: int, data: Bytes) -> None:
        """Write bytes at `offset`, and no others. Visible to the next submit after `flush()`."""
        view = self.view(target)
        if view is not None:
            view[offset : offset + data.size] = data
            return
        for start in range(0, data.size, self._staging_bytes):
            piece = data[start : start + self._staging_bytes]
            lane = self._free_lane()
            lane.view[: piece.size] = piece
            lane.send(target, offset + start, piece.size)

    def flush(self) -> None:
        """Wait until everything written has arrived."""
        for lane in self._lanes:
            lane.wait()

    def read(self, source: _native.Buffer | _native.Tensor, offset: int, n_bytes: int) -> Bytes:
        """Read bytes back (a copy). Never reads device-local memory through a mapping."""
        readback = Readback(self._device, source, offset, n_bytes)
        data = readback.read()
        readback.close()  # not after Ctrl-C: the copy may still be under way
        return data

    def close(self) -> None:
        self.flush()
        for lane in self._lanes:
            lane.close()
        self._lanes.clear()

    def _free_lane(self) -> _Lane:
        """The staging half whose copy was sent longest ago, made at first use."""
        if len(self._lanes) < 2:
            self._lanes.append(_Lane(self._device, self._staging_bytes))
            return self._lanes[-1]
        lane = self._lanes[self._next_lane]
        self._next_lane = 1 - self._next_lane
        lane.wait()
        return lane


class Readback(Closing):
    """Reads the same bytes again and again: one buffer, and a copy recorded once.

    Raises OutOfMemoryError and other GpuErrors when made or read.
    """

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
        """The bytes as they are now (a copy). No submit may be in flight that writes them."""
        assert self._recording is not None, "closed"
        with translate_errors("reading GPU memory"):
            self._device.native.submit(self._recording).wait()
            self._buffer.invalidate(0, self._n_bytes)
        return self._buffer.view()[: self._n_bytes].copy()

    def close(self) -> None:
        self._recording = None
        self._buffer.close()


class _Lane:
    """One staging buffer and the copy in flight from it."""

    def __init__(self, device: Device, n_bytes: int) -> None:
        self._device = device
        self._buffer = device.allocate("host", n_bytes, "staging")
        self._submission: _native.Submission | None = None
        self.view = self._buffer.view()

    def send(self, target: _native.Buffer | _native.Tensor, offset: int, n_bytes: int) -> None:
        with translate_errors("uploading"):
            recorder = self._device.native.recorder()
            recorder.copy(self._buffer, 0, target, offset, n_bytes)
            self._submission = self._device.native.submit(recorder.finish())

    def wait(self) -> None:
        if self._submission is not None:
            with translate_errors("uploading"):
                self._submission.wait()
            self._submission = None

    def close(self) -> None:
        del self.view
        self._buffer.close()
