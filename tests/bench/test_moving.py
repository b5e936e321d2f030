"""The benchmarks of moving experts run with their smallest settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.prefetch import _ratio_of_sums, _verdict
from tests.bench.test_bench import document, positive, run


def test_prefetch() -> None:
    few = ["--tokens", "2", "--warm", "2", "--repeats", "1", "--shares", "25", "--link", "200"]
    arms = ["none", "correlation, promoting", "none, waiting"]
    results = document("prefetch", *few, "--arms", ",".join(arms))["results"]
    assert positive(results["rows"]) and len(results["rows"]) == 3 * len(arms)
    for text in results["shares"]["25 %"]["texts"].values():
        assert set(text) == set(arms)
        for arm in text.values():
            assert 0 <= arm["hit_rate"] < 1 and arm["read_bytes_per_token"] > 0
    assert text["correlation, promoting"]["landed_per_token"] > 0
    assert results["fewer_bytes_than_none"] == {"25 %": {}}, "one turn says nothing"


def test_ratios_of_bytes_and_what_they_say() -> None:
    ratio = _ratio_of_sums([9.0, 18.0, 27.0, 9.0, 18.0], [10.0, 20.0, 30.0, 10.0, 20.0])
    assert ratio == pytest.approx((0.9, 0.9, 0.9, 5))
    noise = _ratio_of_sums([9.0, 21.0, 29.0, 11.0, 19.0], [10.0, 20.0, 30.0, 10.0, 20.0])
    assert noise.low < 1 < noise.high
    texts = {
        text: {"none": {}, "frequency": {"relative_read_bytes": found}}
        for text, found in {"code": ratio, "prose": noise, "structured": ratio}.items()
    }
    said = _verdict({"25 %": {"texts": texts}})
    assert said["fewer_bytes_than_none"] == {"25 %": {"frequency": ["code", "structured"]}}


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
