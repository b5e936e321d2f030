"""This module is `vkmoe info`: what a model file holds, and where its parts would go.

It owns the words for a model's shape. What is true of a model is in its spec and its tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vkmoe.cli.cache.tune import tuning_lines
from vkmoe.cli.notes import guess_line, idle_notes, mode_line
from vkmoe.cli.options import ModelChoice, config_options
from vkmoe.cli.plan import decide_here
from vkmoe.config import EngineConfig
from vkmoe.errors import UnsupportedModelError, VkmoeError

if TYPE_CHECKING:
    from vkmoe.facts import DeviceInfo, ExpertSpec, Mixer, ModelSpec, RopeSpec
    from vkmoe.gguf_file import GgufFile
    from vkmoe.models import ModelFile
    from vkmoe.models.tensors import ModelTensors
    from vkmoe.placement.decide import Decision
    from vkmoe.placement.remembered import Recalled

_MIB = 1 << 20


@config_options
def info(context: typer.Context, *, which: ModelChoice, engine: EngineConfig) -> None:
    """Show what is in a model file, and the memory plan on the chosen device.

    Loads nothing. Without MODEL it describes the built-in demo model.
    """
    from vkmoe.gguf_file import open_gguf
    from vkmoe.models import model_of, read_spec
    from vkmoe.models.ahead_file import with_ahead

    with open_gguf(which.file(context)) as file:
        typer.echo("\n".join(_file_lines(file)))  # at once: what comes next may be unsupported
        typer.echo("\n".join(spec_lines(read_spec(file))))
        model = model_of(file)
        if model.ahead is not None:
            typer.echo("guesses       tokens ahead, by a layer of the model (--draft mtp)")
        tensors = model.tensors
        lines = [*type_lines(tensors), *_tokenizer_lines(file)]
        typer.echo("\n".join(lines))
        with with_ahead(model, engine) as whole:
            typer.echo("\n".join(_plan_lines(whole, engine)))


def _file_lines(file: GgufFile) -> list[str]:
    """List the file's path, name and architecture, and its weights by type."""
    n_tensors, n_bytes = Counter[str](), Counter[str]()
    for tensor in file.tensors.values():
        n_tensors[tensor.type] += 1
        n_bytes[tensor.type] += tensor.n_bytes
    n_weights = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    parts = f", {len(file.paths)} parts" if len(file.paths) > 1 else ""
    lines = [
        f"file          {file.path} (GGUF {file.version}{parts})",
        f"name          {file.get('general.name', str, '(none)')}",
        f"architecture  {file.get('general.architecture', str, '(none)')}",
        f"weights       {n_weights / 1e6:,.1f} million in {len(file.tensors)} tensors, "
        f"{n_bytes.total() / _MIB:,.1f} MiB",
    ]
    for kind, size in n_bytes.most_common():
        word = "tensor " if n_tensors[kind] == 1 else "tensors"
        lines.append(f"  {kind:12}{n_tensors[kind]:5} {word} {size / _MIB:12,.1f} MiB")
    return lines


def _tokenizer_lines(file: GgufFile) -> list[str]:
    """Describe the vocabulary and its special tokens, or say that they cannot be used."""
    from vkmoe.generate.text.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(file)
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


