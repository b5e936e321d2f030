"""The bytes of weights, spelled out for the demo model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.engine.tiny import ONE_OF_EACH, model_path
from tools.pipelines import Described
from vkmoe.config import EngineConfig
from vkmoe.gguf_file import TensorInfo, open_gguf
from vkmoe.gpu.arena import ALIGNMENT, Arena, Placement
from vkmoe.gpu.device import Device
from vkmoe.llm import demo_model_path
from vkmoe.models import open_model, read_spec
from vkmoe.models.tensors import ModelTensors, read_tensors
from vkmoe.placement.decide import decide
from vkmoe.quants import HAS_KERNEL, device_row_bytes
from vkmoe.weights.loader import load_weights
from vkmoe.weights.sizes import expert_shape, weight_bytes


def demo_tensors() -> tuple[ModelTensors, dict[str, TensorInfo]]:
    with open_gguf(demo_model_path()) as file:
        return read_tensors(file, read_spec(file)), dict(file.tensors)


def rounded(n_bytes: int) -> int:
    return -(-n_bytes // 256) * 256


def matrix_bytes(tensor: TensorInfo) -> int:
    """Of the last two dimensions: one expert's part of a stack of three."""
    return tensor.shape[-2] * device_row_bytes(tensor.type, tensor.shape[-1])


def test_weight_bytes_of_the_demo_model() -> None:
    """Every tensor of the file once: stacks expert by expert, gains as float32."""
    tensors, by_name = demo_tensors()
    trunk = experts = 0
    for tensor in by_name.values():
        if len(tensor.shape) == 3:
            experts += tensor.shape[0] * rounded(matrix_bytes(tensor))
        elif len(tensor.shape) == 2:
            trunk += rounded(matrix_bytes(tensor))
        else:
            trunk += rounded(4 * tensor.shape[0])
    sizes = weight_bytes(tensors)
    assert (sizes.trunk, sizes.experts) == (trunk, experts)
    assert trunk > 0 and experts > 0
    spans = [expert_shape(layer.block).span_bytes for layer in tensors.layers]
    assert list(sizes.spans) == spans and all(span % ALIGNMENT == 0 for span in spans)
    assert sum(sizes.pieces) == sizes.trunk


@pytest.mark.parametrize("kind", sorted(HAS_KERNEL))
def test_a_model_in_any_type_takes_what_its_file_takes(kind: str) -> None:
    """Of Qwen3-30B-A3B; rows and matrices are rounded up, by less than four in a hundred."""
    file = Described("qwen3-30b-a3b", 2).file(kind)
    experts, trunk = 0, 0
    for tensor in file.file.tensors.values():
        n_bytes = len(tensor.shape) > 1 and tensor.n_bytes
        experts, trunk = experts + n_bytes * ("_exps" in tensor.name), trunk + n_bytes
    sizes = weight_bytes(file.tensors)
    assert experts <= sizes.experts <= 1.04 * experts
    assert trunk <= sizes.trunk + sizes.experts <= 1.04 * trunk


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device() as opened:
        yield opened


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_loader_places_the_trunk_piece_by_piece_as_planned(
    monkeypatch: pytest.MonkeyPatch, name: str, device: Device
) -> None:
    """Where chunks end depends on the order, so the plan must know it."""
    placed: list[int] = []
    place = Arena.place

    def noted(self: Arena, n_bytes: int) -> Placement:
        if vars(self)["_name"] == "weights":
            placed.append(rounded(n_bytes))
        return place(self, n_bytes)

    monkeypatch.setattr(Arena, "place", noted)
    with open_model(model_path(name)) as file:
        made = decide(EngineConfig(ctx_size=16), file, device.info)
        load_weights(device, file, made.plan).close()
    on_device, _ = weight_bytes(file.tensors).trunk_pieces(0)
    assert tuple(placed) == on_device


def test_an_expert_s_span_is_gate_up_down() -> None:
    tensors, _ = demo_tensors()
    for layer in tensors.layers:
        shape = expert_shape(layer.block)
        gate, up, down = (matrix.parts[0] for matrix in layer.block.matrices)
        assert shape.gate.offset == 0
        assert shape.up.offset == rounded(matrix_bytes(gate))
        assert shape.down.offset == shape.up.offset + rounded(matrix_bytes(up))
        assert shape.span_bytes == shape.down.offset + rounded(matrix_bytes(down))


def test_deciding_does_not_load_the_loader() -> None:
    """`vkmoe info` plans and loads nothing."""
    code = "import sys, vkmoe.placement.plan; print('vkmoe.weights.loader' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
