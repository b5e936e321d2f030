"""What is shown of experts: right in every mode, complete when followed, bounded, and JSON."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from tests.engine.tiny import model_path
from tests.samples import sampled
from tests.view.ways import CHANGEABLE, SAMPLE, SLOTS, WAYS, opened, random_tokens
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.experts.records import watch
from vkmoe.view import experts
from vkmoe.view.experts import ExpertView

pytestmark = pytest.mark.usefixtures("one_device", "cpu_native")

# Letters that experts may have in each mode.
LETTERS = {
    "resident": "d",
    "host pool": "dhf",
    "pool alone": "hf",
    "hybrid": "dc",
    "cpu experts": "dc",
    "cpu device": "c",
}
OF_DELTAS = ("version", "moves", "uses", "uses_left_out")


def as_json(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(values, allow_nan=False))
    assert found == values  # no tuples, no keys that are numbers
    return found


def replayed(snapshot: dict[str, Any], delta: dict[str, Any]) -> dict[str, Any]:
    """The snapshot as a page follows it."""
    places = [list(row) for row in snapshot["places"]]
    for layer, expert, letter, _ in delta["moves"]:
        assert places[layer][expert] != letter
        places[layer][expert] = letter
    rest = {key: value for key, value in delta.items() if key not in OF_DELTAS[1:]}
    return {**snapshot, **rest, "places": ["".join(row) for row in places]}


def without_clock(shown: dict[str, Any]) -> dict[str, Any]:
    hits = {key: value for key, value in shown["hits"].items() if key != "last_second"}
    return {**shown, "hits": hits}


def places_of(engine: Engine) -> list[str]:
    """Where the table of the device says that experts are."""
    space = engine.experts.residency.space
    pool = engine.cache.pool if engine.cache is not None else None
    found = ""
    for key, entry in enumerate(engine._table.entries.reshape(-1).tolist()):
        if entry and not entry & 1:
            found += "d"
        elif pool is not None:
            found += "h" if pool.locations.present[key] else "f"
        else:
            found += "h" if entry else "c"
    n = space.n_experts
    return [found[first : first + n] for first in range(0, len(found), n)]


@pytest.mark.parametrize("way", sampled(WAYS, SAMPLE.__contains__))
@pytest.mark.sample(2)
def test_a_snapshot_and_its_deltas_give_the_next_snapshot(way: str) -> None:
    with opened(way) as engine:
        view, tokens = ExpertView(engine), random_tokens(engine.n_vocab, 36)
        engine.run_tokens(tokens[:5], 0)
        shown = as_json(view.snapshot())
        assert len(shown["places"]) == len(shown["layers"]) == len(shown["expert_bytes"]) == 6
        n_moves = n_uses = position = 0
        for index, n_tokens in enumerate([0, 1, 2, 5, 1, 9, 3]):
            for token in tokens[position : position + n_tokens]:
                engine.run_token(token, position)
                position += 1
            if way in CHANGEABLE and n_tokens == 5:
                engine.experts.resize([n - 1 for n in engine.experts.cache.most_slots])  # type: ignore[union-attr]
                engine.experts.residency.pin(np.array([3, 40]))
            delta = as_json(view.deltas(shown["version"]))
            n_moves += len(delta["moves"])
            n_uses += len(delta["uses"])
            assert len(delta["uses"]) == n_tokens * 6 * 4 and not delta["uses_left_out"]
            assert ("heat" in delta) == (n_tokens > 0), index
            shown = replayed(shown, delta)
            assert without_clock(shown) == without_clock(as_json(view.snapshot()))
            letters = set("".join(shown["places"]))
            assert letters <= set(LETTERS.get(way, "dh"))
            if way != "cpu device":
                engine._experts.begin()  # which writes what has arrived into the table
                engine._experts.end()
                assert as_json(view.snapshot())["places"] == places_of(engine)
                shown = view.snapshot()
        assert (n_moves > 0) == (way not in ("resident", "cpu experts", "cpu device"))
        assert shown["hits"]["total"]["uses"] == n_uses + 5 * 6 * 4
        assert shown["hits"]["layers"] == [[26 * 4, hits] for _, hits in shown["hits"]["layers"]]


def test_uses_are_those_of_the_router_and_hits_those_of_the_cache() -> None:
    with opened("cache") as engine:
        view = ExpertView(engine)
        since = view.snapshot()["version"]
        for position, token in enumerate(random_tokens(engine.n_vocab, 12)):
            before = view.snapshot()
            engine.run_token(token, position)
            delta = view.deltas(since)
            since = delta["version"]
            found = [[layer, expert] for layer, expert, _ in delta["uses"]]
            wanted = [[i, e] for i, ids in enumerate(engine.routing().tolist()) for e in ids]
            assert found == wanted
            hits = sum(hit for _, _, hit in delta["uses"])
            assert hits == delta["hits"]["total"]["hits"] - before["hits"]["total"]["hits"]
            for layer, expert, hit in delta["uses"]:
                if before["places"][layer][expert] == "d" and not hit:
                    reasons = [move[3] for move in delta["moves"] if move[:2] == [layer, expert]]
                    assert reasons and reasons[0].startswith("evicted"), delta["moves"]


def test_heat_is_the_decayed_use() -> None:
    with opened("cache") as engine:
        view = ExpertView(engine)
        assert not any(map(any, map(base64.b64decode, view.snapshot()["heat"])))
        engine.run_tokens(random_tokens(engine.n_vocab, 20), 0)
        heat = np.array([[*base64.b64decode(row)] for row in view.snapshot()["heat"]])
        values = engine.experts.residency.counts.values().reshape(6, 32)
        assert heat.max() == 255 and heat.shape == values.shape
        np.testing.assert_allclose(heat / 255, values / values.max(), atol=0.002)


REASONS = {
    "cache": {"missed", "evicted"},
    "landing": {"landed", "evicted"},
    "stepped": {"missed", "guessed", "evicted"},
    "shared": {"missed", "evicted"},
    "host pool": {"missed", "guessed", "evicted"},
    "pool alone": {"missed", "guessed", "evicted"},
}


@pytest.mark.parametrize("way", sampled(REASONS, SAMPLE.__contains__))
@pytest.mark.sample(1)
def test_moves_say_why(way: str) -> None:
    with opened(way) as engine:
        view = ExpertView(engine)
        since, seen = view.snapshot()["version"], set[str]()
        for position, token in enumerate(random_tokens(engine.n_vocab, 40)):
            engine.run_token(token, position)
            delta = view.deltas(since)
            since, places = delta["version"], view.snapshot()["places"]
            for layer, expert, letter, reason in delta["moves"]:
                seen.add(reason.split()[0])
                assert reason != "moved", (layer, expert, letter)
                if reason.startswith("evicted for"):
                    words = reason.split()
                    other = int(words[-1]) if words[-2] == "layer" else layer
                    assert other != layer or int(words[2]) != expert
                    if way in ("cache", "shared"):  # where the next submit waits for copies
                        assert letter == "h" and places[other][int(words[2])] == "d"
        assert seen >= REASONS[way], seen


def test_a_version_that_is_too_old_or_unknown_is_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_LOOKS", 4)
    reset = {"reset": True}
    with opened("cache") as engine:
        view = ExpertView(engine)
        assert view.deltas(0) == reset  # before any snapshot
        first = view.snapshot()["version"]
        for position in range(4):
            engine.run_token(7 + position, position)
        assert "moves" in view.deltas(first)
        for position in range(4, 8):
            engine.run_token(7 + position, position)
        assert view.deltas(first) == reset
        last = view.snapshot()["version"]
        for unknown in (last + 1, -1, "x", None, True, 1.0):
            assert view.deltas(unknown) == reset  # type: ignore[arg-type]
        view.close()
        assert view.deltas(last) == reset
        assert view.snapshot()["version"] > last  # versions before it are not mistaken for its own


def test_nothing_is_noted_when_nothing_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened("host pool") as engine:
        residency, cache = engine.experts.residency, engine.cache
        assert cache is not None and cache.pool is not None

        def is_noted() -> list[bool]:
            parts = (engine.experts.watch, residency.reasons, cache.pool.residency.reasons)  # type: ignore[union-attr]
            return [part is not None for part in parts]

        view = ExpertView(engine)
        engine.run_token(5, 0)
        assert is_noted() == [False] * 3
        view.snapshot()
        engine.run_token(6, 1)
        assert is_noted() == [True] * 3
        monkeypatch.setattr(watch, "IDLE_S", 0.0)
        engine.run_token(7, 2)
        assert is_noted() == [False] * 3


def test_what_is_kept_and_given_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long nothing asks, and however many rows a prompt has."""
    monkeypatch.setattr(watch, "LEAST_CHANGES", 10)
    monkeypatch.setattr(experts, "MAX_USES", 100)
    with opened("cache") as engine:
        view = ExpertView(engine)
        since = view.snapshot()["version"]
        engine.run_prompt(random_tokens(engine.n_vocab, 30))
        delta = view.deltas(since)
        assert len(delta["uses"]) == 4 * 24  # four tokens
        # The last layer of a prompt runs for one row alone, but routes all.
        assert delta["uses_left_out"] + len(delta["uses"]) == delta["hits"]["total"]["uses"]
        for position, token in enumerate(random_tokens(engine.n_vocab, 60)):
            engine.run_token(token, position)
        seen = engine.experts.watch
        assert seen is not None
        assert sum(len(look.changes) for look in seen._looks) <= 2 * 6 * 32
        assert len(seen._runs) <= watch.MAX_RUNS
        kept = [use.routing for _, use in seen._runs]
        assert all(len(routing) <= watch.MAX_ROWS for routing in kept)
        assert all(routing.base is None for routing in kept if len(routing) == watch.MAX_ROWS)


