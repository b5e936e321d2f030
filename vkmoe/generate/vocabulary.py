"""This module reads and checks what a GGUF file's metadata says about its vocabulary.

It owns the `tokenizer.ggml.*` keys: their types, their meaning, their defaults and every way they
can contradict each other. It does not own encoding or decoding (tokenizer.py), nor the file itself
(vkmoe.gguf_file).
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vkmoe.errors import ModelFileError, UnsupportedModelError
from vkmoe.generate.pretokenizer import DEFAULT_NAME, PreTokenizerSpec, pre_tokenizer_spec
from vkmoe.generate.special_tokens import CONTROL_TEXTS, end_texts, shown_texts

__all__ = ["TokenType", "Vocabulary", "read_vocabulary"]

log = logging.getLogger("vkmoe")

# Tokens of Phi-3 that keep the blanks after them; its other special tokens swallow them.
_PHI3_KEEPS_BLANKS = ("<unk>", "<s>", "<|endoftext|>")


class TokenType(enum.IntEnum):
    """Names the values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """Holds a checked vocabulary: every id below is smaller than `len(tokens)`.

    With `pre` it is a byte-level one and has `merges`, without it is a SentencePiece one and has
    `scores`.
    """

    pre: PreTokenizerSpec | None
    tokens: list[str]  # all different, none empty
    ids: dict[str, int]  # token text -> id
    merges: list[tuple[str, str]]  # best first
    scores: npt.NDArray[np.float64]  # [tokens]: what is merged first; empty with `pre`
    control: frozenset[int]  # matched in text only where special tokens are asked for; hidden
    user_defined: frozenset[int]  # always matched in text, never merged; shown as they are
    unused: frozenset[int]  # without a text
    swallow_blanks: frozenset[int]  # special tokens after which blanks are dropped
    bos: int | None
    eos: int | None
    eot: int | None
    eom: int | None
    end_ids: frozenset[int]  # every token that ends a generation
    adds_bos: bool
    adds_eos: bool
    adds_space: bool  # before a text at the start or after a special token


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Read and check the vocabulary from a model file's metadata, a lazy mapping.

    Raises ModelFileError for missing, malformed or contradicting metadata and
    UnsupportedModelError for a tokenizer model or pre-tokenizer vkmoe does not know.
    """
    model = str(_required(metadata, "tokenizer.ggml.model"))
    if model not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"the model's tokenizer {model!r} is not known",
            "vkmoe reads byte-level BPE ('gpt2') and SentencePiece ('llama') vocabularies",
        )
    pre = _pre_tokenizer(metadata) if model == "gpt2" else None
    texts = _read_strings(metadata, "tokenizer.ggml.tokens")
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]  # llama.cpp's name
    ids = _ids(tokens)
    named = _named_ids(metadata, len(tokens), spm=pre is None)
    types = _read_types(metadata, len(tokens))
    control, user_defined = _special(tokens, ids, types, named)
    return Vocabulary(
        pre=pre,
        tokens=tokens,
        ids=ids,
        merges=_merges(metadata, tokens, ids) if pre is not None else [],
        scores=_read_scores(metadata, len(tokens)) if pre is None else np.zeros(0),
        control=control,
        user_defined=user_defined,
        unused=frozenset(np.flatnonzero(types == TokenType.UNUSED).tolist()) - control,
        swallow_blanks=_swallowing(metadata, ids, control | user_defined),
        end_ids=frozenset(
            {ids[text] for text in end_texts(ids) if text in ids}
            | {i for name, i in named.items() if i is not None and name != "bos"}
        ),
        adds_bos=_adds(metadata, "bos", pre is None or pre.adds_bos, named["bos"]),
        adds_eos=_adds(metadata, "eos", False, named["eos"]),
        adds_space=pre is None and _read_flag(metadata, "tokenizer.ggml.add_space_prefix", True),
        **named,
    )


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizerSpec:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None or (isinstance(name, str) and not name):
        log.warning(
            "the model file does not say how to cut text into words (no tokenizer.ggml.pre): "
            "the default is used, answers may be worse; a newer conversion of the model says it"
        )
        name = DEFAULT_NAME
    return pre_tokenizer_spec(str(name))


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


def _named_ids(metadata: Mapping[str, Any], n_tokens: int, spm: bool) -> dict[str, int | None]:
    """Return the ids of BOS, EOS, EOT and EOM; SentencePiece: else BOS 1, EOS 2."""
    named = {
        name: _read_id(metadata, f"tokenizer.ggml.{name}_token_id", n_tokens)
        for name in ("bos", "eos", "eot", "eom")
    }
    for name, token_id in (("bos", 1), ("eos", 2)):
        if spm and named[name] is None and token_id < n_tokens:
            named[name] = token_id
    return named


def _special(
    tokens: list[str],
    ids: dict[str, int],
    types: npt.NDArray[np.int64],
    named: Mapping[str, int | None],
) -> tuple[frozenset[int], frozenset[int]]:
    """Find the ids of control and user-defined tokens: by type, declaration or text."""
    by_type = np.isin(types, (TokenType.CONTROL, TokenType.UNKNOWN))
    user_defined = set(np.flatnonzero(types == TokenType.USER_DEFINED).tolist())
    control = set(np.flatnonzero(by_type).tolist())
    control |= {i for i in named.values() if i is not None} - user_defined
    control |= {ids[text] for text in CONTROL_TEXTS if text in ids}
    shown = {ids[text] for text in shown_texts(ids) if text in ids}
    return frozenset(control - shown), frozenset((user_defined - control) | shown)


def _swallowing(
    metadata: Mapping[str, Any], ids: dict[str, int], special: frozenset[int]
) -> frozenset[int]:
    name = str(metadata.get("general.name", "")).lower()
    if "phi3" not in name and "phi-3" not in name:
        return frozenset()
    return special - {ids[text] for text in _PHI3_KEEPS_BLANKS if text in ids}


def _adds(metadata: Mapping[str, Any], name: str, default: bool, token_id: int | None) -> bool:
    key = f"tokenizer.ggml.add_{name}_token"
    stated = _read_flag(metadata, key, default and token_id is not None)
    if stated and token_id is None:
        raise ModelFileError(
            f"the model file asks for {key} but has no tokenizer.ggml.{name}_token_id"
        )
    return stated


def _merges(
    metadata: Mapping[str, Any], tokens: list[str], ids: dict[str, int]
) -> list[tuple[str, str]]:
    """Split "left right" at the first blank after the first character.

    The pairs are made of the vocabulary's own strings: copies would take tens of megabytes.
    """
    pairs: list[tuple[str, str]] = []
    for line in _read_strings(metadata, "tokenizer.ggml.merges"):
        split = line.find(" ", 1)
        left, right = ids.get(line[:split]), ids.get(line[split + 1 :])
        if split < 1 or left is None or right is None:
            raise ModelFileError(
                f"the model file's merge {len(pairs)} is not a pair of tokens: {line[:40]!r}"
            )
        pairs.append((tokens[left], tokens[right]))
    return pairs


# ----- single keys: the type and length that each must have -----


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    """Return the value of `key`; raises ModelFileError where there is none."""
    value = metadata.get(key)
    if value is None:
        raise ModelFileError(
            f"the model file has no {key}", "it holds no usable tokenizer; convert the model again"
        )
    return value


def _read_strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    """Read a list of strings that must be there."""
    values = _required(metadata, key)
    if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
        raise ModelFileError(f"the model file's {key} is not a list of strings")
    return values


def _read_types(metadata: Mapping[str, Any], n_tokens: int) -> npt.NDArray[np.int64]:
    """Read the token types [n_tokens]; a file without them has only normal tokens."""
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


def _read_scores(metadata: Mapping[str, Any], n_tokens: int) -> npt.NDArray[np.float64]:
    """Read the scores [n_tokens], all finite; raises ModelFileError where there are none."""
    key = "tokenizer.ggml.scores"
    try:
        scores = np.asarray(_required(metadata, key), dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelFileError(f"the model file's {key} is not a list of numbers") from error
    if scores.shape != (n_tokens,):
        raise ModelFileError(f"the model file has {n_tokens} tokens but {scores.size} scores")
    finite = np.isfinite(scores)
    if not finite.all():
        i = int(np.argmin(finite))
        raise ModelFileError(f"the model file gives token {i} the score {scores[i]}")
    return scores


def _read_id(metadata: Mapping[str, Any], key: str, n_tokens: int) -> int | None:
    """Read a token id, or None where the file has no such key."""
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ModelFileError(f"the model file's {key} is not an integer")
    if not 0 <= value < n_tokens:
        raise ModelFileError(f"the model file's {key} is {value}, but it has {n_tokens} tokens")
    return int(value)


def _read_flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    """Read true or false; `default` where the file has no such key."""
    stated = metadata.get(key)
    if stated is None:
        return default
    if not isinstance(stated, bool | np.bool_):
        raise ModelFileError(f"the model file's {key} is not true or false")
    return bool(stated)
