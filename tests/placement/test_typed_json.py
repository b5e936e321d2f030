"""Values of declared types become JSON and the same values again; what is wrong is said."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import pytest

from tests.gpu.invented import DEVICES
from vkmoe.facts import DeviceInfo
from vkmoe.placement.typed_json import plain, typed


class Part(NamedTuple):
    kind: Literal["left", "right"]
    size: tuple[int, int]
    name: str = ""


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    speeds: Mapping[str, float]
    flags: frozenset[str] = frozenset()
    limit: int | None = None
    is_new: bool = False


WHOLE = Whole((Part("left", (1, 2)), Part("right", (0, 1 << 60), "x")), {"a": 0.5}, frozenset("ba"))


@pytest.mark.parametrize("value", [WHOLE, *DEVICES], ids=lambda value: type(value).__name__)
def test_what_was_written_is_read(value: Whole | DeviceInfo) -> None:
    text = json.dumps(plain(value), allow_nan=False)
    assert typed(type(value), json.loads(text)) == value
    assert json.loads(text) == plain(value), "JSON has all of it"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"parts": 3}, "3 is not a tuple"),
        ({"parts": [{"kind": "up", "size": [1, 2]}]}, "'up' is not one of left, right"),
        ({"parts": [{"kind": [], "size": [1, 2]}]}, "[] is not one of left, right"),
        ({"parts": [{"kind": "left", "size": [1]}]}, "[1] is not a tuple"),
        ({"parts": [{"kind": "left", "size": [1, 2.5]}]}, "2.5 is not a number"),
        ({"parts": [{"kind": "left", "size": [1, True]}]}, "True is not a number"),
        ({"parts": [{"kind": "left", "size": [1, -2]}]}, "-2 is not a number"),
        ({"parts": [{"kind": "left"}]}, "it lacks 'size'"),
        ({"parts": [["left", [1, 2]]]}, "is not a Part"),
        ({"speeds": {"a": "1"}}, "'1' is not a speed"),
        ({"speeds": {"a": float("nan")}}, "nan is not a speed"),
        ({"speeds": {"a": float("inf")}}, "inf is not a speed"),
        ({"speeds": []}, "[] is not a Mapping"),
        ({"flags": [1]}, "1 is not a text"),
        ({"flags": "abc"}, "'abc' is not a frozenset"),
        ({"limit": "none"}, "'none' is not a number"),
        ({"is_new": 1}, "1 is not a yes or no"),
        ({"colour": "red"}, "'colour' is not known"),
    ],
)
def test_what_is_wrong_is_one_error_that_says_so(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as caught:
        typed(Whole, plain(WHOLE) | changes)
    assert told in str(caught.value)


def test_a_long_value_is_cut_in_the_error() -> None:
    with pytest.raises(ValueError) as caught:
        typed(Whole, "x" * 10_000)
    assert len(str(caught.value)) < 100 and "not a Whole" in str(caught.value)
