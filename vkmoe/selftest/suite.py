"""Chooses the cases a device gets: at least one for every compiled kernel variant that it can run.

The variants are those in the folder of compiled shaders, so that one without a case is a failure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import numpy as np

from vkmoe.cpu.device import cpu_kernels
from vkmoe.devices import open_device
from vkmoe.errors import UsageError
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.device import Device, spirv_folder
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.comparison import Check, Checks
from vkmoe.kernels.families import FAMILIES, selecting
from vkmoe.kernels.family import Setting, Trial, Variant, forms_of, launched
from vkmoe.kernels.inputs import ROUNDED_SUMS
from vkmoe.kernels.launches import KEEPING, MatvecFamily
from vkmoe.kernels.tuning import Tuning, adds_over_subgroups, matrix_tile, takes_subgroup_blocks
from vkmoe.placement.remembered import tuning_for

# The kernel by whose launches each kernel with dot products runs: itself, or the one it goes with.
_LAUNCHED_AS: dict[str, MatvecFamily] = {name: name for name in get_args(MatvecFamily)} | {
    keeping: name for name in get_args(MatvecFamily) if (keeping := KEEPING.get(name))
}


@dataclass(frozen=True)
class Case:
    """Holds a result: `error` in the unit of `limit`.

    `where` names what is wrong: which output, which element, what was expected there.
    """

    name: str
    ok: bool
    error: float
    limit: float
    where: str = ""


def compiled_variants() -> list[Variant]:
    """List every variant of this installation."""
    return sorted(Variant.parse(path.stem) for path in spirv_folder().glob("*.spv"))


def variants_of(info: DeviceInfo) -> list[Variant]:
    """List the variants that a device can run.

    A CPU has one of each kernel and type, but for types that no case can compare there.
    """
    compiled = compiled_variants()
    if info.is_vulkan:
        return [variant for variant in compiled if runnable(variant, info)]
    names = {each.name.partition("+")[0] for each in compiled if each.axis not in ROUNDED_SUMS}
    found = map(Variant.parse, sorted(names))
    return [variant for variant in found if variant.family in cpu_kernels()]


def runnable(variant: Variant, info: DeviceInfo) -> bool:
    """Say whether a device has what a variant needs.

    Where the size of subgroups is the driver's choice, only attention uses them: it is one pipeline
    wherever experts lie.
    """
    if variant.suffix == "+blocks64":
        return takes_subgroup_blocks(info)
    if variant.suffix == "+half":
        return "float16" in info.features
    if variant.suffix == "+matrix":
        return matrix_tile(info) is not None
    if variant.suffix != "+subgroup":
        return True
    if variant.family in ("attention", "latent_attention"):
        return info.subgroup_arithmetic
    return adds_over_subgroups(info)


def run(device: str | None, only: str = "") -> Iterator[Case]:
    """Run the cases of all variants that have `only` in their name, one after another.

    `device` is an index or a name. Raises UsageError if there is no such variant, NoDeviceError,
    NoDriverError, and other GpuErrors if the device fails.
    """
    with open_device(device) as opened:
        found = [each for each in variants_of(opened.info) if only.lower() in each.name]
        if not found:
            raise UsageError(
                f"no kernel of this device has {only!r} in its name",
                f"there is {', '.join(FAMILIES)}",
            )
        own = tuning_for(opened.info, "remembered")
        for variant in found:
            yield from run_variant(variant, opened, own)


def run_variant(variant: Variant, device: Device, own: Tuning) -> Iterator[Case]:
    """Run the cases of a variant in every launch that it has in the device's `own` tuning.

    A variant of an unknown family is a failure of its own.
    """
    family = FAMILIES.get(variant.family)
    if family is None:
        yield Case(f"{variant.name} has no case", False, 1.0, 0.0)
        return
    tuning = selecting(variant, own, device.info, small=True)
    for what, each in _ways(variant, tuning).items():
        for trial in family.trials(Setting(variant.axis, each)):
            worst = _compared(variant, trial, device)
            name = " ".join(filter(None, (variant.name, trial.what, what)))
            where = "" if worst.ok else worst.what + worst.where
            yield Case(name, worst.ok, worst.error, worst.limit, where)


def _compared(variant: Variant, trial: Trial, device: Device) -> Check:
    """Find the worst comparison of a trial."""
    checks, variants = Checks(), set[str]()
    for compare in trial.compares:
        # What a wrong kernel leaves may be anything; the comparison must still come to its end.
        with Runner(device, fills=True) as runner, np.errstate(all="ignore"):
            checks.checks += compare(runner).checks
            variants |= runner.variants
    assert variant.name in variants, (variant.name, variants)
    return checks.worst


def _ways(variant: Variant, tuning: Tuning) -> dict[str, Tuning]:
    """List tunings that launch a variant as `tuning` does for matrices of any form, by a name.

    The cases' matrices have few rows: they take what is launched so from `tuning` itself.
    """
    ways = {"": tuning}
    if variant.family in _LAUNCHED_AS:
        forms = list(forms_of(_LAUNCHED_AS[variant.family], variant.axis))
        of_few = {tuning.launch(form) for form in forms if form.rows == "few"}
        for form in forms:
            launch = tuning.launch(form)
            if of_few != {launch}:
                ways[f"in {launch}"] = launched(tuning, form, launch)
    return ways
