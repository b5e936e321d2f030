"""Values that configs made in Python refuse, and those they take."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.errors import UsageError

NUMBERS = [
    (EngineConfig, "ctx_size"),
    *(
        (SamplingConfig, item.name)
        for item in fields(SamplingConfig)
        if item.name != "dry_sequence_breakers"
    ),
]
WHOLE = (
    *("ctx_size", "top_k", "repeat_last_n", "seed"),
    *("dry_allowed_length", "dry_penalty_last_n", "mirostat"),
)


@pytest.mark.parametrize(("config", "name"), NUMBERS, ids=lambda item: str(item))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", True, [1], 1j])
def test_what_is_no_finite_number_is_refused(config: Any, name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name} is ") as caught:
        config(**{name: value})
    assert caught.value.hint


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_have_no_fraction(name: str) -> None:
    config: Any = EngineConfig if name == "ctx_size" else SamplingConfig
    for value in (1.5, 1.0):
        with pytest.raises(UsageError, match=f"{name} is {value}, not a whole number"):
            config(**{name: value})
    assert getattr(config(**{name: 1}), name) == 1


@pytest.mark.parametrize("name", sorted({name for _, name in NUMBERS} - set(WHOLE)))
def test_other_numbers_may_be_whole_but_not_beyond_float(name: str) -> None:
    config: Any = SamplingConfig
    assert getattr(config(**{name: 1}), name) == 1
    with pytest.raises(UsageError, match=f"{name} is 10+, not a finite number"):
        config(**{name: 10**400})


def test_none_is_for_fields_that_may_be_none() -> None:
    assert SamplingConfig(seed=None).seed is None and EngineConfig(ctx_size=None).ctx_size is None
    value: Any = None
    with pytest.raises(UsageError, match="top_k is None, not a whole number"):
        SamplingConfig(top_k=value)


def test_ranges_are_inclusive() -> None:
    assert SamplingConfig(top_p=1).top_p == 1 and SamplingConfig(top_p=0).top_p == 0
    with pytest.raises(UsageError, match=r"top_p is 1.5, must be between 0 and 1"):
        SamplingConfig(top_p=1.5)
    with pytest.raises(UsageError, match="repeat_last_n is -2, must be at least -1"):
        SamplingConfig(repeat_last_n=-2)
