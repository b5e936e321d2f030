"""This package reads GGUF files: memory-mapped, lazily parsed, safe against damaged files.

It owns the container format only. What a key means is the business of models and tokenizers; what
the bytes of a tensor mean is the business of vkmoe.quants.
"""

from __future__ import annotations

from vkmoe.gguf_file.file import GgufFile, open_gguf
from vkmoe.gguf_file.header import TensorInfo

__all__ = ["GgufFile", "TensorInfo", "open_gguf"]
