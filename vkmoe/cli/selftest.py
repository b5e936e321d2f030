"""This module is `vkmoe selftest`: does this device compute what NumPy computes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkmoe.cli.notes import note
from vkmoe.cli.options import Output, config_options
from vkmoe.config import EngineConfig
from vkmoe.errors import VkmoeError
from vkmoe.option_fields import option

if TYPE_CHECKING:
    from vkmoe.selftest import Case


@dataclass(frozen=True)
class _Which:
    only: str = option("", "Only kernels with this in their name: matvec, attention, mxfp4.")


@config_options
def selftest(
    *,
    config: Annotated[EngineConfig, ("device",)],
    which: _Which,
    output: Annotated[Output, ("as_json",)],
) -> None:
    """Run every kernel variant against its NumPy twin on a device.

    A variant is a kernel for one type of weights or cache, and one way to spread the work; a name
    says so: expert_down.q4_k+subgroup. Exits with 1 when a kernel's error is above its limit. How
    fast kernels are is measured by vkmoe bench kernels.
    """
    from vkmoe.devices import choose_device, list_devices
    from vkmoe.selftest import run

    chosen = choose_device(list_devices(), config.device)
    note(f"device {chosen.index}: {chosen.name} ({chosen.driver})")
    cases: list[Case] = []
    for case in run(config.device, which.only):
        cases.append(case)
        if not output.as_json:
            typer.echo(_line(case))
    if output.as_json:
        document = {"device": chosen.name, "cases": [_plain(case) for case in cases]}
        typer.echo(json.dumps(document, indent=2))
    wrong = [case.name for case in cases if not case.ok]
    if wrong:
        raise VkmoeError(
            f"{len(wrong)} of {len(cases)} cases compute wrongly on {chosen.name}: "
            f"{', '.join(wrong)}",
            "update the driver, or choose another device; do not trust what this one generates",
        )
    note(f"all {len(cases)} cases agree with NumPy" if len(cases) > 1 else "NumPy agrees with it")


def _line(case: Case) -> str:
    verdict = "ok" if case.ok else "WRONG"
    where = f"; {case.where}" if case.where else ""
    return f"{case.name:44} {verdict:5}  error {case.error:.1e} of {case.limit:.1e}{where}"


def _plain(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in ("name", "ok", "error", "limit", "where")}