def _plan_lines(model: ModelFile, config: EngineConfig) -> list[str]:
    """Show the plan on the chosen device, or say why there is none."""
    from vkmoe.devices import choose_device, list_devices
    from vkmoe.experts.decide.settings import sizing_line
    from vkmoe.placement.decide import Choosing
    from vkmoe.placement.forecast.measured import recall_speeds
    from vkmoe.placement.remembered import Recalled, recall, with_measured

    try:
        device = choose_device(list_devices(), config.device)
    except VkmoeError as error:
        if config.device is not None:
            raise
        return [f"plan          none: {error}"]
    recalled = Recalled() if config.tuning == "table" else recall(device)
    tuning = with_measured(device, recalled)
    found = recall_speeds(device, Path(model.file.path), config.tuning)
    choosing = Choosing(lambda: found.speeds, corrections=found.corrections)
    decision = decide_here(config, model, device, tuning, choosing)[0]
    decided, mode = decision.plan, decision.plan.mode
    lines = [f"plan          on device {device.index}: {device.name}"]
    for line in decided.lines:
        lines.append(
            f"  {line.n_bytes / _MIB:12,.1f} MiB {line.place:8} {line.item} ({line.reason})"
        )
    if model.spec.experts is not None:
        lines.append(f"mode          {mode_line(decided)}")
        lines.append(f"executor      {decided.executor} ({decided.executor_reason})")
    if mode.has_slots:
        lines.append(f"misses        {mode.misses} ({mode.reason})")
    if guesses := guess_line(decided):
        lines.append(f"guesses       {guesses}")
    on_units = f"; attention {decision.workspace.attention_text}" if tuning.matrix_tile else ""
    lines.append(f"prompts       {tuning.tiles_text}{on_units}")
    lines += _tuning_lines(recalled)
    if device.is_vulkan:
        lines.append(f"canary        {_canary(device, model, decision)}")
    if decided.sizing is not None:
        lines.append(sizing_line(decided.sizing))
    return [*lines, *idle_notes(config, decided)]


def _tuning_lines(recalled: Recalled) -> list[str]:
    """Describe what `vkmoe tune` found on the device; nothing where it was never asked."""
    if recalled.note:
        return [f"tuning        by default: {recalled.note}"]
    n_all, n_changed = len(recalled.measured), len(recalled.changes)
    if not n_all:
        return []
    first = f"tuning        {n_changed} of {n_all} measured kernels run otherwise than by default"
    return [first, *(f"  {row}" for row in tuning_lines(recalled.changes))]


def _canary(device: DeviceInfo, model: ModelFile, decision: Decision) -> str:
    """Say whether the device computes the model's kernels as NumPy does."""
    from vkmoe.canary.check import state_of

    n_kernels, n_passed = state_of(device, model, decision)
    if n_passed == n_kernels:
        return f"all {n_kernels} kernels of this model have passed with this driver"
    others = f"{n_passed} of {n_kernels} kernels of this model have passed with this driver"
    return f"{others}; the others are compared with NumPy when it is loaded"


# ----- the shape of a model: attention, position, experts, routing, their types -----


def spec_lines(spec: ModelSpec) -> list[str]:
    """Describe the model's shape, a line for each part."""
    inputs = f"; a token brings {spec.input_width} numbers to each" if spec.input_width else ""
    lines = [f"layers        {spec.n_layers} of width {spec.width}{inputs}"]
    kinds = Counter(_attention(layer.mixer) for layer in spec.layers)
    for kind, n_layers in kinds.items():
        title = "" if len(lines) > 1 else "attention"
        lines.append(f"{title:14}{kind}{_in_layers(n_layers, len(kinds))}")
    lines += _windows(spec)
    scaling = ", ".join(filter(None, map(_scaling, spec.ropes)))
    limit = f"; {spec.context_limit}" if spec.context_limit else ""
    lines.append(f"context       {spec.context_length} tokens{scaling}{limit}")
    return lines + _feed_forward(spec)


def _feed_forward(spec: ModelSpec) -> list[str]:
    experts, dense = spec.experts, spec.dense_blocks
    widths = " and ".join(str(width) for width in dict.fromkeys(block.width for block in dense))
    if experts is None:
        return [f"feed-forward  dense, width {widths}"]
    lines = _experts(experts)
    if dense:
        first = "layer" if len(dense) == 1 else f"{len(dense)} layers"
        lines.insert(0, f"feed-forward  dense in the first {first}, width {widths}; then experts")
    return lines


def type_lines(tensors: ModelTensors) -> list[str]:
    """List the types of the routed experts' matrices, and in how many layers each mixture is."""
    mixtures = Counter(
        tuple(matrix.type for matrix in one.matrices) for one in tensors.expert_layers
    )
    lines = []
    for (gate, up, down), n_layers in mixtures.most_common():
        pair = f"gate and up {gate}" if gate == up else f"gate {gate}, up {up}"
        types = gate if gate == up == down else f"{pair}, down {down}"
        lines.append(f"expert types  {types}" + _in_layers(n_layers, len(mixtures)))
    return lines


