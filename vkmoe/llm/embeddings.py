"""This module turns texts whose embeddings are wanted into requests, and pools as a file says."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from vkmoe.choices import Pooling
from vkmoe.errors import UnsupportedModelError, UsageError
from vkmoe.generate.checks import check_choice
from vkmoe.generate.loop import Generation, Request
from vkmoe.generate.pooling import EUCLIDEAN, NO_NORM, normalized
from vkmoe.gguf_file import GgufFile

if TYPE_CHECKING:
    from vkmoe.llm.llm import LLM

# By llama.cpp's numbers in `pooling_type`; the next one ranks texts, which gives no embedding.
_BY_NUMBER: tuple[Pooling, ...] = ("none", "mean", "cls", "last")


def pooling_of(file: GgufFile) -> Pooling:
    """Read how a model's file pools; "none" where it does not say.

    Raises UnsupportedModelError for a way that vkmoe does not know.
    """
    architecture = file.require("general.architecture", str)
    number = file.get(f"{architecture}.pooling_type", int, 0)
    if not 0 <= number < len(_BY_NUMBER):
        raise UnsupportedModelError(
            f"{file.path} pools embeddings in way {number}, which vkmoe does not know",
            f"choose one: {', '.join(_BY_NUMBER[1:])}",
        )
    return _BY_NUMBER[number]


def chosen_pooling(llm: LLM, pooling: Pooling | None) -> Pooling:
    """Return a way to pool: the one asked for, that of the model's file, or "last".

    A model that writes texts says nothing of pooling; there the last token alone has seen all
    others. Raises UsageError for what is none, UnsupportedModelError as `pooling_of` does.
    """
    if pooling is None:
        found = pooling_of(llm.engine.model.file)
        return "last" if found == "none" else found
    check_choice("pooling", pooling, get_args(Pooling))
    return pooling


def embedding_request(llm: LLM, text: Any, pooling: Pooling) -> Request:
    """Make the request for a text's embedding, given the text or its token ids.

    Raises PromptError for one that is empty or does not fit.
    """
    return replace(llm.request(text, max_tokens=0), pooling=pooling)


def embedding_of(generation: Generation, normalize: bool) -> NDArray[np.float32]:
    """Return what came of such a request. Must hold: it ended without an error.

    Raises UsageError where it did not come to its end, as Ctrl-C ends all texts of a batch.
    """
    assert generation.pool is not None
    if not generation.pool.is_whole:
        raise UsageError("the text was interrupted", "call again")
    return normalized(generation.pool.embedding, EUCLIDEAN if normalize else NO_NORM)
