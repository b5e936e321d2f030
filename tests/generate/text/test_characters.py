"""Vocabularies of Gemma 4 and Sarvam: pairs of characters are merged, blanks are U+2581."""

from __future__ import annotations

from typing import Any

import pytest

from tests.generate.conftest import tokenizer_of
from vkmoe.errors import ModelFileError
from vkmoe.generate.text.tokenizer import StreamDetokenizer, Tokenizer
from vkmoe.generate.text.vocabulary import TokenType

WORDS = ["▁", "a", "b", "\n", "▁a", "▁ab", "\n\n", "\n\n\n", "a\n", "</s>"]
MERGES = ["▁ a", "▁a b", "\n \n", "a \n"]


def metadata(**changes: Any) -> dict[str, Any]:
    """<bos>, <|tool_response>, 256 byte tokens and the words.

    `changes` replace `tokenizer.ggml.<name>`; None removes it.
    """
    tokens = ["<bos>", "<|tool_response>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    types = [TokenType.CONTROL, TokenType.USER_DEFINED, *[TokenType.BYTE] * 256]
    values: dict[str, Any] = {
        "model": "gemma4",
        "tokens": tokens,
        "token_type": [int(kind) for kind in (*types, *[TokenType.NORMAL] * len(WORDS))],
        "merges": MERGES,
        "bos_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in values.items() if value is not None}


def gemma(**changes: Any) -> Tokenizer:
    return tokenizer_of(metadata(**changes))


def sarvam(**changes: Any) -> Tokenizer:
    return gemma(model="gpt2", pre="sarvam-moe", **changes)


def texts(tokenizer: Tokenizer, text: str) -> list[str]:
    ids = tokenizer.encode(text, add_special=False)
    return [tokenizer.token_text(i) for i in ids]


@pytest.mark.parametrize("make", [gemma, sarvam])
def test_blanks_are_marks_and_characters_without_a_token_are_bytes(make: Any) -> None:
    tokenizer = make()
    assert texts(tokenizer, " ab a") == ["▁ab", "▁a"]
    assert texts(tokenizer, "ab") == ["a", "b"]  # no blank is added
    assert texts(tokenizer, "bé") == ["b", "<0xC3>", "<0xA9>"]
    text = " ab  é🙂\n\n\ta\n"
    assert tokenizer.decode(tokenizer.encode(text)).endswith(text)
    stream = StreamDetokenizer(tokenizer, is_reply=False)
    pieces = [stream.feed(i) for i in tokenizer.encode(" é", add_special=False)]
    assert pieces == [" ", "", "é"]


def test_no_token_reaches_over_a_line_end_and_gemma_takes_runs_of_them_whole() -> None:
    for tokenizer in (gemma(), sarvam()):
        assert texts(tokenizer, "a\nb\n\n a") == ["a", "\n", "b", "\n\n", "▁a"]
    assert texts(gemma(), "\n\n\na") == ["\n\n\n", "a"]
    assert texts(sarvam(), "\n\n\na") == ["\n\n", "\n", "a"]
    assert texts(gemma(), "\n" * 4) == ["\n\n", "\n\n"]  # no token: merged


def test_gemma_begins_with_bos_whatever_the_file_says() -> None:
    assert gemma(add_bos_token=False).encode("")[:1] == [0]
    assert gemma(pre="qwen2").pre_name == "gemma4"
    assert sarvam().encode("") == []


def test_the_strike_through_of_html_ends_no_reply_of_gemma() -> None:
    end = 2 + 256 + WORDS.index("</s>")
    assert gemma().end_ids == {1}
    assert end not in gemma().special_ids
    assert texts(gemma(), "</s>")[0] == "<0x3C>"  # as any text: no merges make it


def test_a_vocabulary_without_a_byte_is_refused() -> None:
    tokens = ["x" if text == "<0x41>" else text for text in metadata()["tokenizer.ggml.tokens"]]
    with pytest.raises(ModelFileError, match="no byte token <0x41>"):
        gemma(tokens=tokens)


def test_a_long_text_is_cut_at_line_ends_even_if_a_token_has_one() -> None:
    ids = gemma().encode("a\n" * 200_000, add_special=False)
    assert ids == gemma().encode("a\n", add_special=False) * 200_000
