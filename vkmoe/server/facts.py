"""Holds what a server says of a model, which it still knows while the model sleeps."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vkmoe.errors import VkmoeError
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.gguf_file import GgufFile
from vkmoe.llm import LLM

_BLOB = re.compile(r"sha256-([0-9a-f]{64})")  # how Ollama names the files of its models
FILE_TYPES = {  # general.file_type
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1"},
    **{10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M"},
    **{16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S"},
    **{22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M"},
    **{28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0"},
    **{37: "TQ2_0", 38: "MXFP4_MOE"},
}


@dataclass(frozen=True)
class ModelFacts:
    """Describes a model that is or was loaded."""

    ctx_size: int  # tokens of each sequence
    n_slots: int  # sequences at once
    file_name: str  # where it lies stays here
    device: str
    has_template: bool
    template: str  # "" where it cannot be used, as a request that needs it will say
    bos_token: str
    eos_token: str
    tokenizer: str  # tokenizer.ggml.model, such as gpt2
    meta: dict[str, Any]  # of /v1/models
    file_type: str  # such as Q4_K_M
    written_at: float  # when its file was; seconds since 1970, 0 where that is gone
    digest: str

    @classmethod
    def of(cls, llm: LLM) -> ModelFacts:
        """Read them off a model that is loaded."""
        try:
            template = llm.chat_format.template.source
        except VkmoeError:
            template = ""
        tensors = llm.engine.model.file.tensors.values()
        meta = {
            "n_vocab": llm.spec.n_vocab,
            "n_ctx": llm.engine.ctx_size,
            "n_ctx_train": llm.spec.context_length,
            "n_embd": llm.spec.width,
            "n_params": sum(tensor.n_weights for tensor in tensors),
            "size": sum(tensor.n_bytes for tensor in tensors),
            "architecture": llm.spec.architecture,
        }
        return cls(
            llm.engine.ctx_size,
            llm.engine.n_regions,
            Path(llm.engine.model.file.path).name,
            llm.device_info.name,
            llm.has_chat_template,
            template,
            _token(llm.tokenizer, llm.tokenizer.bos_id),
            _token(llm.tokenizer, llm.tokenizer.eos_id),
            str(llm.engine.model.file.metadata.get("tokenizer.ggml.model")),
            meta,
            file_type(llm.engine.model.file),
            _written_at(llm.engine.model.file),
            _digest(llm.engine.model.file),
        )


def file_type(file: GgufFile) -> str:
    """Name the types of most of a file's weights, as llama.cpp does."""
    kind = file.metadata.get("general.file_type")
    return FILE_TYPES.get(kind, "unknown") if isinstance(kind, int) else "unknown"


def _written_at(file: GgufFile) -> float:
    try:
        return file.paths[0].stat().st_mtime
    except OSError:
        return 0.0


def _digest(file: GgufFile) -> str:
    """Return what tells a model from others: of Ollama's own files their digest.

    Of other files it is that of their tensors' names, types and shapes: all their bytes would take
    minutes to read.
    """
    if named := _BLOB.fullmatch(file.path.name):
        return named[1]
    head = [file.metadata.get("general.name"), *(each[:3] for each in file.tensors.values())]
    return hashlib.sha256(repr(head).encode("utf-8", "replace")).hexdigest()


def _token(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.token_text(token_id)
