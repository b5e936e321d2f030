"""Importance files of llama.cpp: their counts of experts warm a cache; nothing writes to them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.tiny import model_path
from vkmoe.config import EngineConfig
from vkmoe.errors import VkmoeError
from vkmoe.experts.records.importance import is_importance_file, read_importance
from vkmoe.experts.records.keeper import record_outputs
from vkmoe.llm import LLM
from vkmoe.models import open_model

TINY = model_path("moe_plain")


def written(path: Path, counts: NDArray[np.float32], first_layer: int = 0) -> Path:
    """A file as llama-imatrix writes it: counts [n_layers, n_experts] and sums of squares."""
    writer = gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["wiki.txt"])
    writer.add_uint32("imatrix.chunk_count", 10)
    writer.add_uint32("imatrix.chunk_size", 512)
    for layer, row in enumerate(counts, first_layer):
        for part in ("down", "gate", "up"):
            name = f"blk.{layer}.ffn_{part}_exps.weight"
            writer.add_tensor(f"{name}.in_sum2", np.ones((len(row), 8), np.float32))
            writer.add_tensor(f"{name}.counts", row.reshape(-1, 1))
        writer.add_tensor(f"blk.{layer}.attn_q.weight.in_sum2", np.ones((1, 8), np.float32))
        writer.add_tensor(f"blk.{layer}.attn_q.weight.counts", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_counts_of_each_layer_are_read(tmp_path: Path) -> None:
    """As shares of what a run remembers; a layer that no token reached tells nothing."""
    counts = np.array([[30, 10, 0, 0], [0, 0, 0, 0], [1, 1, 1, 5]], np.float32)
    path = written(tmp_path / "imatrix.gguf", counts, first_layer=1)
    assert is_importance_file(path)
    found = read_importance(path, 3, 4, 2).reshape(3, 4)
    remembered = 2 * sum(0.5 ** (n / 64) for n in range(10_000))
    assert found[0] == pytest.approx(remembered * np.array([0.75, 0.25, 0, 0]), rel=1e-6)
    assert not found[1].any()
    assert found[2] == pytest.approx(remembered * np.array([1, 1, 1, 5]) / 8, rel=1e-6)


def test_a_cache_begins_with_the_most_used_and_the_file_stays(tmp_path: Path) -> None:
    with open_model(TINY) as model:
        experts, n_layers = model.spec.experts, len(model.spec.moe_layers)
    assert experts is not None
    counts = np.ones((n_layers, experts.n_experts), np.float32)
    counts[:, [2, 5]] = 100.0
    path = written(tmp_path / "imatrix.gguf", counts)
    before = path.read_bytes()
    config = EngineConfig(device="vulkan", expert_slots=2, expert_profile=str(path), ctx_size=64)
    assert record_outputs(config) == []
    with LLM(TINY, config) as llm:
        assert llm.engine.cache is not None
        present = llm.engine.cache.residency.present
        assert [np.flatnonzero(row).tolist() for row in present] == [[2, 5]] * n_layers
        llm.generate([1, 2, 3], max_tokens=2)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (np.ones((2, 4), np.float32), "2 layers with experts, this model has 3"),
        (np.ones((3, 5), np.float32), "5 counts of type F32 .* has 4 experts"),
        (np.full((3, 4), -1, np.float32), "below 0"),
        (np.full((3, 4), np.nan, np.float32), "below 0 or none"),
    ],
)
def test_files_of_other_models_and_damaged_ones_are_refused(
    tmp_path: Path, counts: NDArray[np.float32], words: str
) -> None:
    path = written(tmp_path / "imatrix.gguf", counts)
    with pytest.raises(VkmoeError, match=words) as caught:
        read_importance(path, 3, 4, 2)
    assert caught.value.hint


def test_a_model_is_no_importance_file(tmp_path: Path) -> None:
    assert not is_importance_file(TINY) and not is_importance_file(tmp_path)
    (tmp_path / "cut.gguf").write_bytes(TINY.read_bytes()[:100])
    assert not is_importance_file(tmp_path / "cut.gguf")
    assert not is_importance_file(tmp_path / "none.gguf")
