"""vkmoe runs mixture-of-experts models on Vulkan where their experts do not fit the GPU."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.errors import VkmoeError

if TYPE_CHECKING:
    from vkmoe.generate.chat.collected import ToolCall
    from vkmoe.generate.loop import GenerationStatistics, Piece
    from vkmoe.generate.tools import (
        Content,
        Thought,
        ToolCallArguments,
        ToolCallBegin,
        ToolCallEnd,
    )
    from vkmoe.llm import LLM
    from vkmoe.llm.async_llm import AsyncLLM
    from vkmoe.llm.messages import ChatMessage, Tool
    from vkmoe.llm.results import ChatEnd, ChatEvent, ChatResult, GenerationResult

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "ChatEnd",
    "ChatEvent",
    "ChatMessage",
    "ChatResult",
    "Content",
    "EngineConfig",
    "GenerationResult",
    "GenerationStatistics",
    "Piece",
    "SamplingConfig",
    "Thought",
    "Tool",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallBegin",
    "ToolCallEnd",
    "VkmoeError",
]

# Names by the module that has them: these import NumPy and the extension.
_LAZY = {
    "vkmoe.llm": ("LLM",),
    "vkmoe.llm.async_llm": ("AsyncLLM",),
    "vkmoe.llm.messages": ("ChatMessage", "Tool"),
    "vkmoe.llm.results": ("ChatEnd", "ChatEvent", "ChatResult", "GenerationResult"),
    "vkmoe.generate.loop": ("GenerationStatistics", "Piece"),
    "vkmoe.generate.chat.collected": ("ToolCall",),
    "vkmoe.generate.tools": (
        "Content",
        "Thought",
        "ToolCallArguments",
        "ToolCallBegin",
        "ToolCallEnd",
    ),
}
_MODULES = {name: module for module, names in _LAZY.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'vkmoe' has no attribute {name!r}")
