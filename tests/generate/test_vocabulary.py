"""Damaged vocabularies: one clear line for each, and never a crash."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from vkmoe.errors import ModelFileError, UnsupportedModelError, VkmoeError
from vkmoe.generate.tokenizer import Tokenizer

from .conftest import spm_metadata, tiny_metadata, tokens_with


def tiny(**changes: Any) -> Tokenizer:
    return Tokenizer.from_metadata(tiny_metadata(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "no tokenizer.ggml.model"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"tokens": []}, "vocabulary is empty"),
        ({"tokens": "abc"}, "tokens is not a list of strings"),
        ({"tokens": np.zeros(3)}, "tokens is not a list of strings"),
        ({"merges": ["h e", 5]}, "merges is not a list of strings"),
        ({"tokens": tokens_with(_5="he")}, "'he' twice, as 5 and 256"),
        ({"merges": ["h e", "x yz"]}, "merge 1 is not a pair"),
        ({"merges": ["a b"]}, "do not fit"),
        ({"merges": ["nothing"]}, "merge 0 is not a pair"),
        ({"merges": ["h e", " "]}, "merge 1 is not a pair"),
        ({"merges": ["a "]}, "merge 0 is not a pair"),
        ({"merges": [""]}, "merge 0 is not a pair"),
        ({"token_type": [1, 1]}, "262 tokens but 2 token types"),
        ({"token_type": [1] * 261 + [9]}, "token 261 the unknown type 9"),
        ({"token_type": "x"}, "not a list of integers"),
        ({"token_type": ["a"] * 262}, "not a list of integers"),
        ({"bos_token_id": 262}, "bos_token_id is 262"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eos_token_id": 2**64 - 1}, "eos_token_id is 18446744073709551615"),
        ({"eos_token_id": "x"}, "not an integer"),
        ({"eot_token_id": 2.5}, "not an integer"),
        ({"add_bos_token": 3}, "not true or false"),
        ({"add_bos_token": True, "bos_token_id": None}, "no tokenizer.ggml.bos_token_id"),
    ],
)
def test_damaged_metadata_is_one_clear_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        tiny(**changes)
    assert "\n" not in str(caught.value)


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
                value[place] = rng.choice([value[-1], "", "\x00", "a b", "<|x|>", math.nan])
            else:
                metadata[key] = rng.choice([None, 0, -5, 2**40, "gpt2", [], np.zeros(3)])
        try:
            tokenizer = Tokenizer.from_metadata(metadata)
            tokenizer.encode("hell <|im_end|>")
            outcomes.add("works")
        except VkmoeError as error:
            assert "\n" not in str(error)
            outcomes.add("refused")
    assert outcomes == {"works", "refused"}
