"""The benchmarks of moving experts run with their smallest settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.prefetch import ARMS
from bench.prefetch_report import ratio_of_sums, rival_of, verdict
from tests.bench.test_bench import document, positive, run
from vkmoe.bench.measure import Summary

TURNS = [10.0, 20.0, 30.0, 10.0, 20.0]
LESS = ratio_of_sums([9.0, 18.0, 27.0, 9.0, 18.0], TURNS)
UNSURE = ratio_of_sums([9.0, 21.0, 29.0, 11.0, 19.0], TURNS)


def test_prefetch() -> None:
    few = ["--tokens", "2", "--warm", "2", "--repeats", "1", "--shares", "25", "--link", "200"]
    arms = ["none", "correlation, promoting", "correlation, waiting"]
    done = document("prefetch", *few, "--arms", ",".join(arms))
    results = done["results"]
    assert positive(results["rows"]) and len(results["rows"]) == 3 * len(arms)
    for text in results["shares"]["25 %"]["texts"].values():
        assert set(text) == set(arms)
        for arm in text.values():
            assert 0 <= arm["hit_rate"] < 1 and arm["read_bytes_per_token"] > 0
            moved = arm["read_bytes_per_token"] + arm["copied_bytes_per_token"]
            assert arm["moved_bytes_per_token"] == pytest.approx(moved)
    assert text["correlation, promoting"]["landed_per_token"] > 0
    assert results["fewer_bytes_read"] == {"25 %": {}}, "one turn says nothing"
    assert results["default_agrees"] == {"25 %": {}}


def test_an_arm_is_compared_with_no_predictor_whose_copies_go_the_same_way() -> None:
    rivals = {name: rival_of(name) for name in ARMS}
    assert set(rivals.values()) <= {None, *ARMS}
    assert (rivals["none"], rivals["none, waiting"], rivals["frequency"]) == (None, "none", "none")
    assert rivals["correlation, waiting"] == "none, waiting"
    for name, rival in rivals.items():
        if not name.startswith("none"):
            assert ARMS[name] | {"expert_predictor": "none"} == ARMS[str(rival)], name


def test_ratios_of_bytes() -> None:
    assert tuple(LESS) == pytest.approx((0.9, 0.9, 0.9, 5))
    assert UNSURE.low < 1 < UNSURE.high


@pytest.mark.parametrize(
    ("prose", "structured", "agrees"), [(LESS, UNSURE, True), (UNSURE, UNSURE, False)]
)
def test_a_predictor_that_reads_less_on_two_texts_ought_to_be_the_default(
    prose: Summary, structured: Summary, agrees: bool
) -> None:
    def arms(found: Summary) -> dict[str, Any]:
        ratios = {"relative_read_bytes": found, "relative_moved_bytes": UNSURE}
        return {"none": {}, "token": ratios, "none, waiting": ratios, "token, waiting": ratios}

    texts = {"code": arms(LESS), "prose": arms(prose), "structured": arms(structured)}
    said = verdict({"25 %": {"texts": texts}})
    where = [name for name, found in zip(texts, (LESS, prose, structured), strict=True)
             if found is LESS]  # fmt: skip
    assert said["fewer_bytes_read"]["25 %"]["token"] == where
    assert said["fewer_bytes_in_all"]["25 %"]["token"] == []
    assert said["default_agrees"] == {"25 %": {"overlapping": agrees, "waiting": agrees}}


def test_after_prompt() -> None:
    few = ["--length", "64", "--ubatch-size", "32", "--decoded", "66", "--invented", "16"]
    rows = document("after_prompt", *few)["results"]["rows"]
    assert len(rows) == (3 * 2 * 2 + 2) * 2 * 3, "shares, ways and kinds, the engine; windows"
    assert all(0 <= row["value"]["median"] <= 100 for row in rows if row["unit"] == "%")


def test_prompt_link(tmp_path: Path) -> None:
    """An arm has its seconds on the device as it is, and then also how busy the link is."""
    few = ["--cache", str(tmp_path), "--lengths", "40", "--ubatch-size", "64", "--repeats", "1"]
    rows = document("prompt_link", *few)["results"]["rows"]
    assert positive(rows) and len(rows) == 3 + 2 * 3
    busy = [row["value"]["median"] for row in rows if row["unit"] == "%"]
    assert len(busy) == 3 and min(busy) > 5 and max(busy) <= 100


def test_prefetch_refuses_arms_that_are_none() -> None:
    done = run("prefetch", "--arms", "none,tomorrow")
    assert done.returncode == 2 and "previous" in done.stderr


def test_host_pool(tmp_path: Path) -> None:
    few = ["--preset", "tiny", "--layers", "3", "--cache", str(tmp_path)]
    results = document("host_pool", *few, "--tokens", "2", "--repeats", "1")["results"]
    assert positive(results["rows"])
    whole, guessing, *_, none = results["arms"].values()
    assert set(whole) == {"values"} and none["hinted_per_token"] == 0
    for arm in (guessing, none):
        assert arm["pool_bytes"] <= results["pool_bytes"] < results["expert_bytes"] / 2.9
        assert arm["read_bytes_per_token"] > 0 and 0 < arm["pool_hit_rate"] < 1
        assert 0 <= arm["overlapped"] <= 1


def test_host_pool_refuses_a_share_that_is_none() -> None:
    done = run("host_pool", "--share", "100")
    assert done.returncode == 2 and "--share" in done.stderr
