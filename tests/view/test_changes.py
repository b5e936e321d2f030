"""Slots, policy and pins change while a text goes on, and the text stays the same to the bit."""

from __future__ import annotations

import random
from typing import Any, get_args

import numpy as np
import pytest

from tests.engine.caches import Rows, assert_same_bits, rows
from tests.samples import sampled
from tests.view.ways import CHANGEABLE, CTX, SAMPLE, SLOTS, opened, random_tokens
from vkmoe.choices import PolicyName
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import UsageError
from vkmoe.llm import demo_model_path
from vkmoe.view.experts import ExpertView

pytestmark = pytest.mark.usefixtures("one_device", "cpu_native")

N_TOKENS, N_LAYERS, N_EXPERTS = 48, 6, 32


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return random_tokens(300, N_TOKENS)


@pytest.fixture(scope="module")
def wanted(tokens: list[int]) -> Rows:
    """The logits with all experts resident."""
    with Engine(demo_model_path(), EngineConfig(ctx_size=CTX)) as engine:
        return rows(engine, tokens)


def random_change(random_: random.Random, least: int, pinned: list[list[int]]) -> dict[str, Any]:
    """Something that is possible: no layer has more pins than slots."""
    most_pins = max(map(len, pinned))
    pairs = [[layer, expert] for layer, ids in enumerate(pinned) for expert in ids]
    asked: dict[str, Any] = {}
    if random_.random() < 0.6:
        asked["slots"] = random_.randint(max(least, most_pins + 1, 1), SLOTS)
    if random_.random() < 0.4:
        asked["policy"] = random_.choice(get_args(PolicyName))
    if pairs and random_.random() < 0.5:
        asked["unpin"] = random_.sample(pairs, random_.randint(1, len(pairs)))
    elif most_pins == 0:
        asked["pin"] = [[random_.randrange(N_LAYERS), random_.randrange(N_EXPERTS)]]
    return asked


@pytest.mark.parametrize("way", sampled(CHANGEABLE, SAMPLE.__contains__))
@pytest.mark.sample(1)
def test_changes_do_not_change_the_answer(way: str, tokens: list[int], wanted: Rows) -> None:
    """Of logits no bit; and what was changed holds."""
    random_, found, counts = random.Random(way), [], dict.fromkeys(("slots", "policy", "pin"), 0)
    with opened(way, moe_warmpin=0) as engine:
        view = ExpertView(engine)
        shown = view.snapshot()
        least = 4 if way == "shared" else 1
        fewest = SLOTS
        for position, token in enumerate(tokens):
            asked = random_change(random_, least, shown["pinned"])
            answer = view.change(**asked)
            for name in counts:
                counts[name] += name in asked
            if "slots" in asked:
                assert answer["slots"] == [asked["slots"]] * N_LAYERS
                fewest = min(fewest, asked["slots"])
            assert answer["policy"] == asked.get("policy", shown["policy"])
            engine.run_token(token, position)
            found.append(engine.full_logits())
            shown = view.snapshot()
            assert [answer[key] for key in ("slots", "pinned")] == [
                shown["slots"],
                shown["pinned"],
            ]
            n_present = [row.count("d") for row in shown["places"]]
            most = sum(shown["slots"]) if way == "shared" else max(shown["slots"])
            assert (sum if way == "shared" else max)(n_present) <= most
            assert shown["most_slots"] == [SLOTS] * N_LAYERS
        assert min(counts.values()) > 4 and fewest <= 4, (counts, fewest)
    assert_same_bits(np.stack(found), wanted)


@pytest.fixture(scope="module")
def of_prompt(tokens: list[int]) -> Rows:
    """The logits of a whole prompt with all experts resident."""
    with Engine(demo_model_path(), EngineConfig(ctx_size=CTX)) as engine:
        engine.run_prompt(tokens)
        return engine.full_logits()


@pytest.mark.parametrize("way", sampled(CHANGEABLE, SAMPLE.__contains__))
@pytest.mark.sample(1)
def test_changes_do_not_change_a_prompt(way: str, tokens: list[int], of_prompt: Rows) -> None:
    with opened(way, moe_warmpin=0) as engine:
        view = ExpertView(engine)
        for slots, policy in ((SLOTS, "lru"), (4, "lfru"), (9, "slru"), (SLOTS, None)):
            view.change(slots=slots, policy=policy, pin=[[slots % N_LAYERS, slots]])
            engine.run_prompt(tokens)
            assert_same_bits(engine.full_logits(), of_prompt)
            engine.run_token(7, N_TOKENS)  # whose misses may land


