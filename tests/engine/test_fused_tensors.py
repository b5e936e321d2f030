"""Matrices that converters put into one tensor: they compute what they compute apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.test_logits import PHASES, run
from tests.engine.tiny import Change, Tensor, expected, model_path, retyped, rewrite
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine

MODEL = "bailingmoe2_odd"
ROWS = {"q": 96, "k": 32, "v": 32}


def in_blocks(apart: bool) -> Change:
    """A change of q, k and v to Q8_0, in one tensor as they are or each in its own."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if "attn_qkv" in key]:
            whole = retyped(tensors.pop(key), "Q8_0")
            if not apart:
                tensors[key] = whole
                continue
            rows, first = whole.data.reshape(whole.shape[0], -1), 0
            for name, n_rows in ROWS.items():
                data = rows[first : first + n_rows].reshape(-1)
                shape = (n_rows, whole.shape[1])
                tensors[key.replace("qkv", name)] = Tensor("Q8_0", shape, data)
                first += n_rows

    return change


def assert_alike(folder: Path, device: str | None) -> None:
    config = EngineConfig(device=device)
    tokens, found = expected(MODEL)["tokens"], []
    for apart in (False, True):
        path = rewrite(model_path(MODEL), folder / f"{apart}.gguf", in_blocks(apart))
        with Engine(path, config) as engine:
            found.append([run(engine, tokens, phase)[0] for phase in PHASES])
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.usefixtures("one_device")
def test_q_k_and_v_of_one_tensor(tmp_path: Path) -> None:
    assert_alike(tmp_path, None)


@pytest.mark.usefixtures("cpu_native")
def test_q_k_and_v_of_one_tensor_on_a_cpu(tmp_path: Path) -> None:
    assert_alike(tmp_path, "cpu")