def test_a_dense_model_has_a_reason() -> None:
    with Engine(model_path("dense_tied"), EngineConfig(ctx_size=32)) as engine:
        view = ExpertView(engine)
        shown = as_json(view.snapshot())
        engine.run_token(3, 0)
        assert shown["reason"] and shown["cannot_change"]
        assert not (shown["layers"] or shown["places"] or shown["heat"] or shown["pinned"])
        delta = as_json(view.deltas(0))
        assert delta["moves"] == delta["uses"] == [] and as_json(view.why())["n_tokens"] == 0


def test_bytes_are_counted_by_way() -> None:
    for way, moved in {
        "resident": [],
        "cache": ["copied", "read_through"],
        "landing": ["landed", "read_through"],
        "host pool": ["copied", "read_from_file", "read_through"],
        "pool alone": ["read_from_file", "read_through"],
        "hybrid": ["computed_by_cpu", "copied"],
        "cpu experts": ["computed_by_cpu"],
    }.items():
        with opened(way) as engine:
            view = ExpertView(engine)
            engine.run_tokens(random_tokens(engine.n_vocab, 20), 0)
            shown = view.snapshot()
            found = [name for name, n_bytes in sorted(shown["bytes"].items()) if n_bytes]
            assert set(found) >= set(moved) and not set(found) - {*moved, "copied"}, way
            if way == "cpu experts":
                wanted = 20 * 4 * sum(shown["expert_bytes"][:2])
                assert shown["bytes"]["computed_by_cpu"] == wanted


def test_a_snapshot_says_how_many_slots_there_are() -> None:
    with opened("cache") as engine:
        shown = ExpertView(engine).snapshot()
        assert shown["slots"] == shown["most_slots"] == [SLOTS] * 6
        assert shown["policy"] == "forecast" and shown["mode"]["name"] == "cache"
        assert shown["cannot_change"] is None
