"""What every comparison of placements rests on: all arms found the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vkmoe.errors import VkmoeError

__all__ = ["check_same_logits"]


class ArmWithLogits(Protocol):
    """An arm that kept its logits, float32 [n_vocab], after each turn."""

    name: str
    logits: list[NDArray[np.float32]]


def check_same_logits(arms: Sequence[ArmWithLogits]) -> None:
    """Raises VkmoeError unless the logits of all are finite and the same to the last bit."""
    for arm in arms[1:]:
        for ours, theirs in zip(arms[0].logits, arm.logits, strict=True):
            if not (np.isfinite(ours).all() and np.array_equal(ours, theirs)):
                raise VkmoeError(
                    f"{arms[0].name!r} and {arm.name!r} give other logits",
                    "this is a bug, please report it with the card above",
                )
