"""This module reads and checks what a GGUF file's metadata says about its vocabulary.

It owns the `tokenizer.ggml.*` keys, their meaning, their defaults and every way they can contradict
each other; and what a token's text tells where the file says nothing, as in llama.cpp, whose files
these are. It does not own encoding or decoding (tokenizer.py), nor the types of keys (gguf_file).
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vkmoe.errors import UnsupportedModelError
from vkmoe.generate.text.byte_level import PRE_TOKENIZERS, PreTokenizerSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.gguf_file.header import shown

log = logging.getLogger("vkmoe")

# A token with one of these texts ends a generation, whatever the file declares.
_ENDS = """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn>
    <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance>
    <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[
    <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]
    <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
"""
# Marks around a gap that a model fills, by the names that metadata has for them.
_GAPS = {
    "fim_pre": """
        <|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|>
    """,
    "fim_suf": """
        <|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|>
    """,
    "fim_mid": """
        <|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|>
    """,
}
_OLD_NAMES = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_UNNAMED = ("<|prefix|>", "<|suffix|>", "<|middle|>")  # marks of the same, where a file says so
_AROUND = {
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
# The channels of gpt-oss are part of its reply: without the marks they would run together.
_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
# Tokens of Phi-3 that keep the blanks after them; its other special tokens swallow them.
_PHI3_KEEPS_BLANKS = ("<unk>", "<s>", "<|endoftext|>")
_MAX_PIECE_LENGTH = 1000  # trying all splits of a piece takes the square of it


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

    With `pre` it has `merges`, without it is a SentencePiece one and has `scores`. It has
    `byte_ids` where tokens are spelled in characters: without `pre`, or where that says so.
    """

    pre: PreTokenizerSpec | None
    tokens: list[str]  # all different, none empty
    ids: dict[str, int]  # token text -> id
    merges: list[tuple[str, str]]  # best first; the two together are a token
    scores: npt.NDArray[np.float64]  # [tokens]: what is merged first
    byte_ids: list[int]  # [256]
    control: frozenset[int]  # matched in text only where special tokens are asked for; hidden
    user_defined: frozenset[int]  # always matched in text, never merged; shown as they are
    unused: frozenset[int]  # without a text
    swallow_blanks: frozenset[int]  # special tokens after which blanks are dropped
    named: dict[str, int]  # "bos", "eos", "eot", "eom": those that there are
    end_ids: frozenset[int]  # every token that ends a generation
    added_first: list[int]  # BOS, where the model wants it before every text
    added_last: list[int]  # likewise EOS
    adds_space: bool  # before a text at the start or after a special token
    gaps: dict[str, int]  # "fim_pre", "fim_suf", "fim_mid", "fim_rep", "fim_sep", as far as known


def read_vocabulary(file: GgufFile) -> Vocabulary:
    """Read and check the vocabulary in a model file's metadata.

    Raises ModelFileError for missing, malformed or contradicting metadata and
    UnsupportedModelError for a tokenizer model or pre-tokenizer vkmoe does not know.
    """
    model = _model(file)
    is_spm = model == "llama"
    pre = None if is_spm else _pre_tokenizer(file, model)
    in_characters = pre is None or pre.in_characters
    texts = file.strings("tokenizer.ggml.tokens")
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]  # llama.cpp's name
    ids = _ids(file, tokens)
    named = _named_ids(file, len(tokens), is_spm)
    types = _types(file, len(tokens))
    shown_ids = _shown_ids(ids)
    control, user_defined = _special(ids, types, named, shown_ids)
    return Vocabulary(
        pre=pre,
        tokens=tokens,
        ids=ids,
        merges=[] if is_spm else _merges(file, tokens, ids),
        scores=_scores(file, len(tokens)) if is_spm else np.zeros(0),
        byte_ids=_byte_ids(file, ids) if in_characters else [],
        control=control,
        user_defined=user_defined,
        unused=frozenset(np.flatnonzero(types == TokenType.UNUSED).tolist()) - control,
        swallow_blanks=_swallowing(file, ids, control | user_defined),
        named=named,
        end_ids=_end_ids(ids, shown_ids) | {i for name, i in named.items() if name != "bos"},
        added_first=_added_first(file, pre, named),
        added_last=_added(file, "eos", False, named),
        adds_space=is_spm and file.get("tokenizer.ggml.add_space_prefix", bool, True),
        gaps=_gap_ids(file, ids),
    )


