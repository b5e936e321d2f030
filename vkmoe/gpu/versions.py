"""Versions of what the extension was built from."""

from __future__ import annotations

__all__ = ["kompute_version"]


def kompute_version() -> str:
    """The version of the Kompute classes inside the extension."""
    from vkmoe.gpu import _native

    return str(_native.kompute_version)
