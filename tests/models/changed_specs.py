"""Specs like others, with something changed in all of their layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vkmoe.facts import FeedForward, LayerSpec, Mixer, ModelSpec


def of_layers(spec: ModelSpec, mixer: Mixer, *blocks: FeedForward) -> ModelSpec:
    """The same model with as many layers as there are blocks, all with one mixer."""
    return replace(spec, layers=tuple(LayerSpec(mixer, block) for block in blocks))


def with_mixer(spec: ModelSpec, **changes: Any) -> ModelSpec:
    layers = [replace(x, mixer=replace(x.mixer, **changes)) for x in spec.layers]
    return replace(spec, layers=tuple(layers))


def with_experts(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """Every layer of `spec` has experts."""
    layers = [replace(x, feed_forward=replace(x.feed_forward, **changes)) for x in spec.layers]
    return replace(spec, layers=tuple(layers))
