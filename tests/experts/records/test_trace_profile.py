"""A trace in place of a profile: its uses warm a cache, no run writes to it, others are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.tiny import model_path
from vkmoe.cli.cache.trace import _free_path
from vkmoe.config import EngineConfig
from vkmoe.errors import UsageError, VkmoeError
from vkmoe.experts.records.importance import remembered
from vkmoe.experts.records.keeper import record_outputs
from vkmoe.experts.records.profile import MOST_TRACED, load_profile, profiled_model
from vkmoe.experts.records.trace import TraceHeader, TraceWriter, is_trace_file
from vkmoe.llm import LLM
from vkmoe.models import open_model
from vkmoe.weights.sizes import trace_header

TINY = model_path("moe_plain")


def header() -> TraceHeader:
    with open_model(TINY) as model:
        return trace_header(model.spec, model.tensors)


def written(path: Path, tokens: list[list[int]], **changes: Any) -> Path:
    """A trace of the tiny model whose layers all use the same experts."""
    described = replace(header(), **changes)
    with TraceWriter(path, described) as writer:
        for ids in tokens:
            writer.write(np.array([ids] * described.n_layers, np.uint32), is_prompt=True)
    return path


def test_a_cache_begins_with_the_most_used_and_the_trace_stays(tmp_path: Path) -> None:
    path = written(tmp_path / "uses", [[2, 5], [5, 2], [2, 5], [0, 1]])
    before = path.read_bytes()
    config = EngineConfig(device="vulkan", expert_slots=2, expert_profile=str(path), ctx_size=64)
    assert is_trace_file(path) and record_outputs(config) == []
    with LLM(TINY, config) as llm:
        assert llm.engine.cache is not None
        present = llm.engine.cache.residency.present
        assert [np.flatnonzero(row).tolist() for row in present] == [[2, 5]] * len(present)
        llm.generate([1, 2, 3], max_tokens=2)
    assert path.read_bytes() == before


def test_uses_are_as_many_as_a_run_remembers_of_the_first_tokens(tmp_path: Path) -> None:
    """Those behind the first 8,192 are not read: here they are damaged."""
    path = written(tmp_path / "uses", [[0, 1]] * (MOST_TRACED // 2) + [[0, 2]] * (MOST_TRACED // 2))
    with path.open("a", encoding="utf-8") as file:
        file.write("no JSON\n")
    with open_model(TINY) as model:
        tensors = [tensor for layer in model.expert_tensors for tensor in layer]
        described = profiled_model(model.spec, len(model.expert_tensors), tensors)
        found = load_profile(path, described, model.spec.n_vocab)
    assert found is not None and found.tokens is None
    shares = np.zeros((described.n_moe_layers, described.n_experts))
    shares[:, :3] = 1.0, 0.5, 0.5
    assert found.counts == pytest.approx(remembered(shares, described.n_used))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "another"}, "name is 'another'"),
        ({"architecture": "olmoe"}, "architecture is 'olmoe'"),
        ({"n_experts": 64}, "number of experts is '64'"),
        ({"layer_numbers": (0,), "span_bytes": (1,)}, "number of MoE layers is '1'"),
    ],
)
def test_traces_of_other_models_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = written(tmp_path / "uses", [[0, 1]], **changes)
    with path.open("a") as file:
        file.write("damaged\n")  # what follows the header is not looked at
    with pytest.raises(VkmoeError, match=f"belongs to another model: its {words}") as caught:
        LLM(TINY, EngineConfig(device="cpu", expert_profile=str(path)))
    assert "vkmoe trace" in caught.value.hint


def test_a_trace_is_not_recorded_over_the_one_that_is_read(tmp_path: Path) -> None:
    path = str(written(tmp_path / "uses", [[0, 1]]))
    with pytest.raises(UsageError, match="which is read"):
        _free_path(path, True, None, EngineConfig(expert_profile=path))


def test_other_files_are_no_traces(tmp_path: Path) -> None:
    (tmp_path / "text").write_text('{"format": "vkmoe expert profile"}\n')
    (tmp_path / "list").write_text("[1]\n")
    for path in (TINY, tmp_path, tmp_path / "none", tmp_path / "text", tmp_path / "list"):
        assert not is_trace_file(path)
