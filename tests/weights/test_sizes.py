"""The bytes of weights, spelled out for the demo model, and what is said of conversions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.other_types import UNEVEN, of_types
from tests.engine.tiny import ONE_OF_EACH, Tensor, model_path, rewrite
from tests.gpu.invented import DISCRETE_12, GIB, LAVAPIPE, MIB
from tests.placement.invented_models import SCRATCH, SPEC, expert_bytes, plan
from vkmoe.config import EngineConfig
from vkmoe.errors import OutOfMemoryError
from vkmoe.facts import Conversion, DeviceInfo, MemoryPlan, WeightBytes
from vkmoe.gguf_file import TensorInfo, open_gguf
from vkmoe.gpu.arena import ALIGNMENT, Arena, Placement
from vkmoe.gpu.device import Device
from vkmoe.llm import demo_model_path
from vkmoe.models import open_model, read_spec
from vkmoe.models.tensors import ModelTensors, read_tensors
from vkmoe.placement.decide import decide
from vkmoe.quants import TYPES, device_row_bytes
from vkmoe.weights.loader import load_weights
from vkmoe.weights.sizes import (
    CONVERTING_BYTES,
    conversion_line,
    conversions,
    expert_shape,
    growth_words,
    weight_bytes,
)


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


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device() as opened:
        yield opened


@pytest.mark.parametrize("name", [*ONE_OF_EACH, "converted"])
def test_the_loader_places_the_trunk_piece_by_piece_as_planned(
    monkeypatch: pytest.MonkeyPatch, name: str, device: Device, tmp_path: Path
) -> None:
    """Where chunks end depends on the order, so the plan must know it."""
    placed: list[int] = []
    place = Arena.place

    def noted(self: Arena, n_bytes: int) -> Placement:
        if vars(self)["_name"] == "weights":
            placed.append(rounded(n_bytes))
        return place(self, n_bytes)

    monkeypatch.setattr(Arena, "place", noted)
    path = (
        rewrite(model_path("moe_plain"), tmp_path / "m.gguf", of_types(UNEVEN))
        if name == "converted"
        else model_path(name)
    )
    with open_model(path) as file:
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


EXPERTS = Conversion("IQ2_S", "Q8_0", True, 144, 30_000_000_000, 9_609 * MIB, 30_400 * MIB)
TRUNK = Conversion("Q5_1", "Q8_0", False, 1, 200_000_000, 143 * MIB, 203 * MIB)


@pytest.fixture
def tensors(tmp_path: Path) -> Iterator[ModelTensors]:
    path = rewrite(model_path("moe_plain"), tmp_path / "m.gguf", of_types(UNEVEN))
    with open_gguf(path) as file:
        yield read_tensors(file, read_spec(file))


def planned(
    info: DeviceInfo, weights: WeightBytes, ram: int, config: EngineConfig | None = None
) -> MemoryPlan:
    config = config or EngineConfig()
    return plan(config, SPEC, info, weights, SCRATCH, ram)


# ----- what there is -----


def test_every_converted_tensor_is_counted_once(tensors: ModelTensors) -> None:
    """By type, experts apart."""
    found = {(item.file_type, item.of_experts): item for item in conversions(tensors)}
    stack = 8 * 32 * 64  # weights of all experts' gate, up or down
    wanted = {
        ("Q5_0", False): (1, 300 * 64),
        ("Q5_1", False): (2, 2 * 128 * 64),
        ("F64", False): (2, 2 * 64 * 128),
        ("Q5_0", True): (2, 2 * stack),
        ("Q5_1", True): (2, 2 * stack),
        ("Q4_1", True): (2, 2 * stack),
    }
    assert {key: (item.n_tensors, item.n_weights) for key, item in found.items()} == wanted
    for (kind, _), item in found.items():
        block = TYPES[kind]
        assert item.loaded_type == "Q8_0"
        assert item.file_bytes == item.n_weights // block.block_weights * block.block_bytes
        assert item.n_weights / 32 * 34 <= item.loaded_bytes <= item.n_weights * 1.5


def test_the_loaded_bytes_are_those_that_are_placed(tensors: ModelTensors) -> None:
    """Rounding apart: of the experts, and of the trunk's largest piece."""
    sizes = weight_bytes(tensors)
    experts = sum(item.loaded_bytes for item in sizes.conversions if item.of_experts)
    assert experts <= sizes.experts < experts * 1.1
    assert sizes.pieces[0] == 24_064, "300 rows of 80 bytes, in whole 256"