def _model(file: GgufFile) -> str:
    model = file.require("tokenizer.ggml.model", str)
    if model not in ("gpt2", "llama", "gemma4"):
        raise UnsupportedModelError(
            f"{file.path}: the model's tokenizer {shown(model)} is not known",
            "vkmoe reads BPE ('gpt2', 'gemma4') and SentencePiece ('llama') vocabularies",
        )
    return model


def _pre_tokenizer(file: GgufFile, model: str) -> PreTokenizerSpec:
    """Find how words are cut. Gemma 4's model has one way, whatever the file names."""
    name = model if model == "gemma4" else file.get("tokenizer.ggml.pre", str, "")
    if not name:
        log.warning(
            "the model file does not say how to cut text into words (no tokenizer.ggml.pre): "
            "the default is used, answers may be worse; a newer conversion of the model says it"
        )
    spec = PRE_TOKENIZERS.get(name or "default")
    if spec is None:
        raise UnsupportedModelError(
            f"{file.path}: the model's pre-tokenizer {shown(name)} is not known",
            f"known ones are: {', '.join(sorted(PRE_TOKENIZERS))}",
        )
    return spec


def _ids(file: GgufFile, tokens: list[str]) -> dict[str, int]:
    if not tokens:
        file.refuse("the vocabulary is empty (tokenizer.ggml.tokens)")
    ids = {text: i for i, text in enumerate(tokens)}
    if len(ids) != len(tokens):
        first, text = next((i, text) for i, text in enumerate(tokens) if ids[text] != i)
        file.refuse(f"the vocabulary names token {shown(text)} twice, as {first} and {ids[text]}")
    return ids


def _named_ids(file: GgufFile, n_tokens: int, is_spm: bool) -> dict[str, int]:
    """Read the ids of BOS, EOS, EOT and EOM that there are; SentencePiece: else BOS 1, EOS 2."""
    named = {"bos": 1, "eos": 2} if is_spm and n_tokens > 2 else {}
    for name in ("bos", "eos", "eot", "eom"):
        if (token_id := _named_id(file, name, n_tokens)) is not None:
            named[name] = token_id
    return named


def _named_id(file: GgufFile, name: str, n_tokens: int) -> int | None:
    """Read the id of a token by its name in the metadata; None where it has none."""
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in file.metadata:
        return None
    token_id = file.require(key, int)
    if not 0 <= token_id < n_tokens:
        file.refuse(f"{key} is {token_id}, but there are {n_tokens} tokens")
    return token_id


def _gap_ids(file: GgufFile, ids: Mapping[str, int]) -> dict[str, int]:
    """Find the marks around a gap: those that the file names, else by their texts."""
    found: dict[str, int] = {}
    for name, texts in (_GAPS | _AROUND).items():
        names = (name, _OLD_NAMES[name]) if name in _OLD_NAMES else (name,)
        named = [_named_id(file, each, len(ids)) for each in names]
        known = [token for token in named if token is not None]
        known += [ids[text] for text in texts.split() if text in ids]
        found |= {name: known[0]} if known else {}
    return found


def _types(file: GgufFile, n_tokens: int) -> npt.NDArray[np.generic]:
    """Read the token types [n_tokens]; a file without them has only normal tokens."""
    if "tokenizer.ggml.token_type" not in file.metadata:
        return np.full(n_tokens, TokenType.NORMAL)
    return _of_each(
        file, "token_type", "token type", n_tokens, lambda types: np.isin(types, list(TokenType))
    )


def _scores(file: GgufFile, n_tokens: int) -> npt.NDArray[np.float64]:
    return _of_each(file, "scores", "score", n_tokens, np.isfinite).astype(np.float64)


def _of_each(
    file: GgufFile,
    name: str,
    what: str,
    n_tokens: int,
    is_valid: Callable[[Any], npt.NDArray[np.bool_]],
) -> npt.NDArray[np.generic]:
    """Read `what` the file says of each token [n_tokens], all valid, under `name`."""
    values = file.numbers(f"tokenizer.ggml.{name}")
    if len(values) != n_tokens:
        file.refuse(f"there are {n_tokens} tokens but {len(values)} {what}s")
    wrong = np.flatnonzero(~is_valid(values))
    if wrong.size:
        file.refuse(f"token {wrong[0]} has the impossible {what} {values[wrong[0]]}")
    return values


def _ids_of(texts: Iterable[str], ids: Mapping[str, int]) -> set[int]:
    return {ids[text] for text in texts if text in ids}


