"""The stored references: of the present demo file, consistent, and in agreement with each other.

Compares only stored arrays and files; what vkmoe computes is held against them elsewhere.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.tiny import KINDS, architecture

FIXTURES = Path(__file__).resolve().parent / "fixtures"
DEMO = FIXTURES.parent.parent / "vkmoe" / "data" / "demo.gguf"
TINY = sorted(path.stem for path in (FIXTURES / "models").glob("*.gguf"))


def stored(name: str) -> dict[str, NDArray[Any]]:
    """All arrays of one fixture file."""
    with np.load(FIXTURES / f"{name}.npz") as arrays:
        return dict(arrays)


def test_there_are_tiny_models() -> None:
    assert len(TINY) >= 7
    assert {name.split("_")[0] for name in TINY} <= set(KINDS)


@pytest.mark.parametrize("name", ["demo_transformers", "demo_llama_cpp"])
def test_demo_references_are_of_the_present_file(name: str) -> None:
    digest = hashlib.sha256(DEMO.read_bytes()).hexdigest()
    assert str(stored(name)["sha256"]) == digest, "run tools/make_demo_reference.py again"


def test_heldout_windows_count_a_thousand_positions() -> None:
    heldout = stored("demo_heldout")
    tokens, first = heldout["tokens"], int(heldout["first"])
    assert tokens[:, first + 1 :].size == 1000
    assert tokens.min() >= 0
    assert tokens.max() < 4096


def test_the_two_references_agree_on_the_decoded_weights() -> None:
    """transformers and llama.cpp share no code: what both say of F32 weights is the model."""
    hugging_face, llama_cpp = stored("demo_transformers"), stored("demo_llama_cpp")
    same = hugging_face["decoded_ids"][:, 0] == llama_cpp["decoded_ids"][:, 0]
    assert same.mean() >= 0.999
    nll = [float(arrays["decoded_nll"].mean()) for arrays in (hugging_face, llama_cpp)]
    assert nll[0] == pytest.approx(nll[1], rel=1e-5)


def test_int8_activations_stay_within_the_bounds_set_for_vkmoe() -> None:
    llama_cpp = stored("demo_llama_cpp")
    same = llama_cpp["quantised_ids"][:, 0] == llama_cpp["decoded_ids"][:, 0]
    assert same.mean() >= 0.97
    ratio = llama_cpp["quantised_nll"].mean() / llama_cpp["decoded_nll"].mean()
    assert abs(ratio - 1) <= 0.003


@pytest.mark.parametrize("name", TINY)
def test_tiny_model_and_its_logits_belong_together(name: str) -> None:
    arrays = stored(f"models/{name}")
    reader = gguf.GGUFReader(FIXTURES / "models" / f"{name}.gguf")
    n_vocab = len(reader.fields["tokenizer.ggml.tokens"].data)
    assert arrays["logits"].shape == (len(arrays["tokens"]), n_vocab)
    assert np.isfinite(arrays["logits"]).all()
    assert arrays["logits"].std() > 2
    expert_types = {"F32", "MXFP4"} if name.endswith("mxfp4") else {"F32"}
    assert {tensor.tensor_type.name for tensor in reader.tensors} == expert_types
    prefix = reader.fields["general.architecture"].contents()
    assert prefix == architecture(name)
    if f"{prefix}.expert_used_count" in reader.fields:
        names = [tensor.name for tensor in reader.tensors]
        layers = sum(name.endswith("ffn_gate_inp.weight") for name in names)
        layers -= any("nextn" in name for name in names)  # of which nothing is stored here
        top_k = int(reader.fields[f"{prefix}.expert_used_count"].contents())
        assert arrays["router_ids"].shape == (layers, len(arrays["tokens"]), top_k)
        assert arrays["router_margin"].min() > 1e-3
