"""Chooses and imports the variant of the extension that was compiled for a processor like this one.

Owns the choice. What this processor has, and what each variant was compiled for, comes from
`_probe`, an extension that any processor of the architecture runs: no instruction of a variant is
met before it was chosen.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from vkmoe.errors import NoDeviceError, UsageError

VARIABLE = "VKMOE_CPU_VARIANT"  # names the variant to use, for tests and measurements
Needs = Mapping[str, Collection[str]]  # the features a variant needs; the most particular is last


@cache
def built() -> Needs:
    """Return what each variant needs that is in this build of vkmoe; empty without CPU device."""
    if find_spec("vkmoe.cpu._probe") is None:
        return {}
    from vkmoe.cpu import _probe

    return dict(_probe.variants())


@cache
def features() -> frozenset[str]:
    """Name what this processor has, and the system lets programs use, beyond the least."""
    from vkmoe.cpu import _probe

    return frozenset(_probe.features())


def runnable(needs: Needs, has: Collection[str]) -> list[str]:
    """Name the variants that a processor with these features runs, the most particular last."""
    return [name for name in needs if set(needs[name]) <= set(has)]


def choose(needs: Needs, has: Collection[str], wanted: str = "") -> str:
    """Name the variant that is wanted, else the most particular that a processor can run.

    Raises NoDeviceError where there is none, UsageError where the wanted one is not there or
    cannot run.
    """
    if not needs:
        raise NoDeviceError(
            "this vkmoe was built without kernels for the CPU",
            "build vkmoe without -DVKMOE_CPU=OFF",
        )
    able = runnable(needs, has)
    if wanted and wanted not in needs:
        raise UsageError(
            f"{VARIABLE} names {wanted!r}, which is not among this build's kernels for the CPU",
            f"there is {', '.join(needs)}",
        )
    if wanted and wanted not in able:
        raise UsageError(
            f"{VARIABLE} names {wanted!r}, but this processor lacks {_lacks(needs[wanted], has)}",
            f"it can run {', '.join(able) or 'none of this build'}",
        )
    if not able:
        first = next(iter(needs.values()))
        raise NoDeviceError(
            "vkmoe's kernels for the CPU were compiled for another processor: this one lacks "
            + _lacks(first, has),
            "build vkmoe on this machine, or for several processors with -DVKMOE_CPU_VARIANTS=ON",
        )
    return wanted or able[-1]


def _lacks(needs: Collection[str], has: Collection[str]) -> str:
    return ", ".join(name for name in needs if name not in has)


@cache
def variant() -> str:
    """Name the variant that is used in this process. Raises as `choose` does."""
    found = built()
    return choose(found, features() if found else (), os.environ.get(VARIABLE, "").strip())


def has_cpu() -> bool:
    """Say whether vkmoe has kernels that this processor runs. Raises UsageError as `choose`."""
    try:
        variant()
    except NoDeviceError:
        return False
    return True


def native(name: str | None = None) -> ModuleType:
    """Import a variant of the extension (`_native.pyi`), by default the one that was chosen.

    Raises as `choose` does.
    """
    return import_module(f"vkmoe.cpu._ggml_{name or variant()}")
