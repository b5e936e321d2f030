"""Slots by what they gain: each kind of file splits those of the demo model, and moves no bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.experts.records.test_importance import written
from vkmoe.cli import main
from vkmoe.config import EngineConfig
from vkmoe.experts.decide.token_table import History
from vkmoe.experts.records.profile import profile_text, profiled_model
from vkmoe.experts.records.trace import TraceWriter
from vkmoe.llm import LLM, demo_model_path
from vkmoe.models import open_model
from vkmoe.weights.sizes import trace_header

pytestmark = pytest.mark.usefixtures("one_device")

TOKENS = [5, 17, 3, 900, 41, 8, 77, 12, 5, 17]
N_LAYERS, N_EXPERTS, N_USED = 6, 32, 4
OPTIONS: dict[str, Any] = {"device": "vulkan", "ctx_size": 64, "expert_cache": "9MiB"}


def skewed() -> NDArray[np.float64]:
    """Uses that are the more unequal the later the layer: the first uses all experts alike."""
    ranks = np.arange(1, N_EXPERTS + 1)
    return 100.0 * ranks[None, :] ** -np.linspace(0, 2.0, N_LAYERS)[:, None]


def _profile(path: Path) -> None:
    with open_model(demo_model_path()) as model:
        tensors = [tensor for layer in model.expert_tensors for tensor in layer]
        described = profiled_model(model.spec, N_LAYERS, tensors)
    path.write_text(profile_text(described, History(skewed().reshape(-1))))


def _importance(path: Path) -> None:
    written(path, skewed().astype(np.float32))


def _trace(path: Path) -> None:
    """Tokens whose experts are drawn by those uses."""
    random, likings = np.random.default_rng(0), np.log(skewed())
    with open_model(demo_model_path()) as model:
        header = trace_header(model.spec, model.tensors)
    with TraceWriter(path, header) as writer:
        for _ in range(1500):
            scores = likings + random.gumbel(size=likings.shape)
            writer.write(np.argsort(-scores, axis=1)[:, :N_USED].astype(np.uint32), True)


KINDS: dict[str, Callable[[Path], None]] = {
    "profile": _profile,
    "importance file": _importance,
    "trace": _trace,
}


class Found(NamedTuple):
    """What a run has."""

    slots: tuple[int, ...]
    held: list[list[int]]  # experts of each layer at the start
    logits: NDArray[np.float32]


def found_with(**options: Any) -> Found:
    with LLM(config=EngineConfig(**OPTIONS, **options)) as llm:
        engine = llm.engine
        assert engine.cache is not None
        held = [np.flatnonzero(row).tolist() for row in engine.cache.residency.present]
        engine.run_tokens(TOKENS, 0)
        engine.cache.residency.check_integrity()
        return Found(engine.plan.expert_slots, held, engine.full_logits())


@pytest.fixture(scope="module")
def even() -> Found:
    found = found_with()
    assert max(found.slots) - min(found.slots) <= 1 and found.held == [[]] * N_LAYERS
    return found


def planned_with(path: Path, capsys: pytest.CaptureFixture[str]) -> list[int]:
    """The slots that `vkmoe plan` says, and `vkmoe info` too."""
    options = ["--device", "vulkan", "--expert-cache", "9MiB", "-c", "64"]
    options += ["--expert-profile", str(path)]
    assert main(["plan", *options, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    slots: list[int] = document["expert_slots"]
    words = f"expert slots, {min(slots)} to {max(slots)} of {N_EXPERTS} in each layer"
    (line,) = [line for line in document["lines"] if line["item"] == words]
    assert line["reason"] == "as --expert-cache, split by --expert-profile"
    assert main(["info", *options]) == 0
    assert words in capsys.readouterr().out
    return slots


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(1)
def test_a_skewed_file_splits_slots_fills_them_and_moves_no_bit(
    kind: str, even: Found, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first layers, which use all alike, have most slots; the plan command says the same."""
    path = tmp_path / "uses"
    KINDS[kind](path)
    planned = planned_with(path, capsys)  # before the run: its end writes the profile
    found = found_with(expert_profile=str(path))
    assert planned == list(found.slots)
    assert min(found.slots[:2]) > max(found.slots[-2:]) + 3 and min(found.slots) >= N_USED
    assert abs(sum(found.slots) - sum(even.slots)) <= 1, "they are of one size"
    assert np.array_equal(found.logits, even.logits)
    assert [len(held) for held in found.held] == list(found.slots), "as many as there are slots"
    skewed_ones = found.held[-1][:N_USED]
    assert skewed_ones == list(range(N_USED)), "the most used of the last layer"
