"""Reads single `tokenizer.ggml.*` keys of a GGUF file's metadata, checked.

Owns the type and length a key must have. Does not own what the keys mean together (vocabulary.py).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from vkmoe.errors import ModelFileError

__all__ = [
    "TokenType",
    "read_flag",
    "read_id",
    "read_scores",
    "read_strings",
    "read_types",
    "required",
]


class TokenType(enum.IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def required(metadata: Mapping[str, Any], key: str) -> Any:
    """The value of `key`; raises ModelFileError where there is none."""
    value = metadata.get(key)
    if value is None:
        raise ModelFileError(
            f"the model file has no {key}", "it holds no usable tokenizer; convert the model again"
        )
    return value


def read_strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    """A list of strings that must be there."""
    values = required(metadata, key)
    if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
        raise ModelFileError(f"the model file's {key} is not a list of strings")
    return values


def read_types(metadata: Mapping[str, Any], n_tokens: int) -> npt.NDArray[np.int64]:
    """Token types [n_tokens]; a file without them has only normal tokens."""
    key = "tokenizer.ggml.token_type"
    if key not in metadata:
        return np.full(n_tokens, TokenType.NORMAL, dtype=np.int64)
    try:
        types = np.asarray(metadata.get(key), dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelFileError(f"the model file's {key} is not a list of integers") from error
    if types.shape != (n_tokens,):
        raise ModelFileError(f"the model file has {n_tokens} tokens but {types.size} token types")
    known = (types >= min(TokenType)) & (types <= max(TokenType))
    if not known.all():
        i = int(np.argmin(known))
        raise ModelFileError(f"the model file gives token {i} the unknown type {types[i]}")
    return types


def read_scores(metadata: Mapping[str, Any], n_tokens: int) -> npt.NDArray[np.float64]:
    """Scores [n_tokens], all finite; raises ModelFileError where there are none."""
    key = "tokenizer.ggml.scores"
    try:
        scores = np.asarray(required(metadata, key), dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelFileError(f"the model file's {key} is not a list of numbers") from error
    if scores.shape != (n_tokens,):
        raise ModelFileError(f"the model file has {n_tokens} tokens but {scores.size} scores")
    finite = np.isfinite(scores)
    if not finite.all():
        i = int(np.argmin(finite))
        raise ModelFileError(f"the model file gives token {i} the score {scores[i]}")
    return scores


def read_id(metadata: Mapping[str, Any], key: str, n_tokens: int) -> int | None:
    """A token id, or None where the file has no such key."""
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ModelFileError(f"the model file's {key} is not an integer")
    if not 0 <= value < n_tokens:
        raise ModelFileError(f"the model file's {key} is {value}, but it has {n_tokens} tokens")
    return int(value)


def read_flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    """True or false; `default` where the file has no such key."""
    stated = metadata.get(key)
    if stated is None:
        return default
    if not isinstance(stated, bool | np.bool_):
        raise ModelFileError(f"the model file's {key} is not true or false")
    return bool(stated)
