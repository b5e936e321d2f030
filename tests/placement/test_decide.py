"""What is decided around the plan: the memory of the predictor has a line where there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.tiny import model_path
from tests.gpu.invented import LAVAPIPE
from vkmoe.config import EngineConfig
from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.predict import Correlation
from vkmoe.experts.decide.settings import CacheSettings
from vkmoe.facts import Allocation
from vkmoe.gpu.link_speed import LinkSpeed
from vkmoe.models import open_model
from vkmoe.placement.plan import Decision, decide, predictor_lines

from .invented_models import DENSE, N_EXPERTS, N_LAYERS, SPEC

GUESSING = CacheSettings(predictor="correlation")


def decided_for(measure: Callable[[], LinkSpeed | None], **asked: Any) -> Decision:
    """The decision for a tiny model."""
    with open_model(model_path("moe_plain")) as file:
        config = EngineConfig(ctx_size=16, **asked)
        return decide(config, file, LAVAPIPE, measure_link=measure)


def decided_lines(**asked: Any) -> list[Allocation]:
    """Of a predictor, in the plan for a tiny model."""
    plan = decided_for(lambda: None, **asked).plan
    return [line for line in plan.lines if "predictor" in line.item]


@pytest.mark.parametrize(
    ("asked", "n_measured"), [({}, 0), ({"expert_slots": 4}, 1), ({"expert_cache": "1KiB"}, 1)]
)
def test_the_link_is_measured_once_where_experts_miss(
    asked: dict[str, Any], n_measured: int, caplog: pytest.LogCaptureFixture
) -> None:
    """What was measured decides how, and the log says why."""
    links: list[LinkSpeed] = []

    def measure() -> LinkSpeed:
        links.append(LinkSpeed(1e9, 9e9, 8e9))
        return links[0]

    caplog.set_level("INFO", "vkmoe")
    decided = decided_for(measure, miss="gather", **asked)
    assert (len(links), decided.link) == (n_measured, links[0] if links else None)
    assert decided.plan.mode.gathers == decided.plan.mode.in_cache == ("expert_slots" in asked)
    assert ("are gathered: as --miss" in caplog.text) == decided.plan.mode.in_cache


def test_the_predictor_has_the_bytes_that_its_line_says() -> None:
    (line,) = predictor_lines(GUESSING, SPEC, N_LAYERS, LAVAPIPE)
    made = Correlation(KeySpace(N_LAYERS, N_EXPERTS), 256.0)
    arrays = [value for value in vars(made).values() if isinstance(value, np.ndarray)]
    taken = sum(array.nbytes for array in arrays)
    assert line.place == "host" and 0.99 * taken < line.n_bytes <= taken
    assert line.n_bytes > 3 << 20, "of 48 layers of 128 experts"


def test_a_predictor_that_is_off_or_remembers_no_pairs_has_no_line() -> None:
    for settings in (CacheSettings(), replace(GUESSING, predictor="previous")):
        assert predictor_lines(settings, SPEC, N_LAYERS, LAVAPIPE) == ()
    assert predictor_lines(GUESSING, DENSE, 0, LAVAPIPE) == ()


@pytest.mark.parametrize(
    ("asked", "n_lines"),
    [
        ({"expert_slots": 4}, 1),
        ({"expert_slots": 4, "moe_predict_prefetch": False}, 0),
        ({"expert_slots": 4, "expert_predictor": "previous"}, 0),
        ({"host_pool": "192KiB"}, 1),
        ({}, 0),
        ({"expert_predictor": "correlation"}, 0),
    ],
)
def test_only_what_runs_is_in_the_plan(asked: dict[str, Any], n_lines: int) -> None:
    assert len(decided_lines(**asked)) == n_lines
