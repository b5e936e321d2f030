"""Models with types of old files, and with a tensor for each expert, from file to logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.caches import Rows, assert_same_bits, rows
from tests.engine.other_types import UNEVEN, of_types, one_by_one
from tests.engine.tiny import Tensor, model_path, retyped, rewrite
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import VkmoeError
from vkmoe.llm import LLM, demo_model_path

TOKENS = [(7 * i * i + 3) % 299 for i in range(12)]
# All at home, or in and out of a pool over the file and of slots over that.
PLACES: dict[str, dict[str, Any]] = {
    "resident": {},
    "pool and slots": {"host_pool": "64KiB", "expert_slots": 2},
}
pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three types, in both layers and in the embeddings."""
    target = tmp_path_factory.mktemp("types") / "old.gguf"
    return rewrite(model_path("moe_plain"), target, of_types(UNEVEN))


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each expert in tensors of its own."""
    target = tmp_path_factory.mktemp("single") / "single.gguf"
    return rewrite(model_path("mixtral_plain"), target, one_by_one)


def logits(path: Path, **options: Any) -> Rows:
    with Engine(path, EngineConfig(ctx_size=32, **options), checks=True) as engine:
        if "host_pool" in options:
            assert engine.plan.host_slots and engine.plan.executor == "stepped"
        return rows(engine, TOKENS)


# ----- types of old files -----


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("name", "value"), [("blk.1.ffn_down_exps.weight", np.nan), ("blk.0.attn_q.weight", np.inf)]
)
def test_damaged_weights_end_the_generation_and_not_the_process(
    old: Path, name: str, value: float, tmp_path: Path
) -> None:
    """A scale that is no number, in every block."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        blocks = tensors[name].data.reshape(-1, {"Q4_1": 20, "Q5_1": 24}[tensors[name].type]).copy()
        blocks[:, :2] = np.array([value], np.float16).view(np.uint8)
        tensors[name] = tensors[name]._replace(data=blocks.reshape(-1))

    path = rewrite(old, tmp_path / "bad.gguf", change)
    with LLM(path, ctx_size=32) as llm, pytest.raises(VkmoeError, match="NaN"):
        llm.generate(TOKENS[:4], max_tokens=2)


# ----- matrices with a scale of their own -----


def scale_matrices(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Two layers of the demo model in NVFP4, whose matrices have scales, experts each its own."""
    rng = np.random.default_rng(9)
    metadata["qwen3moe.block_count"] = 2
    for name in [name for name in tensors if name.startswith("blk.") and name[4] not in "01"]:
        del tensors[name]
    for name, tensor in list(tensors.items()):
        if len(tensor.shape) < 2 or "ffn_gate_inp" in name:
            continue
        n_scales = tensor.shape[0] if "_exps" in name else 1
        scales = rng.uniform(0.5, 2.0, n_scales).astype("<f4")
        tensors[name] = retyped(tensor, "NVFP4")
        for end in ("scale", "input_scale"):  # the second one changes nothing
            scale_name = name.replace("weight", end)
            tensors[scale_name] = Tensor("F32", (n_scales,), scales.view(np.uint8))


def multiply_scales(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Decode all matrices, and multiply them by their scales."""
    for name in [name for name in tensors if name.endswith("weight")]:
        values = retyped(tensors[name], "F32")
        scales = tensors.pop(name.replace("weight", "scale"), None)
        tensors.pop(name.replace("weight", "input_scale"), None)
        if scales is not None:
            rows = values.data.view("<f4").reshape(scales.shape[0], -1)
            scaled = rows * scales.data.view("<f4")[:, None]
            values = values._replace(data=scaled.view(np.uint8).reshape(-1))
        tensors[name] = values


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("scaled") / "scaled.gguf"
    return rewrite(demo_model_path(), target, scale_matrices)


@pytest.fixture(scope="module")
def multiplied(scaled: Path) -> Rows:
    return logits(rewrite(scaled, scaled.with_name("f32.gguf"), multiply_scales))


@pytest.mark.parametrize(
    ("places", "most"),
    [("resident", 1e-3), ("small pool and slots", 1e-3), ("CPU", 2e-2), ("CPU and GPU", 2e-2)],
)
def test_scales_of_matrices_and_of_experts_count(
    scaled: Path, multiplied: Rows, places: str, most: float
) -> None:
    """On a CPU activations are rounded to 8 bits."""
    options: dict[str, dict[str, Any]] = {
        "resident": {},
        "small pool and slots": {"host_pool": "4MiB", "expert_slots": 2},
        "CPU": {"device": "cpu"},
        "CPU and GPU": {"n_cpu_moe": 1},
    }
    found = logits(scaled, **options[places])
    assert np.linalg.norm(found - multiplied) <= most * np.linalg.norm(multiplied)


# ----- a tensor for each expert -----


@pytest.fixture(scope="module")
def stacked() -> Rows:
    return logits(model_path("mixtral_plain"))


@pytest.mark.parametrize("places", PLACES)
def test_experts_in_tensors_of_their_own_give_the_same_logits(
    single: Path, stacked: Rows, places: str
) -> None:
    """As stacked ones, to the bit."""
    assert_same_bits(logits(single, **PLACES[places]), stacked)


def test_a_profile_of_single_experts_is_written_and_taken(single: Path, tmp_path: Path) -> None:
    """And is not that of another file, whose experts may be others."""
    profile = str(tmp_path / "profile")
    options: dict[str, Any] = {"ctx_size": 32, "expert_slots": 3, "expert_profile": profile}
    with LLM(single, **options) as llm:
        llm.generate(TOKENS, max_tokens=4, ignore_eos=True)
    with LLM(single, **options) as llm:
        llm.engine.run_token(TOKENS[0], 0)
        assert llm.engine.history().counts.sum() > 2
    with pytest.raises(VkmoeError, match="belongs to another model"):
        LLM(model_path("mixtral_plain"), **options)