def _attention(mixer: Mixer) -> str:
    from vkmoe.facts import DeltaNetSpec, LatentSpec

    if isinstance(mixer, DeltaNetSpec):
        return (
            f"gated delta rule, {mixer.n_heads} heads of {mixer.head_dim}, {mixer.n_key_heads} for "
            f"keys, behind a convolution of {mixer.n_taps} tokens"
        )
    if isinstance(mixer, LatentSpec):
        queries = f", queries to {mixer.q_rank}" if mixer.q_rank else ""
        return (
            f"latent, {mixer.n_heads} heads of {mixer.query_dim}; keys and values of a token "
            f"compressed to {mixer.row} numbers{queries}"
        )
    n_kv = mixer.n_kv_heads
    kind = "grouped" if n_kv < mixer.n_heads else "full"
    extras = {
        "normed q and k": mixer.qk_norm != "none" and not mixer.value_norm,
        "normed q, k and v": mixer.qk_norm != "none" and mixer.value_norm,
        "biases": mixer.qkv_bias,
        "sinks": mixer.sinks,
        "gated": mixer.gated,
        "those of an earlier layer": not mixer.own_kv,
    }
    named = "".join(f", {name}" for name, present in extras.items() if present)
    return f"{kind}, {mixer.n_heads} heads of {mixer.head_dim}, {n_kv} for keys and values{named}"


def _windows(spec: ModelSpec) -> list[str]:
    """Describe the layers that see only the last tokens, if there are any."""
    from vkmoe.facts import AttentionSpec

    mixers = (layer.mixer for layer in spec.layers)
    counts = Counter(mixer.window for mixer in mixers if isinstance(mixer, AttentionSpec))
    sizes = [window for window in counts if window]
    parts = [f"the last {window} tokens{_in_layers(counts[window], 2)}" for window in sizes]
    n_whole = spec.n_layers - sum(counts[window] for window in sizes)
    if parts and n_whole:
        parts.append(f"all{_in_layers(n_whole, 2)}")
    return [f"              a token sees {', '.join(parts)}"] if parts else []


def _scaling(rope: RopeSpec) -> str:
    if rope.scaling == "none":
        return " (rotary frequencies scaled one by one)" if rope.factors else ""
    original = f" from {rope.original_context}" if rope.original_context else ""
    factor = f" x {rope.factor:g}" if rope.factor != 1.0 else ""
    return f" ({rope.scaling} scaling{factor}{original})"


def _experts(experts: ExpertSpec) -> list[str]:
    line = (
        f"experts       {experts.n_experts} per layer, {experts.n_used} used for each token, "
        f"width {experts.width}"
    )
    lines = [line + (", with biases" if experts.biases else "")]
    if experts.shared_width:
        gate = ", weighted by a gate of its own" if experts.shared_gate else ""
        lines.append(f"shared expert width {experts.shared_width}, used for every token{gate}")
    if experts.beside_width:
        lines.append(
            f"beside them   a dense block, width {experts.beside_width}, used for every token"
        )
    return [*lines, f"routing       {_routing(experts)}"]


def _routing(experts: ExpertSpec) -> str:
    parts: list[str] = [experts.gating]
    if experts.n_groups > 1:
        parts.append(f"from the best {experts.n_groups_used} of {experts.n_groups} groups")
    if experts.selection_bias:
        parts.append("chosen with a bias")
    if experts.renormalise:
        parts.append("weights add up to 1")
    if experts.scale != 1.0:
        parts.append(f"scaled by {experts.scale:g}")
    if experts.output_scales:
        parts.append("each expert by a scale of its own")
    return ", ".join(parts)


def _in_layers(count: int, of: int) -> str:
    """Say in how many layers one of several kinds is; nothing where there is only one kind."""
    return f" in {count} layer{'s' * (count != 1)}" if of > 1 else ""
