"""Stands in for llama-cpp-python in tests of benchmarks: vkmoe behind that package's names.

STUB_WRONG_LOGITS makes it another model.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vkmoe.config import EngineConfig
from vkmoe.engine import Engine

__version__ = "stub"


class Llama:
    """The few methods the worker calls."""

    def __init__(self, path: str, n_ctx: int, n_gpu_layers: int, **_: Any) -> None:
        assert n_gpu_layers == -1 and os.environ["GGML_VK_VISIBLE_DEVICES"].isdigit()
        config = EngineConfig(device=os.environ.get("VKMOE_DEVICE"), ctx_size=n_ctx)
        self._engine = Engine(Path(path), config)
        self.n_tokens = 0
        self.ctx = self
        self.logits = np.zeros(0, np.float32)

    def reset(self) -> None:
        self.n_tokens = 0

    def eval(self, tokens: Sequence[int]) -> None:
        self._engine.run_tokens(tokens, self.n_tokens)
        self.n_tokens += len(tokens)
        self.logits = self._engine.full_logits()
        if "STUB_WRONG_LOGITS" in os.environ:
            self.logits = np.ascontiguousarray(self.logits[::-1])

    def n_vocab(self) -> int:
        return self._engine.n_vocab


def llama_get_logits(llama: Llama) -> Any:
    return llama.logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


def llama_supports_gpu_offload() -> bool:
    return True


def llama_print_system_info() -> bytes:
    return b"stub"
