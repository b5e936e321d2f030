"""What the commands tell of the expert cache, and what they do when its files cannot be written."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.engine.tiny import model_path
from vkmoe.errors import VkmoeError
from vkmoe.experts.decide.foresight import PredictionCounts
from vkmoe.experts.records.profiler import CacheCounters, PoolCounters, Served, Tally
from vkmoe.experts.records.report import CopyTimes

from .conftest import NO_CACHE, FakeLLM, Run

CACHED = replace(
    NO_CACHE, setup=replace(NO_CACHE.setup, experts_in="cache"), served=Served(Tally(1000, 874)),
    counters=CacheCounters(9, 43306189, 4, 77, 5, 1),
)  # fmt: skip
LINE = (
    "experts: 87.4 % of 1000 uses served from device memory, "
    "0.00 MiB read through per token, 41.3 MiB uploaded"
)
REFUSED = VkmoeError("the expert statistics could not be written to a/b: No", "give a path")


def test_the_statistics_tell_of_the_cache(run: Run, fake: type[FakeLLM]) -> None:
    fake.expert_statistics = CACHED
    assert LINE in run("generate", "-p", "x").err.splitlines()
    assert LINE in run("chat", "-v", stdin=b"hello\n").err.splitlines()
    assert LINE not in run("generate", "-p", "x", "-q").err


def test_without_a_cache_or_a_token_nothing_is_claimed(run: Run, fake: type[FakeLLM]) -> None:
    assert "experts:" not in run("generate", "-p", "x").err
    fake.expert_statistics = replace(CACHED, n_tokens=0, served=Served(Tally(0, 0)))
    assert "experts:" not in run("generate", "-p", "x").err


def test_the_statistics_tell_of_what_moved_before_it_was_needed(
    run: Run, fake: type[FakeLLM]
) -> None:
    busy = CacheCounters(9, 43306189, missed_bytes=6 << 20, n_landed=3, stall_ns=4_500_000)
    pool = PoolCounters(80, 60, 30, 5 << 20, 0, 9, stall_ns=1_500_000, hidden=0.25, n_right=6)
    cache = replace(CACHED, counters=busy, copies=CopyTimes(2_000_000, 0.75, 0))
    guesses = PredictionCounts(8, 9, 5)
    fake.expert_statistics = replace(cache, pool=pool, predictions=guesses)  # three tokens
    done = run("generate", "-p", "x")
    assert (
        "experts: 87.4 % of 1000 uses served from device memory, 2.00 MiB read through per token, "
        "41.3 MiB uploaded"
    ) in done.err.splitlines()
    assert (
        "host pool: 75.0 % of 80 uses served; 30 experts read from the file (5.0 MiB), "
        "9 of them guessed (66.7 % used at once); waited 1.5 ms"
    ) in done.err.splitlines()
    document = json.loads(run("generate", "-p", "x", "--json").out)
    assert document["host_pool"] == asdict(pool)
    assert document["expert_cache"].items() >= asdict(busy).items()
    assert document["expert_cache"]["predictions"] == asdict(guesses)
    assert document["expert_cache"]["copies"]["hidden"] == 0.75


def test_without_slots_a_host_pool_speaks_for_itself(run: Run, fake: type[FakeLLM]) -> None:
    pool = PoolCounters(80, 60, 30, 5 << 20)
    fake.expert_statistics = replace(
        CACHED,
        setup=replace(CACHED.setup, experts_in="host"),
        served=Served(Tally(80, 0)),
        pool=pool,
    )
    err = run("generate", "-p", "x").err
    assert "experts:" not in err and "host pool: 75.0 % of 80 uses served; 30 experts" in err
    assert "hidden" not in err


def test_json_has_the_counters_of_the_cache(run: Run, fake: type[FakeLLM]) -> None:
    document = json.loads(run("generate", "-p", "x", "--json").out)
    assert document["expert_cache"] is document["host_pool"] is None
    fake.expert_statistics = CACHED
    values = json.loads(run("generate", "-p", "x", "--json").out)["expert_cache"]
    rates = {"hit_rate": 0.874, "n_uses": 1000, "n_hits": 874, "copies": None, "predictions": None}
    counted = asdict(CacheCounters(9, 43306189, 4, 77, 5, 1))
    assert values == rates | {"policy": CACHED.setup.policy} | counted


def test_a_file_that_cannot_be_written_is_an_error_after_the_text(
    run: Run, fake: type[FakeLLM]
) -> None:
    fake.fail_at_close = REFUSED
    done = run("generate", "-p", "x", "-q")
    assert done == (1, "one two thrée!\n", f"error: {REFUSED}\nhint: give a path\n")


@pytest.mark.parametrize(("flags", "n_lines"), [((), 2), (("-q",), 1)])
def test_what_is_logged_becomes_a_note(
    run: Run, fake: type[FakeLLM], flags: tuple[str, ...], n_lines: int
) -> None:
    class Logging(FakeLLM):
        def __exit__(self, *_: object) -> None:
            logging.getLogger("vkmoe").warning("a\nwarning")
            logging.getLogger("vkmoe").error("an %s", "error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vkmoe.llm.LLM", Logging)
        err = run("generate", "-p", "x", *flags).err
    assert err.splitlines()[-n_lines:] == ["warning: a warning", "error: an error"][-n_lines:]
    assert "warning" in err or flags
    assert logging.getLogger("vkmoe").handlers == []


@pytest.mark.parametrize("flag", ["--expert-stats", "--expert-profile"])
def test_the_model_is_not_replaced_and_nothing_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setattr("vkmoe.llm.llm.Engine", None)
    model = Path(shutil.copy(model_path("moe_plain"), tmp_path / "sha256-12"))
    before = model.read_bytes()
    done = run("generate", str(model), "-p", "x", flag, str(model))
    message = f"error: {flag} {model} would overwrite a model\nhint: give another path\n"
    assert done == (2, "", message)
    assert model.read_bytes() == before and list(tmp_path.iterdir()) == [model]


def test_a_real_run_keeps_its_text_and_its_profile(run: Run, tmp_path: Path) -> None:
    paths = ("--expert-stats", str(tmp_path / "no" / "s"), "--expert-profile", str(tmp_path / "p"))
    done = run("generate", "-p", "def f", "-n", "2", "-c", "64", "--expert-slots", "8", *paths)
    assert done.code == 1 and done.out.strip()
    lines = done.err.splitlines()
    assert lines[1].startswith("warning: the expert statistics will not be written at the end: no")
    assert lines[-4].startswith("experts: ") and "uses served from device memory" in lines[-4]
    assert lines[-3] == f"wrote the expert profile to {tmp_path / 'p'}"
    assert lines[-2].startswith("error: the expert statistics could not be written to ")
    assert lines[-1].startswith("hint: ")
    assert json.loads((tmp_path / "p").read_text())["format"] == "vkmoe expert profile"
