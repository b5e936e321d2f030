"""The bytes of weights, spelled out for the demo model; and that a plan needs no loader."""

from __future__ import annotations

import subprocess
import sys

from vkmoe.gguf_file import TensorInfo, open_gguf
from vkmoe.llm import demo_model_path
from vkmoe.models import read_spec
from vkmoe.models.tensors import ModelTensors, read_tensors
from vkmoe.placement.sizes import expert_shape, weight_bytes
from vkmoe.quants import device_row_bytes


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


def test_an_expert_s_span_is_gate_up_down() -> None:
    tensors, _ = demo_tensors()
    for layer in tensors.layers:
        shape = expert_shape(layer)
        assert shape.gate.offset == 0
        assert shape.up.offset == rounded(matrix_bytes(layer.gate))
        assert shape.down.offset == shape.up.offset + rounded(matrix_bytes(layer.up))
        assert shape.span_bytes == shape.down.offset + rounded(matrix_bytes(layer.down))


def test_deciding_does_not_load_the_loader() -> None:
    """`vkmoe info` plans and loads nothing."""
    code = "import sys, vkmoe.placement.decide; print('vkmoe.placement.loader' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
