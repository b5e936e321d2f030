"""Copies experts from their homes into slots, on the upload queue.

Owns the recordings in flight. Does not decide what is copied, nor when a slot may be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from vkmoe.gpu.arena import Placement
from vkmoe.gpu.backend import Submission
from vkmoe.gpu.device import Device, translate_errors

__all__ = ["Copy", "Upload", "Uploader", "Uploads"]


class Copy(NamedTuple):
    """One span to copy."""

    source: Placement
    target: Placement
    n_bytes: int


class Upload(Protocol):
    """Copies under way."""

    def done(self) -> bool:
        """Whether all bytes have arrived; never waits."""

    def wait(self) -> None:
        """Wait for them. Raises GpuErrors; the targets' bytes are undefined then."""


class Uploader(Protocol):
    """Whoever copies: the upload queue, or in tests a slow or failing one."""

    def start(self, copies: Sequence[Copy]) -> Upload:
        """Begin to copy. Raises GpuErrors, with nothing begun."""


class Uploads:
    """Copies by one submit on the upload queue (the compute queue, where there is one queue)."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def start(self, copies: Sequence[Copy]) -> Upload:
        with translate_errors("uploading experts"):
            recorder = self._device.native.recorder(queue="upload")
            for source, target, n_bytes in copies:
                recorder.copy(source.buffer, source.offset, target.buffer, target.offset, n_bytes)
            return _Upload(self._device.native.submit(recorder.finish(), queue="upload"))


class _Upload:
    """A submit on the upload queue."""

    def __init__(self, submission: Submission) -> None:
        self._submission = submission

    def done(self) -> bool:
        with translate_errors("uploading experts"):
            return self._submission.done()

    def wait(self) -> None:
        with translate_errors("uploading experts"):
            self._submission.wait()
