"""`vkmoe info`: what a model file holds, and where its parts would go."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import typer

from vkmoe.cli.cache_notes import idle_notes
from vkmoe.cli.model_lines import spec_lines, type_lines
from vkmoe.cli.options import Model, Positional, config_options
from vkmoe.cli.prompt import chosen_model
from vkmoe.config import EngineConfig
from vkmoe.errors import UnsupportedModelError, VkmoeError

if TYPE_CHECKING:
    from vkmoe.facts import ModelSpec
    from vkmoe.gguf_file import GgufFile
    from vkmoe.models.tensors import ModelTensors

__all__ = ["info"]

MIB = 1 << 20


@config_options
def info(
    context: typer.Context,
    *,
    positional: Positional = None,
    model: Model = None,
    engine: EngineConfig,
) -> None:
    """Show what is in a model file, and the memory plan on the chosen device.

    Loads nothing. Without MODEL it describes the built-in demo model.
    """
    from vkmoe.gguf_file import open_gguf
    from vkmoe.llm import demo_model_path
    from vkmoe.models import read_spec
    from vkmoe.models.tensors import read_tensors

    path = chosen_model(context, positional, model)
    with open_gguf(path if path is not None else demo_model_path()) as file:
        for line in _file_lines(file):
            typer.echo(line)
        spec = read_spec(file)
        for line in spec_lines(spec):
            typer.echo(line)
        tensors = read_tensors(file, spec)
        for line in [*type_lines(tensors), *_conversion_lines(tensors), *_tokenizer_lines(file)]:
            typer.echo(line)
        for line in _plan_lines(spec, tensors, engine):
            typer.echo(line)


def _file_lines(file: GgufFile) -> list[str]:
    """Name, size and the weight types with their shares."""
    n_tensors: dict[str, int] = defaultdict(int)
    n_bytes: dict[str, int] = defaultdict(int)
    n_weights = 0
    for tensor in file.tensors.values():
        n_tensors[tensor.type] += 1
        n_bytes[tensor.type] += tensor.n_bytes
        elements = 1
        for size in tensor.shape:
            elements *= size
        n_weights += elements
    total = sum(n_bytes.values())
    parts = f", {len(file.paths)} parts" if len(file.paths) > 1 else ""
    lines = [
        f"file          {file.path} (GGUF {file.version}{parts})",
        f"name          {file.get('general.name', str, '(none)')}",
        f"architecture  {file.get('general.architecture', str, '(none)')}",
        f"weights       {n_weights / 1e6:,.1f} million in {len(file.tensors)} tensors, "
        f"{total / MIB:,.1f} MiB",
    ]
    for kind in sorted(n_bytes, key=lambda name: -n_bytes[name]):
        word = "tensor " if n_tensors[kind] == 1 else "tensors"
        lines.append(f"  {kind:12}{n_tensors[kind]:5} {word} {n_bytes[kind] / MIB:12,.1f} MiB")
    return lines


def _conversion_lines(tensors: ModelTensors) -> list[str]:
    """What has a type without kernels, and what loading makes of it."""
    from vkmoe.placement.conversions import conversions, expected_seconds
    from vkmoe.placement.words import in_time

    return [
        f"converted     {item.n_tensors} tensor{'s' * (item.n_tensors > 1)}"
        f"{' of experts' * item.of_experts} from "
        f"{item.file_type} to {item.loaded_type}, {item.file_bytes / MIB:,.1f} -> "
        f"{item.loaded_bytes / MIB:,.1f} MiB, about {in_time(expected_seconds([item]))}"
        for item in conversions(tensors)
    ]


def _tokenizer_lines(file: GgufFile) -> list[str]:
    """The vocabulary and its special tokens; a tokenizer that cannot be used is said so."""
    from vkmoe.generate.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    except UnsupportedModelError as error:
        return [f"tokenizer     not usable: {error}"]
    named = [("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id), ("eot", tokenizer.eot_id)]
    special = [f"{name} {tokenizer.token_text(i)} ({i})" for name, i in named if i is not None]
    ends = ", ".join(tokenizer.token_text(i) for i in sorted(tokenizer.end_ids)) or "nothing"
    template = "yes" if file.metadata.get("tokenizer.chat_template") else "no"
    return [
        f"tokenizer     {tokenizer.pre_name}, {tokenizer.n_vocab} tokens; {', '.join(special)}; "
        f"replies end with {ends}",
        f"chat template {template}",
    ]


def _plan_lines(spec: ModelSpec, tensors: ModelTensors, config: EngineConfig) -> list[str]:
    """The plan on the chosen device, or why there is none."""
    from vkmoe.experts.sizing import sizing_line
    from vkmoe.gpu.device import choose_device, list_devices
    from vkmoe.placement.cache_choice import copies_overlap
    from vkmoe.placement.plan import decide

    try:
        device = choose_device(list_devices(), config.device)
    except VkmoeError as error:
        if config.device is not None:
            raise
        return [f"plan          none: {error}"]
    # Without opening the device: those with memory of their own have engines for copies.
    overlaps = copies_overlap(config, has_queue=not device.is_uma)
    decided = decide(config, spec, tensors, device, overlaps=overlaps).plan
    lines = [f"plan          on device {device.index}: {device.name}"]
    for line in decided.lines:
        lines.append(
            f"  {line.n_bytes / MIB:12,.1f} MiB {line.place:8} {line.item} ({line.reason})"
        )
    if spec.experts is not None:
        lines.append(f"executor      {decided.executor} ({decided.executor_reason})")
    if decided.sizing is not None:
        lines.append(sizing_line(decided.sizing))
    return [*lines, *idle_notes(config, decided)]
