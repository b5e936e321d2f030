"""Copies experts from their homes into slots, on the upload queue.

Owns the recordings in flight. Does not decide what is copied, nor when a slot may be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

from vkmoe.gpu.arena import Placement
from vkmoe.gpu.backend import Submission
from vkmoe.gpu.device import Device, translated
from vkmoe.gpu.extension import native

__all__ = ["Copy", "DrainedUploader", "Upload", "Uploader", "Uploads"]


# One span to copy: from, to, bytes. A plain tuple: one is made for every expert that moves.
# From: a Placement, or what another uploader copies from (of the file: an expert's number).
Copy: TypeAlias = tuple[Any, Placement, int]

DOING = "uploading experts"
SETTLE_NS = 10_000_000_000  # that copies may go on after an error; then the device counts as lost


class Upload(Protocol):
    """Copies under way."""

    def done(self) -> bool:
        """Whether all bytes have arrived; never waits."""

    def wait(self) -> None:
        """Wait for them. Raises VkmoeErrors; the targets' bytes are undefined then, and stay so."""

    def cancel(self) -> bool:
        """Whether they had not begun and now never will: nothing was written."""

    def interval(self) -> tuple[int, int] | None:
        """When they began and ended, in nanoseconds of their queue's clock; None: not known."""


class Uploader(Protocol):
    """Whoever copies: the upload queue, a thread, or in tests a slow or failing one."""

    def start(self, copies: Sequence[Copy], urgent: bool = False) -> Upload:
        """Begin to copy, before what is not urgent. Raises VkmoeErrors, with nothing begun."""


class DrainedUploader(Uploader, Protocol):
    """One that can be brought to rest."""

    def drain(self) -> bool:
        """Wait until nothing is written any more, or never will be; whether that ended in time."""


class Uploads:
    """Copies by one submit on the upload queue (the compute queue, where there is one queue)."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._timed = device.native.has_timestamps("upload")

    def start(self, copies: Sequence[Copy], urgent: bool = False) -> Upload:
        try:  # no context manager: nearly every token comes here
            return _Upload(self._device, self._device.native.upload(copies, self._timed))
        except native().VulkanError as error:
            raise translated(error, DOING) from error

    def drain(self) -> bool:
        try:
            self._device.native.wait_idle()
        except native().VulkanError as error:
            raise translated(error, DOING) from error
        return True


class _Upload:
    """A submit on the upload queue."""

    __slots__ = ("_device", "_submission")

    def __init__(self, device: Device, submission: Submission) -> None:
        self._device, self._submission = device, submission

    def done(self) -> bool:
        try:
            return self._submission.done()
        except native().VulkanError as error:
            raise translated(error, DOING) from error

    def wait(self) -> None:
        try:
            self._submission.wait()
        except (native().VulkanError, MemoryError) as error:
            with suppress(RuntimeError):  # the first error is the one to tell
                # It may go on although waiting for it failed; its targets will be others' soon.
                self._device.native.settle(SETTLE_NS)
            if isinstance(error, MemoryError):
                raise
            raise translated(error, DOING) from error

    def cancel(self) -> bool:
        return False

    def interval(self) -> tuple[int, int] | None:
        return self._submission.interval() if self._submission.done() else None
