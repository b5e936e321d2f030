"""What a GGUF file's metadata says about its vocabulary, read and checked.

Owns the `tokenizer.ggml.*` keys: their meaning, their defaults and every way they can be wrong.
Does not own encoding or decoding (tokenizer.py), nor the file itself (vkmoe.gguf_file).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vkmoe.errors import ModelFileError, UnsupportedModelError
from vkmoe.generate.pretokenizer import PreTokenizerSpec, pre_tokenizer_spec

__all__ = ["TokenType", "Vocabulary", "read_vocabulary"]

# Texts that end a reply in the models that have them, whatever the file declares.
_END_TEXTS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")


class TokenType(enum.IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """A checked byte-level BPE vocabulary: every id below is smaller than `len(ids)`."""

    pre: PreTokenizerSpec
    ids: dict[str, int]  # token text -> id, all ids 0..n-1 exactly once
    merges: list[tuple[str, str]]  # best first
    control: list[str]  # matched in text only where special tokens are asked for
    user_defined: list[str]  # always matched in text, never merged
    bos: int | None
    eos: int | None
    eot: int | None
    eom: int | None
    end_ids: frozenset[int]  # every token that ends a generation
    adds_bos: bool
    adds_eos: bool


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Read and check the vocabulary from a model file's metadata, a lazy mapping.

    Raises ModelFileError for missing, malformed or contradicting metadata and
    UnsupportedModelError for a tokenizer model or pre-tokenizer vkmoe does not know.
    """
    model = str(_required(metadata, "tokenizer.ggml.model"))
    if model != "gpt2":
        raise UnsupportedModelError(
            f"the model's tokenizer {model!r} is not known",
            "vkmoe reads byte-level BPE vocabularies (tokenizer.ggml.model = 'gpt2')",
        )
    pre = pre_tokenizer_spec(str(_required(metadata, "tokenizer.ggml.pre")))
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    ids = _ids(tokens)
    types = _types(metadata, len(tokens))
    named = {
        name: _special_id(metadata, f"tokenizer.ggml.{name}_token_id", len(tokens))
        for name in ("bos", "eos", "eot", "eom")
    }
    control = _texts_of(tokens, types, TokenType.CONTROL, TokenType.UNKNOWN)
    declared = [tokens[i] for i in named.values() if i is not None]
    user_defined = _texts_of(tokens, types, TokenType.USER_DEFINED)
    control = list(dict.fromkeys(control + [t for t in declared if t not in user_defined]))
    matched = {*control, *user_defined}
    return Vocabulary(
        pre=pre,
        ids=ids,
        merges=_merges(_strings(metadata, "tokenizer.ggml.merges"), tokens, ids),
        control=control,
        user_defined=user_defined,
        end_ids=_end_ids(ids, matched, named["eos"], named["eot"], named["eom"]),
        adds_bos=_adds(metadata, "bos", pre.adds_bos, named["bos"]),
        adds_eos=_adds(metadata, "eos", False, named["eos"]),
        **named,
    )


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    value = metadata.get(key)
    if value is None:
        raise ModelFileError(
            f"the model file has no {key}", "it holds no usable tokenizer; convert the model again"
        )
    return value


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = _required(metadata, key)
    if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
        raise ModelFileError(f"the model file's {key} is not a list of strings")
    return values


def _ids(tokens: list[str]) -> dict[str, int]:
    if not tokens:
        raise ModelFileError("the model file's vocabulary is empty (tokenizer.ggml.tokens)")
    ids = {text: i for i, text in enumerate(tokens)}
    if len(ids) != len(tokens):
        first = next(i for i, text in enumerate(tokens) if ids[text] != i)
        raise ModelFileError(
            f"the model file's vocabulary names token {tokens[first][:40]!r} twice, "
            f"as {first} and {ids[tokens[first]]}"
        )
    return ids


def _types(metadata: Mapping[str, Any], n_tokens: int) -> npt.NDArray[np.int64]:
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


def _texts_of(tokens: list[str], types: npt.NDArray[np.int64], *wanted: TokenType) -> list[str]:
    where = np.flatnonzero(np.isin(types, wanted))
    return [tokens[i] for i in where if tokens[i]]


def _special_id(metadata: Mapping[str, Any], key: str, n_tokens: int) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ModelFileError(f"the model file's {key} is not an integer")
    if not 0 <= value < n_tokens:
        raise ModelFileError(f"the model file's {key} is {value}, but it has {n_tokens} tokens")
    return int(value)


def _adds(metadata: Mapping[str, Any], name: str, default: bool, token_id: int | None) -> bool:
    key = f"tokenizer.ggml.add_{name}_token"
    stated = metadata.get(key)
    if stated is None:
        return default and token_id is not None
    if not isinstance(stated, bool | np.bool_):
        raise ModelFileError(f"the model file's {key} is not true or false")
    if stated and token_id is None:
        raise ModelFileError(
            f"the model file asks for {key} but has no tokenizer.ggml.{name}_token_id"
        )
    return bool(stated)


def _merges(lines: list[str], tokens: list[str], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Split "left right" at the first blank after the first character.

    The pairs are made of the vocabulary's own strings: copies would take tens of megabytes.
    """
    pairs: list[tuple[str, str]] = []
    for line in lines:
        split = line.find(" ", 1)
        left, right = ids.get(line[:split]), ids.get(line[split + 1 :])
        if split < 1 or left is None or right is None:
            raise ModelFileError(
                f"the model file's merge {len(pairs)} is not a pair of tokens: {line[:40]!r}"
            )
        pairs.append((tokens[left], tokens[right]))
    return pairs


def _end_ids(ids: dict[str, int], matched: set[str], *named: int | None) -> frozenset[int]:
    known: Iterable[int] = (ids[text] for text in _END_TEXTS if text in matched)
    return frozenset({i for i in named if i is not None} | set(known))