def _shown_ids(ids: Mapping[str, int]) -> set[int]:
    """Find marks that show in a reply. <|end|> only ends a message where others end it all."""
    calls, leaves = ids.keys() & {"<|call|>", "<|calls|>"}, ids.keys() & {"<|return|>", "<|flush|>"}
    return _ids_of((*_SHOWN, "<|end|>") if calls and leaves else _SHOWN, ids)


def _end_ids(ids: Mapping[str, int], shown_ids: set[int]) -> frozenset[int]:
    """Find the tokens that end a generation by their text."""
    ends = _ids_of(_ENDS.split(), ids) - _plain_ids(ids)
    if {"[gMASK]", "<|observation|>"} <= ids.keys():  # GLM: the next to speak is someone else
        ends |= _ids_of(("<|user|>", "<|observation|>"), ids)
    return frozenset(ends - shown_ids)


def _plain_ids(ids: Mapping[str, int]) -> set[int]:
    """Find tokens that look special and are not: Gemma 4 has the </s> of HTML."""
    return _ids_of(("</s>",), ids) if "<|tool_response>" in ids else set()


def _special(
    ids: Mapping[str, int],
    types: npt.NDArray[np.generic],
    named: Mapping[str, int],
    shown_ids: set[int],
) -> tuple[frozenset[int], frozenset[int]]:
    """Find the ids of control and user-defined tokens: by type, declaration or text."""
    user_defined = set(np.flatnonzero(types == TokenType.USER_DEFINED).tolist())
    by_type = np.isin(types, (TokenType.CONTROL, TokenType.UNKNOWN))
    control = set(np.flatnonzero(by_type).tolist()) | (set(named.values()) - user_defined)
    control |= _ids_of(" ".join((_ENDS, *_GAPS.values(), *_UNNAMED)).split(), ids)
    plain, user_defined = _plain_ids(ids), user_defined - control | shown_ids
    return frozenset(control - shown_ids - plain), frozenset(user_defined - plain)


def _swallowing(file: GgufFile, ids: Mapping[str, int], special: frozenset[int]) -> frozenset[int]:
    name = file.get("general.name", str, "").lower()
    is_phi3 = "phi3" in name or "phi-3" in name
    return special - _ids_of(_PHI3_KEEPS_BLANKS, ids) if is_phi3 else frozenset()


def _added_first(
    file: GgufFile, pre: PreTokenizerSpec | None, named: Mapping[str, int]
) -> list[int]:
    if pre is not None and pre.always_adds_bos and "bos" in named:
        return [named["bos"]]
    return _added(file, "bos", pre is None or pre.adds_bos, named)


def _added(file: GgufFile, name: str, default: bool, named: Mapping[str, int]) -> list[int]:
    """Return the named token if it is added to every text."""
    key = f"tokenizer.ggml.add_{name}_token"
    stated = file.get(key, bool, default and name in named)
    if stated and name not in named:
        file.refuse(f"asks for {key} but has no tokenizer.ggml.{name}_token_id")
    return [named[name]] if stated else []


def _merges(file: GgufFile, tokens: list[str], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Split "left right" at the first blank after the first character.

    The pairs are made of the vocabulary's own strings: copies would take tens of megabytes.
    """
    pairs: list[tuple[str, str]] = []
    for line in file.strings("tokenizer.ggml.merges"):
        split = line.find(" ", 1)
        left, right = line[:split], line[split + 1 :]
        if split < 1 or left not in ids or right not in ids or left + right not in ids:
            file.refuse(
                f"merge {len(pairs)} is not a pair of tokens that make a token: {shown(line)}"
            )
        pairs.append((tokens[ids[left]], tokens[ids[right]]))
    return pairs


def _byte_ids(file: GgufFile, ids: Mapping[str, int]) -> list[int]:
    """Find the tokens of single bytes, with which SentencePiece spells what has no token [256].

    Refuses absurdly long tokens too.
    """
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    absent = [name for name in names if name not in ids]
    if absent:
        file.refuse(
            f"the vocabulary has no byte token {absent[0]} ({len(absent)} of 256 are missing)"
        )
    longest = max(ids, key=len)
    if len(longest) > _MAX_PIECE_LENGTH:
        file.refuse(
            f"token {ids[longest]} has {len(longest)} characters, more than {_MAX_PIECE_LENGTH}"
        )
    return [ids[name] for name in names]
