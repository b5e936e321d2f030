"""Special tokens by their text, where they stand in a text, and bytes that are no UTF-8."""

from __future__ import annotations

from typing import Any

import pytest

from vkmoe.generate.detokenizer import StreamDetokenizer
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


def test_bytes_are_read_like_text_and_damaged_ones_replaced() -> None:
    tokenizer = with_tokens("<|x|>")
    for text in ("hell é🦙<|im_end|>", "", "\0"):
        assert tokenizer.encode(text.encode()) == tokenizer.encode(text)
    assert tokenizer.encode(b"he\xff<|x|>") == [256, *"\ufffd".encode(), 262]
    for damaged in (b"he\xed\xa0\x80ll", "he\ud800ll"):
        assert tokenizer.encode(damaged) == [256, *3 * "\ufffd".encode(), 257]
