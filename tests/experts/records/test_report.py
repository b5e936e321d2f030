"""What `--expert-stats` says, as text and as JSON: every figure at its place, no invented ids."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from vkmoe.experts.decide.foresight import PredictionCounts
from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.records.profiler import (
    CacheCounters,
    ExpertProfiler,
    Overlap,
    PoolCounters,
    Tally,
)
from vkmoe.experts.records.report import (
    SILENT,
    ExpertReport,
    Setup,
    as_document,
    as_text,
    make_report,
)

SPACE = KeySpace(3, 16)
NUMBERS = (1, 2, 7)  # the model's own: layer 0 is dense
SETUP = Setup("toy", "qwen3moe", "Invented GPU", "cache", 16, 2, (8, 8, 4), "slru", "layer")
COUNTERS = CacheCounters(11, 3 << 20, 5, 7 << 19, 13, 2)


def profiler(silent: int | None = None) -> ExpertProfiler:
    """Before pinning 4 tokens without a hit, after it 6 in which the first expert of each hit."""
    made = ExpertProfiler(SPACE, NUMBERS)
    routing = np.array([[3, 9], [15, 0], [4, 5]], np.uint32)
    for number in range(10):
        if number == 4:
            made.mark_warm()
        made.record(routing, np.array([[number >= 4, False]] * 3))
    if silent is not None:
        made.counts[:, silent] = 0
        if made._before is not None:
            made._before[:, silent] = 0
    return made


@pytest.fixture
def report() -> ExpertReport:
    return make_report(SETUP, profiler(), COUNTERS, pinned=[[9, 3], [15], []])


def test_what_did_not_happen_has_no_line(report: ExpertReport) -> None:
    text = as_text(report)
    assert "\nguesses     no experts fetched\n" in text
    for word in ("guessed", "kept", "taken back", "waiting", "host pool"):
        assert word not in text, word
    document = as_document(make_report(SETUP, profiler(), COUNTERS, predictions=PredictionCounts()))
    assert document["host_pool"] is document["predictions"] is document["copies"] is None


def test_what_moved_before_it_was_needed_is_said() -> None:
    busy = replace(COUNTERS, n_landed=21, n_hinted=6, n_cancelled=3, stall_ns=25_000_000)
    pool = PoolCounters(80, 60, 30, 5 << 20, 1, 10, 2, 1_500_000, 4_000_000, 0.25, 6)
    guesses = PredictionCounts(16, 3 << 20, 6)
    report = make_report(SETUP, profiler(), busy, pool=pool, predictions=guesses)
    text = as_text(report)
    for words in (
        "11 experts uploaded (3.0 MiB), 6 of them guessed, 5 evicted",
        "21 experts kept on the device as they were read\n",
        "3 uploads taken back",
        "waiting     25.0 ms for uploads, 2.500 ms per token\n",
        "guesses     16 experts fetched (3.0 MiB), 37.5 % of them used at once\n",
        "host pool   75.0 % of 80 uses served; 30 experts read from the file (5.0 MiB), "
        "10 of them guessed (60.0 % used at once), 1 failed; waited 1.5 ms\n"
        "            25.0 % of 4.0 ms of reading was hidden behind computing\n",
    ):
        assert words in text, words
    document = json.loads(json.dumps(as_document(report), allow_nan=False))
    assert (document["cache"]["n_landed"], document["cache"]["stall_ns"]) == (21, 25_000_000)
    assert (document["policy"], document["predictions"]["n_right"]) == ("slru", 6)
    assert (document["host_pool"]["n_reads"], document["host_pool"]["n_hits"]) == (30, 60)
    assert (document["host_pool"]["read_ns"], document["host_pool"]["hidden"]) == (4_000_000, 0.25)


@pytest.mark.parametrize(
    ("comparable", "copied", "words"),
    [
        (True, (3_000_000, 5_000_000), "75.0 % of 2.0 ms of copying was hidden"),
        (False, (3_000_000, 5_000_000), "unknown: the device times its queues by different clocks"),
        (True, None, "unknown: the device does not say when copies ran"),
    ],
)
def test_how_much_of_the_copying_was_hidden(
    comparable: bool, copied: tuple[int, int] | None, words: str
) -> None:
    overlap = Overlap(comparable)
    overlap.computed([(1_000_000, 4_500_000)], (1_000_000, 4_500_000))
    overlap.copied(copied, (3_000_000, 5_000_000))
    report = make_report(SETUP, profiler(), COUNTERS, overlap=overlap)
    assert f"overlap     {words}\n" in as_text(report)
    hidden = as_document(report)["copies"]["hidden"]
    assert hidden == (0.75 if "%" in words else None)
    idle = make_report(SETUP, profiler(), COUNTERS, overlap=Overlap())
    assert "overlap" not in as_text(idle) and as_document(idle)["copies"] is None


def row(text: str, layer: int) -> str:
    """The line of a layer in the table."""
    (found,) = re.findall(rf"^ *{layer}  .*$", text[text.index("most used") :], re.MULTILINE)
    return str(found)


def test_the_summary_says_all_that_was_counted(report: ExpertReport) -> None:
    text = as_text(report)
    for words in (
        "toy (qwen3moe)",
        "Invented GPU",
        "3 layers of 16, 2 used",
        "cache, policy slru, 4 to 8 slots per layer (coverage 41.7 %)",
        "tokens      10\n",
        "hit rate    30.0 % of 60 uses",
        "before warm-pinning, 4 tokens: 0.0 % of 24 uses",
        "after warm-pinning: 50.0 % of 36 uses",
        "11 experts uploaded (3.0 MiB), 5 evicted, 2 uploads failed, 13 table writes",
        "3.5 MiB read from host memory, 0.35 MiB per token\n",
    ):
        assert words in text, words


def test_a_row_for_each_layer_under_the_numbers_of_the_model(report: ExpertReport) -> None:
    text = as_text(report)
    assert row(text, 1).split()[:3] == ["1", "8", "20"]
    assert row(text, 1).endswith("30.0 %   0.0 %  50.0 %  3 9     3 (10), 9 (10)")
    assert row(text, 2).endswith("15      0 (10), 15 (10)")
    assert row(text, 7).split()[:2] == ["7", "4"]
    assert row(text, 7).endswith("-       4 (10), 5 (10)")


def test_a_silent_layer_shows_no_ids() -> None:
    text = as_text(make_report(SETUP, profiler(silent=1), COUNTERS))
    line = row(text, 2)
    assert line.endswith(SILENT)
    assert line.split()[:6] == ["2", "8", "0", "-", "-", "-"]
    assert SILENT not in row(text, 1) + row(text, 7)


def test_before_the_first_token_nothing_is_claimed() -> None:
    empty = make_report(SETUP, ExpertProfiler(SPACE, NUMBERS), CacheCounters())
    text = as_text(empty)
    assert f"hit rate    {SILENT}" in text and text.count(SILENT) == 4
    assert "warm-pinning" not in text
    document = json.loads(json.dumps(as_document(empty), allow_nan=False))
    assert document["hit_rate"] is None and document["before_warm_pinning"] is None
    assert [layer["top"] for layer in document["layers"]] == [[], [], []]


def test_the_document_has_the_same_figures(report: ExpertReport) -> None:
    document = json.loads(json.dumps(as_document(report), allow_nan=False))
    assert (document["n_uses"], document["n_hits"]) == (60, 18)
    assert document["hit_rate"] == pytest.approx(0.3)
    assert document["after_warm_pinning"] == {"n_uses": 36, "n_hits": 18, "hit_rate": 0.5}
    assert document["cache"]["missed_bytes"] == 7 << 19
    assert document["coverage"] == pytest.approx(20 / 48)
    assert (document["policy"], document["slots"], document["warm_after"]) == ("slru", [8, 8, 4], 4)
    first = document["layers"][0]
    assert (first["layer"], first["n_slots"], first["n_uses"]) == (1, 8, 20)
    assert [layer["pinned"] for layer in document["layers"]] == [[3, 9], [15], []]
    assert first["top"] == [{"expert": 3, "n_uses": 10}, {"expert": 9, "n_uses": 10}]


@pytest.mark.parametrize(
    ("place", "words", "slots"),
    [
        ("device", "all experts in device memory (coverage 100.0 %)", 16),
        ("host", "all experts in host memory are read in place (coverage 0.0 %)", 0),
    ],
)
def test_without_a_cache_the_placement_is_said(place: str, words: str, slots: int) -> None:
    setup = replace(SETUP, experts_in=place, slots=(), policy=None)  # type: ignore[arg-type]
    report = make_report(setup, profiler())
    text = as_text(report)
    assert words in text
    assert "policy" not in text and "uploaded" not in text and "\nmisses" not in text
    assert as_document(report)["cache"] is None
    assert as_document(report)["slots"] == [slots] * 3
    assert as_document(report)["coverage"] == slots / 16


def test_a_small_host_pool_and_its_executor_are_said() -> None:
    small = replace(SETUP, experts_in="host", slots=(), executor="stepped", host_slots=30)
    text = as_text(make_report(small, profiler(), CacheCounters(), pool=PoolCounters()))
    assert "placement   those in host memory are read in place" in text
    assert "            30 of 48 experts in the host pool at a time\n" in text
    assert "executor    stepped" in text and "host pool   no uses yet served" in text
    assert "hidden" not in text and "used at once" not in text
    ahead = make_report(small, profiler(), CacheCounters(), pool=PoolCounters(n_hinted=5))
    assert "\nguesses     experts fetched to the host pool only\n" in as_text(ahead)
    assert "uploaded" not in text and "misses      0.0 MiB" in text
    document = as_document(make_report(small, profiler()))
    assert (document["executor"], document["host_slots"]) == ("stepped", 30)
    assert "executor" not in as_text(make_report(SETUP, profiler(), COUNTERS))


def test_shared_slots_are_said() -> None:
    report = make_report(replace(SETUP, allocation="global"), profiler(), COUNTERS)
    assert "4 to 8 slots per layer, shared between layers" in as_text(report)
    report = make_report(replace(SETUP, slots=(8, 8, 8)), profiler(), COUNTERS)
    assert "policy slru, 8 slots per layer (coverage 50.0 %)" in as_text(report)


def test_a_name_from_a_file_stays_on_its_line() -> None:
    setup = replace(SETUP, model="toy\n\x1b[2Jhit rate    100 %")
    assert "model       toy??[2Jhit rate" in as_text(make_report(setup, profiler()))


def test_what_neighbours_cost_is_said_where_there_were_any() -> None:
    made = profiler()
    made.note_together(1, Tally(40, 30))
    alone = make_report(SETUP, made, COUNTERS)
    assert "sequence" not in as_text(alone)
    made.note_together(4, Tally(80, 20))
    report = make_report(SETUP, made, COUNTERS)
    text = as_text(report)
    assert "  one sequence decoded alone: 75.0 % of 40 uses served from device memory\n" in text
    assert "  4 sequences decoded together: 25.0 % of 80 uses served from" in text
    assert [each["n_sequences"] for each in as_document(alone)["decoded_together"]] == [1]
    assert as_document(report)["decoded_together"][1] == {
        "n_sequences": 4, "n_uses": 80, "n_hits": 20, "hit_rate": 0.25,
    }  # fmt: skip


def test_a_dense_model_has_nothing_to_count() -> None:
    setup = Setup("dense", "qwen3", "Invented GPU", "device", 0, 0)
    report = make_report(setup, None)
    assert "none: the model is dense" in as_text(report)
    document = as_document(report)
    assert (document["layers"], document["hit_rate"], document["coverage"]) == ([], None, 0.0)


def test_at_most_eight_experts_are_listed_and_columns_line_up() -> None:
    made = ExpertProfiler(SPACE, NUMBERS)
    made.record(np.tile(np.arange(12, dtype=np.uint32), (3, 1)), np.ones((3, 12), np.bool_))
    report = make_report(SETUP, made, COUNTERS, pinned=[list(range(9)), [], [1]])
    assert [len(layer.top) for layer in report.layers] == [8, 8, 8]
    table = as_text(report).split("\n\n")[1].splitlines()
    assert len({line.index("0 (1)") for line in table[1:]} | {table[0].index("most used")}) == 1
