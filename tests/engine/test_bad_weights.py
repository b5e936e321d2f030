"""NaN and infinite weights: a clear end, valid expert ids, and nothing left behind for later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.tiny import Tensor, rewrite
from tools.make_synthetic_model import make
from vkmoe.errors import VkmoeError
from vkmoe.gpu.transfer import Transfer
from vkmoe.llm import LLM

pytestmark = pytest.mark.usefixtures("one_device")

N_EXPERTS = 8
PROMPT = [5, 6, 7, 8]
# Where the scales of a block lie: bytes per block, bytes of the first f16 scale.
SCALES = {"Q4_K": (144, 0), "Q6_K": (210, 208), "F32": (4, 0)}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic model of two layers, Q4_K and Q6_K with an F32 router."""
    path = tmp_path_factory.mktemp("synthetic") / "tiny.gguf"
    make("tiny", path, None, "q4_k_m", 3)
    return path


def poison(tensor: Tensor, value: float) -> Tensor:
    """The tensor with its first block's scale (or weight) replaced in every row."""
    block_bytes, at = SCALES[tensor.type]
    dtype = np.float32 if tensor.type == "F32" else np.float16
    data = tensor.data.copy()
    n_rows = int(np.prod(tensor.shape[:-1]))
    rows = data.reshape(n_rows, -1)
    assert rows.shape[1] % block_bytes == 0
    raw = np.array([value], dtype).view(np.uint8)
    rows[:, at : at + raw.size] = raw
    return tensor._replace(data=data)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name",
    ["token_embd", "blk.0.attn_q", "blk.0.attn_v", "blk.1.attn_output", "blk.0.ffn_gate_exps",
     "blk.1.ffn_down_exps", "output_norm", "output"],
)  # fmt: skip
@pytest.mark.sample(6)
def test_a_damaged_tensor_ends_the_generation(
    sound: Path, name: str, value: float, tmp_path: Path
) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        key = f"{name}.weight"
        tensors[key] = poison(tensors[key], value)

    path = rewrite(sound, tmp_path / "damaged.gguf", change)
    with LLM(path, ctx_size=32) as llm:
        with pytest.raises(VkmoeError, match="NaN") as caught:
            llm.generate(PROMPT, max_tokens=4)
        assert "\n" not in str(caught.value) and caught.value.hint
        check_expert_ids(llm)
        assert llm.last_statistics is not None


def check_expert_ids(llm: LLM) -> None:
    routing = llm.engine.routing()
    assert routing.shape == (2, 2) and (routing < N_EXPERTS).all()
    engine, words = llm.engine, llm.engine.workspace.routing
    with Transfer(engine.device) as transfer:
        ids = transfer.read(engine._backend.tensor(words), 0, words.n_bytes).view(np.uint32)[:2]
    assert (ids < N_EXPERTS).all(), "an id that would become an address"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_damaged_router_still_chooses_experts(sound: Path, value: float, tmp_path: Path) -> None:
    """The top-k kernel counts NaN as minus infinity and keeps weights finite."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        key = "blk.0.ffn_gate_inp.weight"
        tensors[key] = poison(tensors[key], value)

    with LLM(rewrite(sound, tmp_path / "damaged.gguf", change), ctx_size=32) as llm:
        llm.generate(PROMPT, max_tokens=4)
        check_expert_ids(llm)
        assert (np.sort(llm.engine.routing(), axis=1)[:, 0] != llm.engine.routing().max(1)).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_damaged_token_does_not_poison_the_next_prompt(
    sound: Path, value: float, tmp_path: Path
) -> None:
    bad = 9

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        table = tensors["token_embd.weight"]
        row = Tensor(table.type, (1, table.shape[1]), table.data.reshape(table.shape[0], -1)[bad])
        data = table.data.reshape(table.shape[0], -1).copy()
        data[bad] = poison(row, value).data
        tensors["token_embd.weight"] = table._replace(data=data)

    with LLM(sound, ctx_size=32) as llm:
        wanted = llm.generate([5, 6, 7, 8], max_tokens=4, temp=0, ignore_eos=True).token_ids
    assert bad not in wanted
    with LLM(rewrite(sound, tmp_path / "damaged.gguf", change), ctx_size=32) as llm:
        for prompt in ([5, 6, bad], [5, bad, 7, 8], [bad] * 20):
            with pytest.raises(VkmoeError, match="NaN"):
                llm.generate(prompt, max_tokens=4)
            found = llm.generate([5, 6, 7, 8], max_tokens=4, temp=0, ignore_eos=True).token_ids
            assert found == wanted


def test_rows_of_logits_show_the_damage(sound: Path, tmp_path: Path) -> None:
    """`logits` computes; it is not for it to judge."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["output.weight"] = poison(tensors["output.weight"], float("nan"))

    with LLM(rewrite(sound, tmp_path / "damaged.gguf", change), ctx_size=32) as llm:
        assert np.isnan(llm.logits([1, 2])).all()
