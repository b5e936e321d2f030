"""This module owns the error tree of vkmoe: what the user did or has.

Our own bugs stay plain asserts and ordinary Python exceptions.
"""

from __future__ import annotations


class VkmoeError(Exception):
    """Describes an error the user can act on: `str(error)` is one line, `hint` says what to try."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(VkmoeError):
    """Says that options contradict each other, or that a value is malformed."""

    exit_code = 2


class ModelFileError(VkmoeError):
    """Says that a model file cannot be read as GGUF."""


class UnsupportedModelError(VkmoeError):
    """Says that a sound model file needs something vkmoe does not do."""


class PromptError(VkmoeError):
    """Says that a prompt cannot be used: it is empty, not text, or longer than the context."""


class UnavailableError(VkmoeError):
    """Says that there is no model, or that too much waits for it: `seconds` later there may not be.

    `code` is a word for programs.
    """

    def __init__(
        self, message: str, hint: str = "", seconds: int = 1, code: str | None = None
    ) -> None:
        super().__init__(message, hint)
        self.seconds, self.code = seconds, code


class StateFileError(VkmoeError):
    """Says that the state of a conversation cannot be saved to a file, or restored from it."""


class ServerError(VkmoeError):
    """Says that a server gives no reply: it does not answer, refuses, or its stream broke off."""


class DownloadError(VkmoeError):
    """Says that a model cannot be downloaded: the hub has none, refuses, or the transfer fails."""


class GpuError(VkmoeError):
    """Says that Vulkan refused something; `result` is the VkResult name where there is one."""

    def __init__(self, message: str, hint: str = "", result: str = "") -> None:
        super().__init__(message, hint)
        self.result = result


class NoDriverError(GpuError):
    """Says that there is no Vulkan loader or driver, or no permission to use it."""


class NoDeviceError(GpuError):
    """Says that no device matches what was asked, or that none can run vkmoe."""


class MiscompiledError(GpuError):
    """Says that a device computes wrongly what a model needs, with the driver that it has."""


class OutOfMemoryError(GpuError):
    """Says that an allocation failed, or would exceed what the device has."""


class DeviceLostError(GpuError):
    """Says that the driver reset the device. The device object cannot be used again."""
