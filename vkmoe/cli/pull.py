"""This module is `vkmoe pull`: a model is downloaded before it is used."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from vkmoe.catalogue import KeptModel, kept_models
from vkmoe.cli.models import facts_of, line_of
from vkmoe.cli.notes import note
from vkmoe.cli.options import ModelChoice, Output, config_options
from vkmoe.config import EngineConfig
from vkmoe.errors import UsageError
from vkmoe.option_fields import option

_USE = "names are like owner/repo:Q4_K_M"


@dataclass(frozen=True)
class _Wanted:
    device: str | None = option(
        None, "Choose and predict for this device: its index or part of its name."
    )


@config_options
def pull(
    context: typer.Context,
    *,
    which: ModelChoice,
    wanted: _Wanted,
    output: Annotated[Output, ("as_json", "quiet")],
) -> None:
    """Download a model of Hugging Face's hub, so that it can be used by its name.

    \b
    vkmoe pull owner/repo:Q4_K_M              one quant, in all its parts
    vkmoe pull owner/repo                     the quant that suits this machine best
    vkmoe generate owner/repo:Q4_K_M -p "x"   uses it; without a pull it would be downloaded now

    Without QUANT the largest is taken that would reply without reading its file; the headers of
    some files are read to see which that is. The model lies where Hugging Face's tools keep theirs;
    HF_HOME names another folder. After Ctrl-C or a broken connection the same command goes on where
    it ended. What is on this machine already, kept by any program, is not downloaded again.

    A model that is private or gated needs a token: run `hf auth login`, or set HF_TOKEN.
    HF_ENDPOINT names another hub; HF_HUB_OFFLINE=1 forbids downloads.
    """
    from vkmoe.catalogue.choose import rated

    before = {model.path.resolve() for model in kept_models()}
    model = _kept(which.path(context))
    if model.path.resolve() in before and not output.quiet:
        note(f"{model.full_name} is there already, kept by {model.program}")
    (found,) = rated([model], EngineConfig(device=wanted.device))
    facts = facts_of(model, found)
    if output.as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        typer.echo(f"{model.full_name}  {line_of(facts)}")
        typer.echo(model.path)


def _kept(chosen: str | None) -> KeptModel:
    """Find whose model a file is. Raises UsageError where no name led to it."""
    if chosen is None:
        raise UsageError("no repository named", _USE)
    path = Path(chosen).resolve()
    model = next((model for model in kept_models() if model.path.resolve() == path), None)
    if model is None:
        raise UsageError(f"{chosen} is not the name of a repository", _USE)
    return model
