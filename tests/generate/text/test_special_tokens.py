"""Special tokens by their text, and where they stand in a text."""

from __future__ import annotations

import numpy as np
import pytest

from tests.generate.conftest import with_tokens
from vkmoe.batch import TopLogits
from vkmoe.config import SamplingConfig
from vkmoe.generate.loop import Generation, Request
from vkmoe.generate.text.tokenizer import StreamDetokenizer

A, B, LONG = 262, 263, 264


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", []),
        ("x", [*b"x"]),
        ("<a><a>", [A, A]),
        ("x<a>y<b>", [*b"x", A, *b"y", B]),
        ("<a>xyz", [*b"<", LONG]),  # the longer one, although the other begins before it
        ("<a", [*b"<a"]),
    ],
)
def test_text_is_cut_at_the_longest_special_tokens(text: str, ids: list[int]) -> None:
    assert with_tokens("<a>", "<b>", "a>xyz").encode(text) == ids


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
        assert "".join(map(StreamDetokenizer(tokenizer).feed, [256, 262])) == "he"


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


def test_half_of_a_surrogate_pair_is_replaced() -> None:
    assert with_tokens("<|x|>").encode("he\ud800ll") == [256, *3 * "\ufffd".encode(), 257]


def only(token: int) -> TopLogits:
    """Logits that leave no choice but `token`."""
    return TopLogits(np.array([token], np.int32), np.zeros(1, np.float32), 265, 0.0)


def test_control_tokens_that_a_request_shows_are_text() -> None:
    tokenizer = with_tokens("[CALLS]", "[ARGS]", "</s>")
    ids = [262, 256, 263, 257]
    stream = StreamDetokenizer(tokenizer, shown=frozenset({262}))
    assert "".join(map(stream.feed, ids)) == "[CALLS]hell"
    request = Request((65,), SamplingConfig(temp=0.0), shown=frozenset({262, 264}))
    generation = Generation(request, tokenizer, ctx_size=16)
    for token in (*ids, 264):
        generation.choose(only(token), lambda: pytest.fail("no logits are needed"))
    text = "".join(piece.text for piece in generation.take_pieces())
    assert (text, generation.finish_reason) == ("[CALLS]hell", "stop")
