"""vkmoe runs mixture-of-experts models on Vulkan where their experts do not fit the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.errors import VkmoeError

if TYPE_CHECKING:
    from vkmoe.llm import LLM, GenerationResult, GenerationStatistics

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "EngineConfig",
    "GenerationResult",
    "GenerationStatistics",
    "SamplingConfig",
    "VkmoeError",
]

_LAZY = {"LLM", "GenerationResult", "GenerationStatistics"}  # they import NumPy and the extension


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from vkmoe import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'vkmoe' has no attribute {name!r}")
