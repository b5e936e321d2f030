"""Marks in text that comes in pieces, such as stop strings."""

from __future__ import annotations

import random

from vkmoe.generate.reply import MarkFinder


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
