"""What a trace of the routing says of the model it was recorded with."""

from __future__ import annotations

from vkmoe.experts.study.trace import TraceHeader
from vkmoe.facts import ModelSpec
from vkmoe.models.tensors import ModelTensors
from vkmoe.placement.sizes import weight_bytes

__all__ = ["trace_header"]


def trace_header(spec: ModelSpec, tensors: ModelTensors, n_prompt_tokens: int = 0) -> TraceHeader:
    """The header of a trace. Must hold: the model has experts."""
    assert spec.experts is not None, spec.name
    layers = [index for index, layer in enumerate(tensors.layers) if layer.router is not None]
    return TraceHeader(
        spec.name,
        spec.architecture,
        tuple(layers),
        spec.experts.n_experts,
        spec.experts.n_used,
        weight_bytes(tensors).spans,
        n_prompt_tokens,
    )
