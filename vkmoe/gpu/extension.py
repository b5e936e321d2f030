"""Imports the native extension when it is first needed, with an error for a missing Vulkan loader.

The extension links the loader, so on a machine without Vulkan the import itself fails.
"""

from __future__ import annotations

from types import ModuleType

from vkmoe.errors import NoDriverError

__all__ = ["kompute_version", "native"]


def native() -> ModuleType:
    """Import `vkmoe.gpu._native`. Raises NoDriverError where the Vulkan loader is missing."""
    try:
        from vkmoe.gpu import _native
    except ImportError as error:
        if "libvulkan" not in str(error):
            raise
        raise NoDriverError(
            "the Vulkan loader (libvulkan.so.1) is not installed",
            "install libvulkan1 (Debian, Ubuntu) or vulkan-loader (Fedora, Arch)",
            str(error),
        ) from error
    return _native


def kompute_version() -> str:
    """Return the version of the Kompute classes inside the extension."""
    return str(native().kompute_version)
