"""The demo model, with all of its matrices in one type after the other, on both devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.caches import rows
from tests.engine.tiny import Tensor, retyped, rewrite
from tests.samples import sampled
from vkmoe.llm import LLM, demo_model_path
from vkmoe.quants import HAS_KERNEL

pytestmark = pytest.mark.usefixtures("one_device")
PROMPT = "Once upon a time"
# Of the largest logit. A GPU computes with the weights as they are; seen: 4e-7.
EXACT = 1e-5
# A CPU rounds activations to 8 bits as well, and a few weights of one bit make no smooth model.
ROUNDED = 0.1


def in_type(kind: str, target: Path) -> Path:
    """The demo model with all matrices in one type, but for the router's."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if len(tensor.shape) > 1 and "ffn_gate_inp" not in name:
                tensors[name] = retyped(tensor, kind)

    return rewrite(demo_model_path(), target, change)


@pytest.mark.parametrize("kind", sampled(sorted(HAS_KERNEL), "Q5_0".__eq__))
def test_the_demo_model_writes_text_in_every_type(kind: str, tmp_path: Path) -> None:
    """Its logits are those of the decoded values, and the plan counts the bytes of the file."""
    path = in_type(kind, tmp_path / "model.gguf")
    decoded = rewrite(path, tmp_path / "f32.gguf", lambda _, tensors: tensors.update(
        {name: retyped(tensor, "F32") for name, tensor in tensors.items()}
    ))  # fmt: skip
    options: dict[str, Any] = {"ctx_size": 64, "cache_type_k": "f32", "cache_type_v": "f32"}
    with LLM(decoded, **options) as llm:
        tokens = llm.tokenizer.encode(PROMPT)
        wanted = rows(llm.engine, tokens)
    for device, most in (("0", EXACT), ("cpu", ROUNDED)):
        with LLM(path, device=device, **options) as llm:
            found = rows(llm.engine, tokens)
            text = llm.generate(PROMPT, max_tokens=12, temp=0).text
        assert np.linalg.norm(found - wanted) <= most * np.linalg.norm(wanted), device
        assert text.strip() and "\ufffd" not in text  # with weights of three values, few words
