"""Dispatches of a layer, read off the printed program of a loaded file."""

from __future__ import annotations

import re

import pytest

from tests.engine.tiny import ONE_OF_EACH, architecture, model_path
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine

pytestmark = pytest.mark.usefixtures("one_device")

JOINED = ["attention", "attention combine"]
GROUPED = ["qkv", *JOINED, "output"]
GATED = ["qkv", "qkv", *JOINED, "gate", "output"]  # three matrices at most share a dispatch
DELTA = ["qkv", "qkv", "inputs", "delta", "gate", "output"]
LATENT = ["q/kv", "absorbed", *JOINED, "values", "output"]
COMPRESSED = ["q/kv", "q norm", "q", *LATENT[1:]]  # with compressed queries
DENSE = ["gate/up", "down"]
EXPERTS = ["router", "top-k", *DENSE]
SHARED = ["router", "shared gate/up", "top-k", *DENSE, "shared down"]
NORMED = [*GROUPED, "post norm"]  # behind each block
BESIDE = [
    *("router norm", "router", "top-k", *DENSE, "beside norm", "beside gate/up", "beside down"),
    "post norm",
]
INPUT = ["input gate", "gated inputs", "input output", "input post norm"]
ALL_INPUTS = ["rows of layers", "projected", "inputs"]
# What layers take whose matrices have one type each. docs/models.md has the numbers.
LAYERS = {
    "qwen3": [GROUPED + DENSE],
    "qwen35": [DELTA + DENSE, GATED + DENSE],
    "qwen3moe": [GROUPED + EXPERTS],
    "olmoe": [GROUPED + EXPERTS],
    "llama": [GROUPED + DENSE, GROUPED + EXPERTS],
    "qwen2moe": [GROUPED + SHARED],
    "gpt-oss": [GROUPED + EXPERTS],
    "qwen35moe": [DELTA + SHARED, GATED + SHARED],
    "qwen3next": [DELTA + SHARED, GATED + SHARED],
    "glm4moe": [GROUPED + DENSE, GROUPED + SHARED],
    "ernie4_5-moe": [GROUPED + DENSE, GROUPED + EXPERTS, GROUPED + SHARED],
    "dots1": [GROUPED + DENSE, GROUPED + SHARED],
    "minimax-m2": [GROUPED + EXPERTS],
    "bailingmoe2": [GROUPED + DENSE, GROUPED + SHARED],
    "hunyuan-moe": [GROUPED + SHARED],
    "hy_v3": [GROUPED + DENSE, GROUPED + SHARED],
    "deepseek32": [COMPRESSED + DENSE, COMPRESSED + SHARED],
    "glm-dsa": [COMPRESSED + DENSE, COMPRESSED + SHARED],
    "gemma4": [
        *(NORMED + DENSE + ["post norm"], NORMED + BESIDE),
        NORMED + DENSE + ["post norm", *INPUT],
    ],
    "mistral4": [COMPRESSED + DENSE, COMPRESSED + SHARED],
    "deepseek2": [LATENT + DENSE, LATENT + SHARED, COMPRESSED + DENSE, COMPRESSED + SHARED],
}
LINE = re.compile(r"[| ] layer (\d+) (.+?) +\S+ +\[\d+ \d+ \d+\] \(")


def printed_layers(engine: Engine) -> list[list[str]]:
    """The labels of each layer's dispatches, in order."""
    layers: list[list[str]] = [[] for _ in range(engine.spec.n_layers)]
    for line in str(engine.program()).splitlines():
        if found := LINE.match(line):
            layers[int(found[1])].append(found[2])
    return layers


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_layer_takes_the_dispatches_of_its_architecture(name: str) -> None:
    kinds = LAYERS[architecture(name)]
    with Engine(model_path(name), EngineConfig()) as engine:
        layers, n_dispatches = printed_layers(engine), len(engine.program().dispatches())
        n_others = 5 + (engine.spec.logit_cap > 0)
        n_others += len(ALL_INPUTS) * (engine.spec.input_width > 0)
    assert all(layer in kinds for layer in layers), layers
    # embed, inputs of layers, logits, their cap, two for the candidates, finish
    assert n_dispatches == sum(map(len, layers)) + n_others
