"""Models with types of old files, and with a tensor for each expert, from file to logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.caches import Rows, assert_same_bits, rows
from tests.engine.other_types import UNEVEN, of_types, one_by_one
from tests.engine.tiny import Tensor, model_path, rewrite
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import VkmoeError
from vkmoe.llm import LLM

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