def test_as_many_slots_can_go_as_host_memory_has_room_for(tokens: list[int], wanted: Rows) -> None:
    with opened("exchange", moe_warmpin=0) as engine:
        view, found = ExpertView(engine), []
        assert engine.plan.exchanges and engine.experts.cache is not None
        for position, token in enumerate(tokens):
            slots = (SLOTS, SLOTS - 1)[position // 4 % 2]
            assert view.change(slots=slots)["slots"] == [slots] * N_LAYERS
            with pytest.raises(UsageError, match="host memory has no room") as refused:
                view.change(slots=SLOTS - 2)
            assert "--host-pool" in refused.value.hint
            engine.run_token(token, position)
            found.append(engine.full_logits())
        assert view.snapshot()["slots"] == [slots] * N_LAYERS
    assert_same_bits(np.stack(found), wanted)


def test_slots_taken_away_and_given_again_are_used(tokens: list[int]) -> None:
    with opened("cache", moe_warmpin=0, expert_policy="lru") as engine:
        view, reasons = ExpertView(engine), set[str]()
        since = view.snapshot()["version"]
        for slots in (SLOTS, 2, SLOTS, 5, SLOTS):
            view.change(slots=slots)
            moves = view.deltas(since)["moves"]
            reasons |= {reason for _, _, _, reason in moves}
            for position, token in enumerate(tokens[:20]):
                engine.run_token(token, position)
            shown = view.snapshot()
            since = shown["version"]
            n_present = [row.count("d") for row in shown["places"]]
            assert max(n_present) == slots >= min(n_present) > slots - 2  # one may be on its way
        assert "fewer slots" in reasons


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_those_that_would_leave_first_do_when_slots_go(
    policy: PolicyName, tokens: list[int]
) -> None:
    """Each policy says which these are; the others stay, wherever their slots are."""
    with opened("cache", moe_warmpin=0, expert_policy=policy) as engine:
        view, residency = ExpertView(engine), engine.experts.residency
        engine.run_tokens(tokens[:20], 0)
        engine.settle()
        order = residency.leaving_order()
        n_held = (order < N_LAYERS * N_EXPERTS).sum(axis=1).tolist()
        stay = {
            key for row, n in zip(order.tolist(), n_held, strict=True) for key in row[n - 3 : n]
        }
        view.change(slots=3)
        assert set(np.flatnonzero(residency.present.ravel()).tolist()) == stay


def test_pinned_experts_come_and_stay_until_they_are_unpinned(tokens: list[int]) -> None:
    pairs = [[0, 1], [0, 2], [3, 30]]
    with opened("cache", moe_warmpin=0) as engine:
        view = ExpertView(engine)
        engine.run_tokens(tokens[:10], 0)
        since = view.snapshot()["version"]
        absent = [pair for pair in pairs if not engine.experts.residency.present[tuple(pair)]]
        assert absent and view.change(pin=pairs, slots=7)["pinned"] == [
            [1, 2],
            [],
            [],
            [30],
            [],
            [],
        ]
        for position, token in enumerate(tokens[10:], 10):
            engine.run_token(token, position)
            assert position == 10 or all(engine.experts.residency.present[tuple(p)] for p in pairs)
        moves = view.deltas(since)["moves"]
        assert [pair for pair in absent if [*pair, "d", "pinned"] in moves] == absent
        assert not any(view.change(unpin=pairs)["pinned"])
        engine.run_tokens(random_tokens(engine.n_vocab, 60, seed=3), 0)
        assert not all(engine.experts.residency.present[tuple(pair)] for pair in pairs)


def test_unpinning_takes_the_pins_of_options_away() -> None:
    with opened("cache", expert_resident_ids="1,2", moe_warmpin=0) as engine:
        view = ExpertView(engine)
        assert view.snapshot()["pinned"] == [[1, 2]] * N_LAYERS
        assert view.change(unpin=[[0, 1]])["pinned"] == [[2], *[[1, 2]] * (N_LAYERS - 1)]


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_another_policy_chooses_as_if_it_had_been_there(policy: str, tokens: list[int]) -> None:
    """From where it takes over, a policy decides by the uses that were before."""
    with opened("cache", expert_policy="lru", moe_warmpin=0) as engine:
        view = ExpertView(engine)
        engine.run_tokens(tokens[:30], 0)
        assert view.change(policy=policy) == {**view.change(), "policy": policy}
        residency = engine.experts.residency
        order = residency._policy._last.copy()
        engine.run_token(5, 30)
        assert type(residency._policy).__name__.lower() == policy == residency.settings.policy
        assert order.any() and (residency._policy._last >= order).all()


REFUSED: dict[str, str] = {
    "resident": "--expert-mode cache",
    "hybrid": "--expert-mode cache",
    "cpu experts": "--n-cpu-moe",
    "cpu device": "--device",
    "pool alone": "--expert-slots",
}


@pytest.mark.parametrize("way", REFUSED)
def test_what_a_mode_does_not_allow_is_a_usage_error(way: str) -> None:
    with opened(way) as engine:
        view = ExpertView(engine)
        shown = view.snapshot()
        for asked in ({"slots": 3}, {"pin": [[0, 1]]}, {"unpin": [[0, 1]]}):
            with pytest.raises(UsageError, match="cannot be changed now") as raised:
                view.change(**asked)
            assert REFUSED[way] in raised.value.hint
        assert shown["cannot_change"]["hint"] == raised.value.hint
        if way == "pool alone":  # there a policy chooses what leaves the pool
            assert view.change(policy="lfru")["policy"] == "lfru"
        else:
            with pytest.raises(UsageError):
                view.change(policy="lru")
        after = view.snapshot()
        assert after["pinned"] == shown["pinned"] and after["slots"] == shown["slots"]
        assert view.change()["slots"] == shown["slots"]  # nothing is asked for


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"slots": 0}, "1 to 12 slots, not 0"),
        ({"slots": 13}, "1 to 12 slots, not 13"),
        ({"slots": "many"}, "not 'many'"),
        ({"slots": True}, "not True"),
        ({"slots": 10**4000}, "not such a large number"),
        ({"policy": "fifo"}, "no policy 'fifo'"),
        ({"policy": {}}, "no policy dict"),
        ({"pin": [[6, 0]]}, "6 layers"),
        ({"pin": [[0, -1]]}, "32 in each"),
        ({"pin": [[0]]}, "no pair"),
        ({"pin": [[0, 1.5]]}, "no pair"),
        ({"pin": "ab"}, "no list of pairs"),
        ({"pin": 3}, "no list of pairs"),
        ({"pin": [[0, i] for i in range(13)]}, "13 experts would be pinned in the 12 slots"),
        ({"pin": [[0, 1], [0, 2], [0, 3]], "slots": 2}, "3 experts would be pinned in the 2"),
        ({"pin": [[2, 1]], "unpin": [[2, 1]]}, "pinned and unpinned"),
        ({"pin": [[2, 1]], "policy": "no"}, "no policy"),
    ],
)
def test_malformed_and_impossible_changes_change_nothing(
    asked: dict[str, Any], message: str, plain: ExpertView
) -> None:
    before = plain.change()
    with pytest.raises(UsageError, match=message):
        plain.change(**asked)
    assert plain.change() == before


