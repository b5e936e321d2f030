"""Dispatches of a layer, read off the printed program of a loaded file; kernels compiled for it."""

from __future__ import annotations

import re

import pytest

from tests.engine.tiny import ONE_OF_EACH, architecture, model_path
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.gpu import backend
from vkmoe.gpu.kernels import spirv_words
from vkmoe.llm import demo_model_path

JOINED = ["attention", "attention combine"]
GROUPED = ["qkv", *JOINED, "output"]
LATENT = ["q/kv", "absorbed", *JOINED, "values", "output"]
COMPRESSED = ["q/kv", "q norm", "q", *LATENT[1:]]  # with compressed queries
DENSE = ["gate/up", "down"]
EXPERTS = ["router", "top-k", *DENSE]
SHARED = ["router", "shared gate/up", "top-k", *DENSE, "shared down"]
# What layers take whose matrices have one type each. docs/models.md has the numbers.
LAYERS = {
    "qwen3": [GROUPED + DENSE],
    "qwen3moe": [GROUPED + EXPERTS],
    "olmoe": [GROUPED + EXPERTS],
    "llama": [GROUPED + DENSE, GROUPED + EXPERTS],
    "qwen2moe": [GROUPED + SHARED],
    "gpt-oss": [GROUPED + EXPERTS],
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
        layers, n_dispatches = printed_layers(engine), engine.program().n_dispatches
    assert all(layer in kinds for layer in layers), layers
    # embed, logits, two for the candidates, finish
    assert n_dispatches == sum(map(len, layers)) + 5


def test_kernels_are_compiled_for_the_types_of_the_file_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The demo model has five types; kernels of the others would cost their users seconds."""
    compiled: list[str] = []

    def noted(name: str) -> bytes:
        compiled.append(name)
        return spirv_words(name)

    monkeypatch.setattr(backend, "spirv_words", noted)
    with Engine(demo_model_path(), EngineConfig()) as engine:
        matrices = [info for info in engine.file.tensors.values() if len(info.shape) > 1]
        types = {info.type for info in matrices}
    weights = ("embed", "matvec", "expert")
    of_weights = {name.partition(".")[2] for name in compiled if name.startswith(weights)}
    assert {kind.partition("+")[0].upper() for kind in of_weights} == types
    assert len(types) == 5 and len(compiled) < 25
