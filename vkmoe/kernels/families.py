"""This module is the table of kernel families, put together from the packages of this folder.

What the self-test compares, `vkmoe bench kernels` and `vkmoe tune` measure, and what may be chosen
there by name, is found in it.
"""

from __future__ import annotations

from dataclasses import replace

from vkmoe.facts import DeviceInfo
from vkmoe.kernels.attention import cases as attention
from vkmoe.kernels.experts import cases as experts
from vkmoe.kernels.family import Family, Variant
from vkmoe.kernels.handover import cases as handover
from vkmoe.kernels.logits import cases as logits
from vkmoe.kernels.matmul import cases as matmul
from vkmoe.kernels.matvec import cases as matvec
from vkmoe.kernels.memory import cases as memory
from vkmoe.kernels.norms import cases as norms
from vkmoe.kernels.prompt_attention import cases as prompt_attention
from vkmoe.kernels.prompt_experts import cases as prompt_experts
from vkmoe.kernels.router import cases as router
from vkmoe.kernels.tuning import Tuning, choose_tuning

__all__ = ["FAMILIES", "selecting"]

FAMILIES: dict[str, Family] = {
    **matvec.FAMILIES,
    **norms.FAMILIES,
    **matmul.FAMILIES,
    **experts.FAMILIES,
    **attention.FAMILIES,
    **prompt_attention.FAMILIES,
    **router.FAMILIES,
    **logits.FAMILIES,
    **prompt_experts.FAMILIES,
    **handover.FAMILIES,
    **memory.FAMILIES,
}


def selecting(variant: Variant, own: Tuning, info: DeviceInfo) -> Tuning:
    """Return the device's `own` tuning; of a mapping it has not chosen, that of those that do."""
    chosen_by = FAMILIES[variant.family].chosen_by
    if chosen_by == "nothing" or variant.suffix == getattr(own, chosen_by):
        return own
    if chosen_by == "reduce_suffix":
        return replace(own, subgroup=variant.suffix == "+subgroup")
    if variant.suffix.startswith("+blocks"):
        blocks = choose_tuning(replace(info, type="cpu"))
        return replace(blocks, load_64bit=variant.suffix == "+blocks64")
    lanes = choose_tuning(replace(info, type="discrete" if info.is_cpu else info.type))
    suffix = variant.suffix
    return replace(lanes, subgroup=suffix == "+subgroup", half_tiles=suffix == "+half")
