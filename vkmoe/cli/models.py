"""This module is `vkmoe models`: the models that programs keep here, and how fast they would be."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkmoe.catalogue import kept_models
from vkmoe.cli.notes import note
from vkmoe.cli.options import Output, config_options
from vkmoe.config import EngineConfig
from vkmoe.errors import VkmoeError
from vkmoe.option_fields import option

if TYPE_CHECKING:
    from vkmoe.catalogue import KeptModel
    from vkmoe.catalogue.choose import Rated

_NONE = "no model is kept here: `vkmoe pull OWNER/REPO` downloads one"


@dataclass(frozen=True)
class _Wanted:
    device: str | None = option(None, "Predict for this device: its index or part of its name.")


@config_options
def models(*, wanted: _Wanted, output: Annotated[Output, ("as_json",)]) -> None:
    """List the models that programs keep on this machine, by names that vkmoe takes.

    Each line has the size of the file, how experts would be held, how fast replies are predicted to
    be, and whose it is. No weights are read; the device's memory is measured, which takes a second
    or two.
    """
    from vkmoe.catalogue.choose import rated

    config = EngineConfig(device=wanted.device)
    kept = sorted(kept_models(), key=lambda model: (model.name.lower(), model.n_bytes))
    pairs = zip(kept, rated(kept, config), strict=True)
    plans = (facts_of(model, found) for model, found in pairs)
    if output.as_json:
        typer.echo(json.dumps(list(plans), indent=2))
        return
    width = max((len(model.full_name) for model in kept), default=0)
    for facts in plans:
        typer.echo(f"{facts['name']:{width}}  {line_of(facts)}")
    if not kept:
        note(_NONE)


def facts_of(model: KeptModel, found: Rated | VkmoeError) -> dict[str, Any]:
    """Say all of a model, with its plan on this machine, or why it cannot be run."""
    facts = {
        "name": model.full_name,
        "path": str(model.path),
        "bytes": model.n_bytes,
        "program": model.program,
    }
    if isinstance(found, VkmoeError):
        return facts | {"error": str(found)}
    return facts | {
        "mode": found.mode,
        "reads_file": found.reads_file,
        "tokens_per_second": round(found.rate, 2),
    }


def line_of(facts: dict[str, Any]) -> str:
    """Make a line of what `facts_of` says, without the name."""
    size, program = f"{facts['bytes'] / 1e9:7.1f} GB", facts["program"]
    if "error" in facts:
        return f"{size}  cannot be run: {facts['error']} ({program})"
    how = facts["mode"] + ", file" * facts["reads_file"]
    return f"{size}  {how:14}  {facts['tokens_per_second']:8.1f} tok/s  {program}"
