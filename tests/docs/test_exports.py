"""`vkmoe.__all__` is what the package exports, no more and no less."""

from __future__ import annotations

import pytest

import vkmoe


def test_all_equals_what_is_exported() -> None:
    """Every name of `__all__` is there, and every class of ours that is there is named."""
    offered = {name for name in vkmoe.__all__ if hasattr(vkmoe, name)}
    ours = {
        name
        for name, thing in vars(vkmoe).items()
        if not name.startswith("_") and getattr(thing, "__module__", "").startswith("vkmoe.")
    }
    assert offered | ours == set(vkmoe.__all__)
    assert len(vkmoe.__all__) == len(set(vkmoe.__all__))


def test_other_names_are_refused() -> None:
    """The names loaded on demand do not make every name one."""
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = vkmoe.no_such_name
