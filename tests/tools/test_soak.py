"""The soaks: their cases are repeatable and reach every way, and a wrong bit is noticed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.engine.tiny import model_path
from tools import soak
from tools.soak import COPIES, RESIDENTS, ModelFacts, draw, script

FACTS = ModelFacts(
    n_vocab=300, n_layers=3, n_experts=16, n_used=2, experts_bytes=48_000, least_pool=9_000
)


def test_a_seed_is_a_case() -> None:
    assert str(draw(5, FACTS)) == str(draw(5, FACTS)) != str(draw(6, FACTS))
    assert script(FACTS, 5, 90, 40) == script(FACTS, 5, 90, 40) != script(FACTS, 6, 90, 40)


def test_every_choice_is_drawn() -> None:
    cases = [draw(seed, FACTS) for seed in range(400)]
    for name, choices in {
        "executor": {"fused", "stepped"},
        "expert_slots": {None, 1, 2, 4, 8, 15, 16},
        "moe_predict_prefetch": {None, False},
        "miss": {"read", "gather", "auto"},
        "promote_on_read": {None, False, True},
        "host_pool": {None, "24000", "12000", "9000"},
        "expert_policy": {"lru", "slru", "lfru", "forecast"},
    }.items():
        assert {case.options.get(name) for case in cases} == choices, name
    assert {case.copies for case in cases} == {*COPIES}
    for kind in RESIDENTS.values():
        assert any(kind.items() <= case.options.items() for case in cases)
    assert {case.link is None for case in cases} == {case.warm is None for case in cases}
    assert all(case.options["executor"] == "stepped" for case in cases if case.options["host_pool"])


def test_a_script_is_made_of_sequences() -> None:
    for number in range(20):
        steps = script(FACTS, number, 90, 40)
        n_begun = sum(step.position == 0 for step in steps)
        assert len(steps) == 90 and n_begun >= 2 and steps[-1].with_logits
        for last, step in pairwise(steps):
            assert step.position < 40 and step.position <= last.position + 1
            assert 0 < step.token < FACTS.n_vocab


def test_a_case_is_run_and_a_wrong_bit_noticed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    right = soak._right(str(model_path("moe_odd")), tmp_path, n_tokens=8)
    case = draw(4, right.facts)
    assert not soak._judge(right, case, 0, "again")
    assert "same" in capfd.readouterr().out
    right.digests[0][-1] = "of other logits"
    with pytest.raises(SystemExit, match="DIFFERENT at step 7"):
        soak._judge(right, case, 0, "again")
