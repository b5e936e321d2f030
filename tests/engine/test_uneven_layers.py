"""Models whose layers differ in shape, as files state it with an array of a number for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.caches import rows
from tests.engine.tiny import Tensor, model_path, rewrite
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.facts import AttentionSpec, DenseSpec
from vkmoe.quants import decode

pytestmark = pytest.mark.usefixtures("one_device")

TOKENS = [5, 17, 3, 250, 8, 1, 99, 42]


def twice(values: NDArray[np.float32], axis: int, fill: float = 1.0) -> NDArray[np.float32]:
    """The values, and behind them the same times `fill`."""
    return np.concatenate([values, values * np.float32(fill)], axis)


def widened(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Give layer 1 twice the heads and blocks, of which the second half adds nothing."""
    for name, axis, fill in (
        ("attn_q", 0, 1.0),
        ("attn_k", 0, 1.0),
        ("attn_v", 0, 1.0),
        ("attn_output", 1, 0.0),
        ("ffn_gate", 0, 1.0),
        ("ffn_up", 0, 1.0),
        ("ffn_down", 1, 0.0),
    ):
        key = f"blk.1.{name}.weight"
        old = tensors[key]
        values = decode(old.type, old.data, int(np.prod(old.shape))).reshape(old.shape)
        made = twice(values, axis, fill)
        tensors[key] = Tensor("F32", made.shape, made.view(np.uint8).reshape(-1))
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        value = metadata[f"qwen3.{key}"]
        metadata[f"qwen3.{key}"] = [value, 2 * value]


def test_layers_of_several_shapes_compute_what_one_shape_does(tmp_path: Path) -> None:
    """Heads, caches and blocks are those of each layer; more of what adds nothing adds nothing."""
    path = rewrite(model_path("dense_tied"), tmp_path / "uneven.gguf", widened)
    config = EngineConfig(ctx_size=32)
    with Engine(model_path("dense_tied"), config) as engine:
        wanted = rows(engine, TOKENS)
    with Engine(path, config) as engine:
        first, second = engine.spec.layers
        assert isinstance(first.mixer, AttentionSpec) and isinstance(second.mixer, AttentionSpec)
        assert second.mixer.kv_width == 2 * first.mixer.kv_width
        assert isinstance(first.feed_forward, DenseSpec)
        assert second.feed_forward.width == 2 * first.feed_forward.width
        found = rows(engine, TOKENS)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert np.ptp(wanted) > 1
