"""Stands in for llama-cpp-python in tests of benchmarks: vkmoe behind that package's names.

STUB_WRONG_LOGITS makes it another model, STUB_OTHER_TOKENS another tokenizer.
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
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.gguf_file import open_gguf

__version__ = "stub"


class Llama:
    """The few methods the worker calls."""

    def __init__(
        self, path: str, n_ctx: int, n_gpu_layers: int, logits_all: bool = False, **_: Any
    ) -> None:
        assert n_gpu_layers == -1
        assert os.environ["GGML_VK_VISIBLE_DEVICES"].isdigit() != logits_all
        config = EngineConfig(device=os.environ.get("VKMOE_DEVICE"), ctx_size=n_ctx)
        self._engine = Engine(Path(path), config)
        self.n_tokens = 0
        self.ctx = self.model = self
        self._logits_all, self._path = logits_all, path
        self.logits = np.zeros(0, np.float32)

    def reset(self) -> None:
        self.n_tokens = 0

    def eval(self, tokens: Sequence[int]) -> None:
        if self._logits_all:
            self.scores = np.empty((len(tokens), self.n_vocab()), np.float32)
            for position, token in enumerate(tokens):
                self._engine.run_token(token, position)
                self.scores[position] = self._engine.full_logits()
            return
        self._engine.run_tokens(tokens, self.n_tokens)
        self.n_tokens += len(tokens)
        self.logits = self._engine.full_logits()
        if "STUB_WRONG_LOGITS" in os.environ:
            self.logits = np.ascontiguousarray(self.logits[::-1])

    def n_vocab(self) -> int:
        return self._engine.n_vocab

    def tokenize(self, text: bytes, add_bos: bool, special: bool) -> list[int]:
        assert add_bos and not special
        with open_gguf(Path(self._path)) as file:
            tokenizer = Tokenizer.from_file(file)
            self.added_first = tokenizer.added_first
            tokens = tokenizer.encode(text.decode(), parse_special=False)
            return tokens[:-1] if "STUB_OTHER_TOKENS" in os.environ else tokens

    def token_bos(self) -> int:
        return self.added_first[0]


def llama_get_logits(llama: Llama) -> Any:
    return llama.logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


def llama_model_get_vocab(llama: Llama) -> Llama:
    return llama


def llama_vocab_get_add_bos(llama: Llama) -> bool:
    return bool(llama.added_first)


def llama_supports_gpu_offload() -> bool:
    return True


def llama_print_system_info() -> bytes:
    return b"stub"
