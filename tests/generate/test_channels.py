"""Replies in channels, cut into pieces in every way."""

from __future__ import annotations

from itertools import groupby

import pytest

from vkmoe.generate.chat import FINAL, ReplyChannels

HARMONY = (
    "<|channel|>analysis<|message|>2 < 3 <|, so yes.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Yes.\n"
)
TOOL = (
    "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    '{"a": 1}<|end|><|start|>assistant<|channel|>final<|message|>2'
)


def sorted_by_channel(text: str, n_chars: int) -> list[tuple[str, str]]:
    """The reply in pieces of `n_chars`; neighbours of one channel joined."""
    channels = ReplyChannels(has_channels=True)
    parts = [p for at in range(0, len(text), n_chars) for p in channels.feed(text[at:][:n_chars])]
    parts += channels.finish()
    assert all(part.text for part in parts)
    by_channel = groupby(parts, key=lambda part: part.channel)
    return [(name, "".join(part.text for part in group)) for name, group in by_channel]


@pytest.mark.parametrize("n_chars", [1, 2, 3, 7, 11, 1000])
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (HARMONY, [("analysis", "2 < 3 <|, so yes."), (FINAL, "Yes.\n")]),
        (TOOL, [("commentary", '{"a": 1}'), (FINAL, "2")]),
        ("<think>\nno channels</think>ok <|", [(FINAL, "<think>\nno channels</think>ok <|")]),
        ("<|message|>bare", [(FINAL, "bare")]),
        ("<|channel|>analysis", []),
        ("", []),
    ],
)
def test_text_is_sorted_however_it_is_cut(
    text: str, wanted: list[tuple[str, str]], n_chars: int
) -> None:
    assert sorted_by_channel(text, n_chars) == wanted


def test_text_without_marks_is_not_held_back() -> None:
    channels = ReplyChannels(has_channels=True)
    assert channels.feed("a <b") == [(FINAL, "a <b")]
    assert channels.feed("<|") == []
    assert channels.feed("x") == [(FINAL, "<|x")]


def test_marks_are_text_where_the_vocabulary_has_none() -> None:
    channels = ReplyChannels(has_channels=False)
    assert channels.feed(HARMONY) == [(FINAL, HARMONY)]
    assert channels.finish() == []
