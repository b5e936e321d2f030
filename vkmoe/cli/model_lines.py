"""What `vkmoe info` says of a model's shape: attention, position, experts, routing, their types.

Owns the words. What is true of a model is in its spec and its tensors.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vkmoe.facts import ExpertSpec, ModelSpec, RopeSpec
    from vkmoe.models.tensors import ModelTensors

__all__ = ["spec_lines", "type_lines"]


def spec_lines(spec: ModelSpec) -> list[str]:
    """The model's shape, a line for each part."""
    lines = [
        f"layers        {spec.n_layers} of width {spec.width}",
        f"attention     {_attention(spec)}",
    ]
    if spec.latent is None and any(spec.windows):
        lines.append(f"              {_windows(spec)}")
    scaling = _scaling(spec.rope)
    lines.append(f"context       {spec.context_length} tokens{scaling}")
    if spec.experts is None:
        return [*lines, f"feed-forward  dense, width {spec.feed_forward_width}"]
    if spec.n_dense_layers:
        first, width = _layers(spec.n_dense_layers), spec.feed_forward_width
        lines.append(f"feed-forward  dense in the first {first}, width {width}; then experts")
    return [*lines, *_experts(spec.experts)]


def type_lines(tensors: ModelTensors) -> list[str]:
    """The types of the routed experts' matrices, in how many layers each mixture is."""
    mixtures = Counter(
        tuple(matrix.type for matrix in one.matrices) for one in tensors.expert_layers
    )
    lines = []
    for (gate, up, down), n_layers in mixtures.most_common():
        pair = f"gate and up {gate}" if gate == up else f"gate {gate}, up {up}"
        types = gate if gate == up == down else f"{pair}, down {down}"
        lines.append(f"expert types  {types}" + _in_layers(n_layers, len(mixtures)))
    return lines


def _attention(spec: ModelSpec) -> str:
    if spec.latent is not None:
        latent = spec.latent
        queries = f", queries to {latent.q_rank}" if latent.q_rank else ""
        return (
            f"latent, {spec.n_heads} heads of {latent.query_dim}; keys and values of a token "
            f"compressed to {latent.row} numbers{queries}"
        )
    n_kv = spec.n_kv_heads
    kind = "grouped" if n_kv < spec.n_heads else "full"
    extras = {
        "normed q and k": spec.qk_norm != "none",
        "biases": spec.qkv_bias,
        "sinks": spec.sinks,
    }
    named = "".join(f", {name}" for name, present in extras.items() if present)
    return f"{kind}, {spec.n_heads} heads of {spec.head_dim}, {n_kv} for keys and values{named}"


def _windows(spec: ModelSpec) -> str:
    """Layers that see only the last tokens."""
    counts = Counter(window for window in spec.windows if window)
    parts = [f"the last {window} tokens{_in_layers(n, 2)}" for window, n in counts.items()]
    n_whole = spec.n_layers - sum(counts.values())
    return (
        "a token sees " + ", ".join(parts) + (f", all{_in_layers(n_whole, 2)}" if n_whole else "")
    )


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
    return ", ".join(parts)


def _layers(count: int) -> str:
    return "layer" if count == 1 else f"{count} layers"


def _in_layers(count: int, of: int) -> str:
    """How often one of several kinds is; nothing where there is only one kind."""
    return f" in {count} layer{'s' * (count != 1)}" if of > 1 else ""
