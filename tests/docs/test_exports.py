"""`vkmoe.__all__` is what the package exports: no more, no less, sorted."""

from __future__ import annotations

import types

import vkmoe


def test_all_equals_what_is_exported() -> None:
    """Public names that are not modules are exactly those of `__all__`."""
    names = {
        name for name in dir(vkmoe)
        if not name.startswith("_") and not isinstance(getattr(vkmoe, name), types.ModuleType)
    } - {"annotations"}
    assert sorted(names | {"__version__"}) == sorted(vkmoe.__all__)
    assert list(vkmoe.__all__) == sorted(vkmoe.__all__)
