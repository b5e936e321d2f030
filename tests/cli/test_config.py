"""Values that configs made in Python refuse, and those they take, for every field."""

from __future__ import annotations

import math
from dataclasses import Field, fields
from types import NoneType
from typing import Any, get_args

import pytest

from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.errors import UsageError
from vkmoe.option_fields import flags_of, long_flag

from .test_options import HINTS, READ, choices_of, given

CASES = [(config, item) for config in (EngineConfig, SamplingConfig) for item in fields(config)]


def wrong_kinds(item: Field[Any]) -> list[Any]:
    """Values of other types, and numbers that are none."""
    kinds = get_args(HINTS[item.name]) or (HINTS[item.name],)
    wrong: list[Any] = [[1], 1j, *([] if NoneType in kinds else [None])]
    if bool in kinds:
        return [*wrong, 1, "off"]
    if int in kinds or float in kinds:
        wrong += ["1", True, math.nan, math.inf, -math.inf]
        return [*wrong, *((1.5, 1.0) if int in kinds else (10**400,))]
    return [*wrong, 5] if str in kinds else [*wrong, "nonsense", given(item).text]


@pytest.mark.parametrize(("config", "item"), CASES, ids=lambda each: getattr(each, "name", ""))
def test_a_field_takes_its_own_kind_alone(config: Any, item: Field[Any]) -> None:
    value = given(item).value
    assert getattr(config(**{item.name: value}), item.name) == value
    for wrong in wrong_kinds(item):
        with pytest.raises(UsageError, match=f"^{item.name} is ") as caught:
            config(**{item.name: wrong})
        hint = caught.value.hint
        assert hint and all(word in hint for word in choices_of(HINTS[item.name]))


@pytest.mark.parametrize("name", READ)
def test_a_text_that_cannot_be_read_names_its_option(name: str) -> None:
    (item,) = (item for item in fields(EngineConfig) + fields(SamplingConfig) if item.name == name)
    config: Any = EngineConfig if item in fields(EngineConfig) else SamplingConfig
    with pytest.raises(UsageError, match=f"^{long_flag(flags_of(item))}: ") as caught:
        config(**{name: READ[name][1]})
    assert caught.value.hint


def test_ranges_are_inclusive() -> None:
    for config, item in CASES:
        low, high = item.metadata["minimum"], item.metadata["maximum"]
        for bound, beyond in ((low, -1), (high, 1)):
            if bound is not None:
                made: Any = config
                assert getattr(made(**{item.name: bound}), item.name) == bound
                words = f"between {low} and {high}" if high is not None else f"at least {low}"
                with pytest.raises(UsageError, match=f"must be {words}"):
                    made(**{item.name: bound + beyond})
