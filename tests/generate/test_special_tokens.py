"""Special tokens by their text, where they stand in a text, and bytes that are no UTF-8."""

from __future__ import annotations

from typing import Any

import pytest

from vkmoe.generate.byte_level import lenient_text
from vkmoe.generate.detokenizer import StreamDetokenizer
from vkmoe.generate.sentencepiece import text_and_bytes
from vkmoe.generate.special_tokens import SpecialTokens
from vkmoe.generate.tokenizer import Tokenizer

from .conftest import tiny_metadata

A, B, LONG = 0, 1, 2
SPECIAL = SpecialTokens(["<a>", "<b>", "a>xyz"], on_request=[A, LONG], always=[B])


def with_tokens(*texts: str, kind: int = 3, **changes: Any) -> Tokenizer:
    """The tiny tokenizer and tokens 262, 263, ... of one type."""
    metadata = tiny_metadata(**changes)
    metadata["tokenizer.ggml.tokens"] += texts
    metadata["tokenizer.ggml.token_type"] += [kind] * len(texts)
    return Tokenizer.from_metadata(metadata)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        ("x", ["x"]),
        ("<a><a>", [A, A]),
        ("x<a>y<b>", ["x", A, "y", B]),
        ("<a>xyz", ["<", LONG]),  # the longer one, although the other begins before it
        ("<a", ["<a"]),
    ],
)
def test_text_is_cut_at_the_longest_special_tokens(text: str, parts: list[str | int]) -> None:
    assert SPECIAL.cut(text, parse_special=True) == parts


def test_only_some_are_looked_for_unasked() -> None:
    assert SPECIAL.cut("<a>x<b>", parse_special=False) == ["<a>x", B]


def test_blanks_after_a_swallowing_token_are_dropped() -> None:
    special = SpecialTokens(["<a>"], [A], [], swallow_blanks=[A])
    assert special.cut(" <a> \t\n x<a>\u00a0<a> ", True) == [" ", A, "x", A, "\u00a0", A]


@pytest.mark.parametrize(
    "text",
    ["</s>", "<|return|>", "<|call|>", "<|end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>", "[EOS]"],
)
def test_an_end_is_known_by_its_text_whatever_its_type(text: str) -> None:
    for kind in (1, 3, 4):
        tokenizer = with_tokens(text, kind=kind)
        assert 262 in tokenizer.end_ids
        assert tokenizer.encode(f"he{text}") == [256, 262]
        assert 262 not in tokenizer.encode(text, parse_special=False)
        assert tokenizer.decode([256, 262], skip_control=True) == "he"


def test_in_gpt_oss_a_message_ends_and_the_reply_goes_on() -> None:
    tokenizer = with_tokens("<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>")
    assert {263, 264} <= tokenizer.end_ids and 262 not in tokenizer.end_ids
    stream = StreamDetokenizer(tokenizer)
    shown = "".join(map(stream.feed, [265, 256, 266, 257, 262, 263]))
    assert shown == "<|channel|>he<|message|>ll<|end|>"


def test_in_glm_the_next_speaker_ends_a_reply() -> None:
    speakers = ("<|user|>", "<|observation|>")
    assert {262, 263} <= with_tokens(*speakers, "[gMASK]").end_ids
    assert not {262, 263} & with_tokens(*speakers).end_ids


def test_text_of_infilling_marks_is_plain_unless_asked_for() -> None:
    tokenizer = with_tokens("<|fim_prefix|>", kind=4)
    assert tokenizer.encode("<|fim_prefix|>") == [262]
    assert 262 not in tokenizer.encode("<|fim_prefix|>", parse_special=False)
    assert 262 not in tokenizer.end_ids


def test_empty_tokens_get_a_name() -> None:
    assert with_tokens("", "").token_text(263) == "[EMPTY_263]"


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"a\xff\x80b", "a\ufffd\ufffdb"),
        (b"\xe4\xb8", "\ufffd\ufffd"),
        (b"\xc0\x80\xe4\xb8\xad", "\0中"),
        (b"\xed\xa0\x80", "\ud800"),
        (b"\xf4\x90\x80\x80", "\ufffd" * 4),
        (b"\xf0\x9f\xa6\x99\xf8", "🦙\ufffd"),
    ],
)
def test_bytes_that_begin_no_character_are_replaced(raw: bytes, text: str) -> None:
    assert lenient_text(raw) == text


def test_a_symbol_is_as_long_as_its_first_byte_says() -> None:
    raw = b"ab\xe4cd\xc3\xa9\x80\xf0\x9f"
    assert list(text_and_bytes(raw)) == ["ab", b"\xe4cd", "é", b"\x80", b"\xf0\x9f"]


def test_bytes_are_read_like_text_and_damaged_ones_replaced() -> None:
    tokenizer = with_tokens("<|x|>")
    for text in ("hell é🦙<|im_end|>", "", "\0"):
        assert tokenizer.encode(text.encode()) == tokenizer.encode(text)
    assert tokenizer.encode(b"he\xff<|x|>") == [256, *"\ufffd".encode(), 262]
    assert tokenizer.encode(b"he\xed\xa0\x80ll") == [256, 0xED, 0xA0, 0x80, 257]


def test_surrogates_in_bytes_are_cut_as_the_symbols_they_are() -> None:
    metadata = tiny_metadata(merges=["í ł", "he ll", "h e", "l l"])
    metadata["tokenizer.ggml.tokens"] += ["íł", "íłĢ"]
    del metadata["tokenizer.ggml.token_type"]
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode(b"\xed\xa0\x80he") == [262, 0x80, 256]
    private = "\U000f0000\U0010ffff".encode()  # what stands in for them is not in the text
    assert tokenizer.encode(private + b"\xed\xbf\xbf") == [*private, 0xED, 0xBF, 0xBF]
