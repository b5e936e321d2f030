"""Damaged vocabularies: one clear line for each, and never a crash."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from tests.generate.conftest import spm_metadata, tiny_metadata, tokenizer_of, tokens_with
from vkmoe.errors import ModelFileError, UnsupportedModelError, VkmoeError
from vkmoe.generate.text.tokenizer import Tokenizer


def tiny(**changes: Any) -> Tokenizer:
    return tokenizer_of(tiny_metadata(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "no metadata key 'tokenizer.ggml.model'"),
        ({"tokens": None}, "no metadata key 'tokenizer.ggml.tokens'"),
        ({"merges": None}, "no metadata key 'tokenizer.ggml.merges'"),
        ({"tokens": []}, "vocabulary is empty"),
        ({"tokens": "abc"}, "tokens' should be an array of strings"),
        ({"tokens": [1, 2]}, "tokens' should be an array of strings"),
        ({"tokens": tokens_with(_5="he")}, "'he' twice, as 5 and 256"),
        ({"merges": ["h e", "x yz"]}, "merge 1 is not a pair"),
        ({"merges": ["a b"]}, "merge 0 is not a pair of tokens that make a token: 'a b'"),
        ({"merges": ["nothing"]}, "merge 0 is not a pair"),
        ({"merges": ["h e", " "]}, "merge 1 is not a pair"),
        ({"merges": ["a "]}, "merge 0 is not a pair"),
        ({"merges": [""]}, "merge 0 is not a pair"),
        ({"token_type": [1, 1]}, "262 tokens but 2 token types"),
        ({"token_type": [1] * 261 + [9]}, "token 261 has the impossible token type 9"),
        ({"token_type": [math.nan] * 262}, "token 0 has the impossible token type nan"),
        ({"token_type": ["a"] * 262}, "token_type' should be an array of numbers"),
        ({"bos_token_id": 262}, "bos_token_id is 262, but there are 262 tokens"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eos_token_id": "x"}, "should be a whole number"),
        ({"add_bos_token": 3}, "should be a bool"),
        ({"fim_mid_token_id": 262}, "fim_mid_token_id is 262, but there are 262 tokens"),
        ({"add_bos_token": True, "bos_token_id": None}, "no tokenizer.ggml.bos_token_id"),
    ],
)
def test_damaged_metadata_is_one_clear_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        tiny(**changes)
    assert "\n" not in str(caught.value) and caught.value.hint


def test_marks_of_a_gap_are_found_by_name_or_text() -> None:
    """A file's names come first, the newer ones before the older."""
    assert tiny().gaps == {}
    named = {"prefix_token_id": 9, "fim_pre_token_id": 7, "suffix_token_id": 8}
    assert tiny(**named).gaps == {"fim_pre": 7, "fim_suf": 8}
    spelled = tokens_with(_1="<|fim_prefix|>", _2="<|fim_suffix|>", _3="<|fim_middle|>")
    assert tiny(tokens=spelled).gaps == {"fim_pre": 1, "fim_suf": 2, "fim_mid": 3}
    assert tiny(tokens=spelled, fim_suf_token_id=5).gaps["fim_suf"] == 5


def test_other_tokenizer_models_are_named() -> None:
    with pytest.raises(UnsupportedModelError, match="'bert'"):
        tiny(model="bert")


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_mutated_metadata_never_crashes(kind: str) -> None:
    rng = random.Random(2)
    outcomes = set()
    for _ in range(300):
        metadata = tiny_metadata() if kind == "gpt2" else spm_metadata(["▁", "a", "▁a"])
        for _ in range(rng.randint(1, 3)):
            key = rng.choice(sorted(metadata))
            value = metadata[key]
            if isinstance(value, list) and value and rng.random() < 0.8:
                place = rng.randrange(len(value))
                strange = ["", "\x00", "a b", "<|x|>"] if isinstance(value[0], str) else [-5, 99]
                value[place] = rng.choice([value[-1], *strange])
            else:
                metadata[key] = rng.choice([0, -5, 2**40, math.nan, "gpt2", [], [0.0] * 3])
        try:
            tokenizer = tokenizer_of(metadata)
            tokenizer.encode("hell <|im_end|>")
            outcomes.add("works")
        except VkmoeError as error:
            assert "\n" not in str(error)
            outcomes.add("refused")
    assert outcomes == {"works", "refused"}
