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
from vkmoe.selftest.families import FAMILIES
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


def tuning_for(variant: Variant, info: DeviceInfo) -> Tuning:
    """This device's own tuning, or of a mapping that it would not choose, that of those that do."""
    own, chosen_by = choose_tuning(info), FAMILIES[variant.family].chosen_by
    if chosen_by == "nothing" or variant.suffix == getattr(own, chosen_by):
        return own
    if chosen_by == "reduce_suffix":
        return replace(own, subgroup=variant.suffix == "+subgroup")
    if variant.suffix.startswith("+blocks"):
        blocks = choose_tuning(replace(info, type="cpu"))
        return replace(blocks, load_64bit=variant.suffix == "+blocks64")
    lanes = choose_tuning(replace(info, type="discrete" if info.is_cpu else info.type))
    return replace(lanes, subgroup=variant.suffix == "+subgroup")