@pytest.fixture(scope="module")
def plain(one_device: None) -> Any:
    with opened("cache", moe_warmpin=0) as engine:
        yield ExpertView(engine)


def test_memory_that_was_given_back_cannot_be_used_again(
    monkeypatch: pytest.MonkeyPatch, tokens: list[int], wanted: Rows
) -> None:
    """Idle slots go first; then the number of slots cannot grow to what the plan had."""
    monkeypatch.setattr("vkmoe.gpu.arena.SLOT_CHUNK", 1 << 19)
    with opened("cache", moe_warmpin=0) as engine:
        view = ExpertView(engine)
        found = [*rows(engine, tokens[:20])]
        view.change(slots=4)
        n_slots, n_bytes = engine.experts.give_back(1 << 20)
        assert n_slots == 0 and n_bytes >= 1 << 20
        shown = view.snapshot()
        assert shown["slots"] == [4] * N_LAYERS and max(shown["most_slots"]) < SLOTS
        with pytest.raises(UsageError, match="memory for more was not taken"):
            view.change(slots=SLOTS)
        assert view.change(slots=max(shown["most_slots"]))["slots"] == shown["most_slots"]
        for position, token in enumerate(tokens[20:], 20):
            engine.run_token(token, position)
            found.append(engine.full_logits())
        assert_same_bits(np.stack(found), wanted)
        since = view.snapshot()["version"]
        engine.experts.give_back(1 << 20)
        reasons = {move[3] for move in view.deltas(since)["moves"]}
        assert reasons == {"given back"}
