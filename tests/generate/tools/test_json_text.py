"""JSON that arrives: what is taken is what Python's reader takes, and nothing goes too deep."""

from __future__ import annotations

import json
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vkmoe.generate.tools.json_text import is_json

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
SETTINGS = settings(suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
SPOILED = st.text(alphabet='{}[]:,"\\u0aE-+.1 \ntruefalsn', max_size=12)


def is_json_in_python(text: str) -> bool:
    def refuse(name: str) -> NoReturn:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return text == text.strip()


@SETTINGS
@given(VALUES, st.booleans())
def test_every_value_is_taken(value: object, ascii_only: bool) -> None:
    assert is_json(json.dumps(value, ensure_ascii=ascii_only))
    assert is_json(json.dumps(value, indent=1))


@SETTINGS
@given(VALUES, SPOILED, st.integers(0, 50))
def test_what_python_refuses_is_refused(value: object, spoiled: str, place: int) -> None:
    text = json.dumps(value)
    text = text[:place] + spoiled + text[place + 1 :]
    assert is_json(text) == is_json_in_python(text)
    assert is_json(spoiled) == is_json_in_python(spoiled)


@pytest.mark.parametrize(
    "text", ["", "NaN", "Infinity", "01", "1.", ".5", "+1", "١", '"\t"', "{,}"]
)
def test_near_misses_are_refused(text: str) -> None:
    assert not is_json(text)


def test_depth_and_length_cost_no_stack() -> None:
    assert is_json("[" * 100_000 + "]" * 100_000)
    assert is_json('{"a":' * 50_000 + "1" + "}" * 50_000)
    assert not is_json("[" * 100_000)
    assert is_json("9" * 100_000)
