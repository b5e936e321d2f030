"""Reasons say why an expert came last, and why and for which other one it left last."""

from __future__ import annotations

from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.locations import FREE, Move
from vkmoe.experts.decide.reasons import Reasons


def test_newcomers_and_their_victims() -> None:
    reasons = Reasons(KeySpace(3, 8))
    reasons.entered([Move(0, 3, FREE), Move(0, 4, 5), Move(0, 6, 7, landed=True)], "missed")
    assert [reasons.of_coming(key) for key in (3, 4, 6, 5)] == [
        "missed",
        "missed",
        "landed",
        "moved",
    ]
    assert [reasons.of_leaving(key) for key in (5, 7, 3)] == [
        "evicted for 4",
        "evicted for 6",
        "moved",
    ]


def test_the_last_reason_counts_and_another_layer_is_named() -> None:
    reasons = Reasons(KeySpace(3, 8))
    reasons.entered([Move(0, 4, 5)], "missed")
    reasons.entered([Move(0, 17, 5)], "guessed")
    assert reasons.of_leaving(5) == "evicted for 1 of layer 2"
    reasons.left([5, 17], "given back")
    assert [reasons.of_leaving(5), reasons.of_leaving(17)] == ["given back"] * 2
    reasons.entered([Move(0, 5, 17)], "pinned")
    assert reasons.of_coming(5) == "pinned" and reasons.of_leaving(17) == "evicted for 5 of layer 0"
