"""SentencePiece vocabularies small enough to reason about: merging, bytes, blanks, damage."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.generate.conftest import file_of, spm_metadata, tokenizer_of
from vkmoe.errors import ModelFileError
from vkmoe.generate.text.sentencepiece import SentencePieceCodec
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.generate.text.vocabulary import read_vocabulary

UNK, BOS, EOS = 0, 1, 2
BYTE = 3  # the first of 256
BLANK = 259
WORDS = ["▁", "a", "b", "ab", "▁a", "▁ab", "ba", "▁▁", "▁▁▁", "<think>", "<0"]


def spm(**changes: Any) -> Tokenizer:
    return tokenizer_of(spm_metadata(WORDS, **changes))


def texts(tokenizer: Tokenizer, text: str, **options: bool) -> list[str]:
    ids = tokenizer.encode(text, add_special=False, **options)
    return [tokenizer.token_text(i) for i in ids]


def scored(**scores: float) -> list[float]:
    """Scores: 0 for special and byte tokens, -1 for every word but those given."""
    words = {word: -1.0 for word in WORDS} | {k.replace("_", "▁"): v for k, v in scores.items()}
    return [0.0] * BLANK + list(words.values())


def test_the_best_score_is_merged_first_whatever_its_place() -> None:
    assert texts(spm(scores=scored(ab=-2, ba=-3), add_space_prefix=False), "aba") == ["ab", "a"]
    assert texts(spm(scores=scored(ab=-3, ba=-2), add_space_prefix=False), "aba") == ["a", "ba"]


def test_of_equal_scores_the_leftmost_pair_is_merged_first() -> None:
    equal = spm(scores=[0.0] * 270, add_space_prefix=False)
    assert texts(equal, "babab") == ["ba", "ba", "b"]
    assert texts(equal, "abab") == ["ab", "ab"]
    assert texts(equal, " ab") == ["▁ab"]
    assert texts(equal, "é") == ["<0xC3>", "<0xA9>"]


def test_the_package_merges_as_the_plain_twin_does() -> None:
    """Words of few letters, so that many tokens overlap."""
    rng = random.Random(5)
    for alphabet in ("ab", "aab▁", "abé"):
        words = {"".join(rng.choices(alphabet, k=rng.randint(2, 5))) for _ in range(40)}
        metadata = spm_metadata(sorted(words | set(alphabet) - {"é"}), add_space_prefix=False)
        n_tokens = len(metadata["tokenizer.ggml.tokens"])
        metadata["tokenizer.ggml.scores"] = rng.sample(range(9999), n_tokens)
        codec = SentencePieceCodec(read_vocabulary(file_of(metadata)))
        assert not codec.has_equal_scores
        for _ in range(100):
            text = "".join(rng.choices(alphabet + "c", k=rng.randint(1, 60)))
            assert codec.encode(text, False) == codec.encode_plainly(text)


def test_a_blank_is_put_before_a_text_and_taken_away_again() -> None:
    assert texts(spm(), "ab") == ["▁ab"]
    assert texts(spm(add_space_prefix=False), "ab") == ["ab"]
    for flag in (True, False):
        tokenizer = spm(add_space_prefix=flag)
        for text in ("ab", " ab", "", " ", "a b", "</s>ab", "ab<s> <s>b "):
            assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


def test_a_blank_is_put_after_every_special_token() -> None:
    assert texts(spm(), "ab<think>ab</s>") == ["▁ab", "<think>", "▁ab", "</s>"]
    assert texts(spm(), "<think> ab") == ["<think>", "▁", "▁ab"]


def test_runs_of_blanks_grow_from_the_left() -> None:
    assert texts(spm(add_space_prefix=False), " " * 7) == ["▁▁▁", "▁▁▁", "▁"]
    assert texts(spm(), " " * 4) == ["▁▁▁", "▁▁"]


def test_characters_without_a_token_become_their_bytes() -> None:
    tokenizer = spm()
    assert texts(tokenizer, "é") == ["▁", "<0xC3>", "<0xA9>"]
    assert texts(tokenizer, "\n\0") == ["▁", "<0x0A>", "<0x00>"]
    assert tokenizer.decode(tokenizer.encode("aé🦙\n")) == "<s>aé🦙\n"


def test_a_token_is_reached_through_characters_that_are_none() -> None:
    """`xy` is a token, `x` and `y` are not."""
    tokenizer = tokenizer_of(spm_metadata(["▁", "xy"]))
    assert texts(tokenizer, "xyx") == ["▁", "xy", "<0x78>"]


def test_bos_is_added_and_the_usual_ids_are_bos_and_eos() -> None:
    assert spm().encode("ab") == [BOS, *spm().encode("ab", add_special=False)]
    assert spm(add_bos_token=False, add_eos_token=True).encode("")[-1:] == [EOS]
    assert spm().end_ids == {EOS}
    assert spm(bos_token_id=EOS).bos_id == EOS


def test_unused_tokens_have_no_text() -> None:
    metadata = spm_metadata(WORDS)
    metadata["tokenizer.ggml.token_type"][BLANK + 1] = 5
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.decode([BLANK + 1, BLANK + 2]) == "b"
    assert texts(tokenizer, "ba") == ["▁", "ba"]
    assert texts(tokenizer, "bca")[-1] == "a"  # but it is still read


def test_phi3_drops_the_blanks_after_its_special_tokens() -> None:
    metadata = spm_metadata(WORDS)
    assert texts(tokenizer_of(metadata), "<think>  ab") == ["<think>", "▁▁", "▁ab"]
    metadata["general.name"] = "Phi3 Mini"
    tokenizer = tokenizer_of(metadata)
    assert texts(tokenizer, "<think>  ab") == ["<think>", "▁ab"]
    assert texts(tokenizer, "<think> \n") == ["<think>"]
    assert texts(tokenizer, "<s>  ab") == ["<s>", "▁▁", "▁ab"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "no metadata key 'tokenizer.ggml.scores'"),
        ({"scores": [0.0] * 3}, "270 tokens but 3 scores"),
        ({"scores": [float("nan")] * 270}, "token 0 has the impossible score nan"),
        ({"scores": [0.0] * 269 + [float("inf")]}, "token 269 has the impossible score inf"),
        ({"scores": "abc"}, "scores' should be an array of numbers"),
        ({"add_space_prefix": 1}, "add_space_prefix' should be a bool"),
        ({"bos_token_id": 270}, "bos_token_id is 270"),
    ],
)
def test_damaged_metadata_is_one_clear_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        spm(**changes)
    assert "\n" not in str(caught.value)


def test_missing_byte_tokens_are_named() -> None:
    metadata = spm_metadata(WORDS)
    metadata["tokenizer.ggml.tokens"][BYTE + 10] = "other"
    with pytest.raises(ModelFileError, match=r"no byte token <0x0A> \(1 of 256 are missing\)"):
        tokenizer_of(metadata)


def test_an_absurdly_long_token_is_refused_at_once() -> None:
    with pytest.raises(ModelFileError, match="token 260 has 9000000 characters"):
        tokenizer_of(spm_metadata(["▁", "a" * 9_000_000]))
