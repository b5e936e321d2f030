"""Marks in text that comes in pieces: stop strings, and the channels of a reply."""

from __future__ import annotations

import random
from itertools import groupby

import pytest

from vkmoe.generate.reply import FINAL, MarkFinder, ReplyChannels

HARMONY = (
    "<|channel|>analysis<|message|>2 < 3 <|, so yes.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Yes.\n"
)
TOOL = (
    "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    '{"a": 1}<|end|><|start|>assistant<|channel|>final<|message|>2'
)


def before_stop(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    """The text before the first stop string, and whether there is one."""
    finder = MarkFinder(stops)
    text = ""
    for piece in pieces:
        certain, stop = finder.feed(piece)
        text += certain
        if stop is not None:
            return text, True
    return text + finder.finish(), False


def test_a_stop_string_over_several_pieces_never_shows() -> None:
    feed = MarkFinder(["###"]).feed
    found = [feed(piece) for piece in ("ab#", "#", "c##", "#d", "e")]
    assert found == [("ab", None), ("", None), ("##c", None), ("", "###"), ("de", None)]


def test_withheld_text_comes_out_when_nothing_follows() -> None:
    assert before_stop(["stop"], ["a st", "o"]) == ("a sto", False)


def test_the_first_complete_stop_string_wins() -> None:
    assert before_stop(["abcd", "b"], ["xabcdx"]) == ("xa", True)
    assert before_stop(["b", "ab"], ["xabx"]) == ("x", True)


def test_how_text_is_cut_does_not_matter() -> None:
    rng = random.Random(1)
    for _ in range(500):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        text = "".join(rng.choices("abc", k=20))
        cuts = sorted(rng.sample(range(1, 20), 5))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, 20], strict=True)]
        expected = before_stop(stops, list(text))
        assert before_stop(stops, pieces) == before_stop(stops, [text]) == expected
        assert not any(stop in expected[0] for stop in stops)


def test_without_stop_strings_text_passes() -> None:
    assert before_stop([], ["a", "", "b"]) == ("ab", False)


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
