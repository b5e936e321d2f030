"""Streaming: whole characters, the same text as decoding at once, and stop strings."""

from __future__ import annotations

import random

import pytest

from vkmoe.errors import UsageError
from vkmoe.generate.detokenizer import StopMatcher, StreamDetokenizer
from vkmoe.generate.tokenizer import Tokenizer


def stream(tokenizer: Tokenizer, ids: list[int], skip_control: bool = True) -> list[str]:
    detokenizer = StreamDetokenizer(tokenizer, skip_control)
    return [*(detokenizer.feed(i) for i in ids), detokenizer.finish()]


def test_a_character_appears_with_its_last_byte(tiny_tokenizer: Tokenizer) -> None:
    ids = list("é🦙".encode())
    assert stream(tiny_tokenizer, ids) == ["", "é", "", "", "", "🦙", ""]


def test_an_unfinished_character_shows_at_the_very_end_only(tiny_tokenizer: Tokenizer) -> None:
    assert stream(tiny_tokenizer, [*b"a", 0xF0, 0x9F]) == ["a", "", "", "\ufffd"]


def test_invalid_bytes_become_replacement_characters(tiny_tokenizer: Tokenizer) -> None:
    assert stream(tiny_tokenizer, [0xFF, *b"a", 0xC3, *b"b"]) == ["\ufffd", "a", "", "\ufffdb", ""]


def test_any_ids_stream_to_what_they_decode_to(tiny_tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(tiny_tokenizer.n_vocab) for _ in range(30)]
        for skip in (True, False):
            pieces = stream(tiny_tokenizer, ids, skip)
            assert "".join(pieces) == tiny_tokenizer.decode(ids, skip_control=skip)


def test_control_tokens_do_not_show(tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer.encode("he<|im_end|><think>")
    assert "".join(stream(tiny_tokenizer, ids)) == "he<think>"
    assert "".join(stream(tiny_tokenizer, ids, skip_control=False)) == "he<|im_end|><think>"


def test_rows_beyond_the_vocabulary_have_no_text(tiny_tokenizer: Tokenizer) -> None:
    assert "".join(stream(tiny_tokenizer, [*b"a", tiny_tokenizer.n_vocab, *b"b"])) == "ab"


def run_matcher(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = ""
    for piece in pieces:
        text += matcher.feed(piece)
        if matcher.stopped:
            return text, True
    return text + matcher.finish(), False


def test_a_stop_string_over_several_pieces_never_shows() -> None:
    matcher = StopMatcher(["###"])
    pieces = [matcher.feed(piece) for piece in ("ab#", "#", "c##", "#d", "e")]
    assert pieces == ["ab", "", "##c", "", ""]
    assert matcher.stopped


def test_withheld_text_comes_out_when_nothing_follows() -> None:
    assert run_matcher(["stop"], ["a st", "o"]) == ("a sto", False)


def test_the_first_complete_stop_string_wins() -> None:
    assert run_matcher(["abcd", "b"], ["xabcdx"]) == ("xa", True)
    assert run_matcher(["b", "ab"], ["xabx"]) == ("x", True)


def test_how_text_is_cut_does_not_matter() -> None:
    rng = random.Random(1)
    for _ in range(500):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        text = "".join(rng.choices("abc", k=20))
        cuts = sorted(rng.sample(range(1, 20), 5))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, 20], strict=True)]
        expected = run_matcher(stops, list(text))
        assert run_matcher(stops, pieces) == run_matcher(stops, [text]) == expected
        assert not any(stop in expected[0] for stop in stops)


def test_without_stop_strings_text_passes() -> None:
    assert run_matcher([], ["a", "", "b"]) == ("ab", False)


def test_an_empty_stop_string_is_an_error() -> None:
    with pytest.raises(UsageError, match="stop string is empty"):
        StopMatcher(["a", ""])