def test_tensors_of_single_experts_are_counted_one_by_one(tmp_path: Path) -> None:
    def change(metadata: dict[str, object], tensors: dict[str, Tensor]) -> None:
        of_types({name: "Q5_0" for name in tensors if ".ffn_gate." in name})(metadata, tensors)

    with open_gguf(rewrite(model_path("mixtral_one_by_one"), tmp_path / "m.gguf", change)) as file:
        spec = read_spec(file)
        (found,) = conversions(read_tensors(file, spec))
        assert spec.experts is not None and found.of_experts
        assert found.n_tensors == spec.n_layers * spec.experts.n_experts == 6


def test_tied_embeddings_are_counted_once(tmp_path: Path) -> None:
    change = of_types({"token_embd.weight": "Q5_0"})
    with open_gguf(rewrite(model_path("dense_tied"), tmp_path / "m.gguf", change)) as file:
        (found,) = conversions(read_tensors(file, read_spec(file)))
        assert found.n_tensors == 1


# ----- in words -----


def test_one_line_says_what_and_how_much() -> None:
    assert conversion_line([TRUNK], False) == (
        "converting 1 tensor of Q5_1 to Q8_0: 143 MiB -> 203 MiB"
    )
    assert conversion_line([EXPERTS, TRUNK], False) == (
        "converting 144 tensors of IQ2_S to Q8_0 and 1 of Q5_1 to Q8_0: 9,752 MiB -> 30,603 MiB"
    )
    assert conversion_line([], True) == ""


def test_experts_are_converted_again_where_few_have_homes() -> None:
    assert conversion_line([EXPERTS], True).endswith(
        "; experts again each time they are read from the file"
    )
    assert conversion_line([TRUNK], True).endswith("203 MiB"), "no expert is converted"


def test_growth_is_told_and_shrinking_is_not() -> None:
    assert growth_words([EXPERTS, TRUNK]) == (
        "20,851 MiB more than in the file, as Q8_0 instead of IQ2_S and Q5_1"
    )
    assert growth_words([replace(TRUNK, file_type="F64", file_bytes=GIB)]) == ""
    assert growth_words([]) == ""


# ----- in plans -----


@pytest.mark.parametrize("info", [DISCRETE_12, LAVAPIPE], ids=lambda info: info.name)
def test_a_plan_has_a_line_for_converting(info: DeviceInfo) -> None:
    """What it takes while it goes on; its reason is what becomes of the weights."""
    weights = replace(expert_bytes(2_971_136 // 8), conversions=(TRUNK,))
    made = planned(info, weights, 32 * GIB)
    (line,) = [line for line in made.lines if line.item == "converting weights"]
    assert (line.place, line.n_bytes) == ("host", CONVERTING_BYTES)
    assert line.reason == "60 MiB more than in the file, as Q8_0 instead of Q5_1"


def test_what_cannot_fit_is_refused_with_figures_and_the_conversion_as_a_reason() -> None:
    """Trunk or experts; without a conversion nothing is said of one."""
    trunk = WeightBytes((14 * GIB,), 0, conversions=(replace(TRUNK, loaded_bytes=13 * GIB),))
    experts = replace(expert_bytes(9_000_000), conversions=(EXPERTS,))
    one = EngineConfig(expert_slots=128)
    for weights, config, needs in (
        (trunk, None, ("14,", "weights used by every token 14,336 MiB")),
        (experts, one, ("--expert-slots 128",)),
    ):
        with pytest.raises(OutOfMemoryError) as caught:
            planned(DISCRETE_12, weights, 64 * GIB, config)
        message = str(caught.value)
        assert "\n" not in message and all(word in message for word in needs)
        assert "MiB more than in the file, as Q8_0 instead of " in message
        assert "a type that vkmoe runs as it is" in caught.value.hint
        with pytest.raises(OutOfMemoryError) as caught:
            planned(DISCRETE_12, replace(weights, conversions=()), 64 * GIB, config)
        assert "file" not in str(caught.value) + caught.value.hint
