"""Holds what a server says of a model, which it still knows while the model sleeps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vkmoe.errors import VkmoeError
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.llm import LLM


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
    meta: dict[str, Any]  # of /v1/models

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
            meta,
        )


def _token(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.token_text(token_id)
