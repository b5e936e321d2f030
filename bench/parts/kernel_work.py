"""One dispatch that `bench.kernels` checks and times, and the setting it runs in.

Owns what every kernel family has in common; the families' own shapes are in kernel_works.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from bench.parts.kernel_shapes import ModelShapes
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.runner import Runner
from vkmoe.ops.matvec import BLOCK_WEIGHTS
from vkmoe.ops.tuning import Tuning, choose_tuning
from vkmoe.selftest.comparison import Checks
from vkmoe.selftest.suite import Variant

__all__ = ["Setting", "Work", "tuning_for"]


@dataclass(frozen=True)
class Setting:
    """One variant with one model's shapes."""

    variant: Variant
    tuning: Tuning
    shapes: ModelShapes


@dataclass(frozen=True)
class Work:
    """One dispatch to check and time; `n_bytes` are what it must read, 0: next to nothing."""

    what: str
    n_bytes: int
    check: Callable[[Runner], Checks]
    blocks: tuple[tuple[str, int], ...] = ()  # (type, columns) that must be whole blocks

    @property
    def misfit(self) -> str:
        """Why no model has this type here, or nothing."""
        for kind, columns in self.blocks:
            if columns % BLOCK_WEIGHTS[kind]:
                return f"rows of {columns} are not whole blocks"
        return ""


def tuning_for(suffix: str, info: DeviceInfo) -> Tuning:
    """The tuning that a device of the kind that a mapping is made for would have."""
    kind = "cpu" if suffix.startswith("+blocks") else info.type
    kind = "discrete" if not suffix.startswith("+blocks") and info.is_cpu else kind
    own = choose_tuning(replace(info, type=kind))
    if own.mapping == "blocks":
        return replace(own, load_64bit=suffix == "+blocks64")
    return replace(own, subgroup=suffix == "+subgroup")
