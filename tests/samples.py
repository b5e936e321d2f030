"""Sweeps of which a sample runs each time: `-m full` runs the rest, as .ci/run does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], is_in_sample: Callable[[Any], bool]) -> list[Any]:
    """Return the parameters of a test; a tuple holds one for each argument."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if is_in_sample(case) else pytest.mark.full,
        )
        for case in cases
    ]
