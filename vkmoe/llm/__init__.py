"""This package is what programs use: a model that is loaded, and replies of it.

`LLM` is the class of programs without an event loop. EngineThread runs one on a thread of its own,
for what follows replies on an event loop: a server.
"""

from __future__ import annotations

from vkmoe.generate.loop import FinishReason, GenerationStatistics, Piece, Request
from vkmoe.llm.files import demo_model_path, read_tokenizer
from vkmoe.llm.llm import LLM
from vkmoe.llm.results import GenerationResult

__all__ = [
    "LLM",
    "FinishReason",
    "GenerationResult",
    "GenerationStatistics",
    "Piece",
    "Request",
    "demo_model_path",
    "read_tokenizer",
]
