"""Versions of what the extension was built from."""

from __future__ import annotations

from vkmoe.gpu.extension import native

__all__ = ["kompute_version"]


def kompute_version() -> str:
    """The version of the Kompute classes inside the extension."""
    return str(native().kompute_version)
