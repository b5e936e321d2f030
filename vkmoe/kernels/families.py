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
from vkmoe.kernels.layer_inputs import cases as layer_inputs
from vkmoe.kernels.logits import cases as logits
from vkmoe.kernels.matmul import cases as matmul
from vkmoe.kernels.matvec import cases as matvec
from vkmoe.kernels.memory import cases as memory
from vkmoe.kernels.norms import cases as norms
from vkmoe.kernels.prompt_attention import cases as prompt_attention
from vkmoe.kernels.prompt_experts import cases as prompt_experts
from vkmoe.kernels.recurrent import cases as recurrent
from vkmoe.kernels.router import cases as router
from vkmoe.kernels.tuning import Tuning, choose_tuning, matrix_tile

FAMILIES: dict[str, Family] = {
    **matvec.FAMILIES,
    **norms.FAMILIES,
    **matmul.FAMILIES,
    **experts.FAMILIES,
    **attention.FAMILIES,
    **prompt_attention.FAMILIES,
    **recurrent.FAMILIES,
    **router.FAMILIES,
    **layer_inputs.FAMILIES,
    **logits.FAMILIES,
    **prompt_experts.FAMILIES,
    **handover.FAMILIES,
    **memory.FAMILIES,
}


def selecting(variant: Variant, own: Tuning, info: DeviceInfo, *, small: bool = False) -> Tuning:
    """Return the device's `own` tuning; of a mapping it has not chosen, that of those that do.

    With `small` that is one whose kernels are compiled sooner.
    """
    chosen_by, suffix = FAMILIES[variant.family].chosen_by, variant.suffix
    if chosen_by == "nothing" or suffix == getattr(own, chosen_by):
        return own
    if chosen_by == "reduce_suffix":
        return replace(own, subgroup=suffix == "+subgroup")
    if suffix.startswith("+blocks"):
        cpu = Tuning("blocks", 8, 2, False) if small else choose_tuning(replace(info, type="cpu"))
        return replace(cpu, load_64bit=suffix == "+blocks64")
    gpu = own  # whose tiles can be of all kinds of numbers
    if not small:
        gpu = choose_tuning(replace(info, type="discrete" if info.is_cpu else info.type))
    elif chosen_by != "tile_suffix" or own.mapping != "lanes":
        gpu = Tuning("lanes", 32, 2, False)
    tile = matrix_tile(info) if suffix == "+matrix" else None
    return replace(
        gpu, subgroup=suffix == "+subgroup", half_tiles=suffix == "+half", matrix_tile=tile
    )
