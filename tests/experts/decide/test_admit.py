"""The choice of who gets a slot, in C++, against one in plain Python, and what it refuses."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest

from vkmoe.experts import _residency

N_LAYERS, N_EXPERTS = 4, 8
N_KEYS = N_LAYERS * N_EXPERTS
FREE, ROOMY = -1, -1
# By place: they are given by position, as the engine does.
NAMES = (
    "keys", "bids", "pools", "slot_bytes", "n_landed", "budget_bytes", "holders", "values",
    "n_free", "newest", "floors", "may_leave", "needed", "recency", "n_experts",
)  # fmt: skip


def case(random: np.random.Generator) -> dict[str, Any]:
    """Two pools of two layers each, with free slots, pins and floors; some newcomers landed."""
    keys = random.permutation(N_KEYS)
    n_new, widest = int(random.integers(1, 9)), 6
    newcomers, others = keys[:n_new], keys[n_new:]
    holders = np.full((2, widest), N_KEYS)
    for pool in range(2):
        ours = others[others // (2 * N_EXPERTS) == pool][: random.integers(2, widest + 1)]
        holders[pool, : len(ours)] = ours
    held = holders[holders < N_KEYS]
    may_leave = np.zeros(N_KEYS + 1, np.bool_)
    may_leave[held] = random.random(len(held)) < 0.8
    pools = newcomers // (2 * N_EXPERTS)
    return {
        "keys": newcomers,
        "bids": random.integers(0, 5, n_new) / 2 if random.random() < 0.7 else None,
        "pools": np.where(random.random(n_new) < 0.1, ROOMY, pools),
        "slot_bytes": random.integers(1, 4, n_new),
        "n_landed": int(random.integers(0, n_new + 1)),
        "budget_bytes": float(random.choice([0, 2, 5, inf])),
        "holders": holders,
        "values": random.integers(0, 4, holders.shape) / 2,
        "n_free": random.integers(0, 2, 2),
        "newest": np.array([random.choice(row) for row in holders]),
        "floors": random.integers(0, 3, 2),
        "may_leave": may_leave,
        "needed": random.random(N_KEYS) < 0.2,
        "recency": random.permutation(N_KEYS + 1).astype(np.int32),
        "n_experts": N_EXPERTS,
    }


def chosen(asked: dict[str, Any]) -> list[tuple[int, int]]:
    """The twin: each newcomer in its turn, and whose slot it gets."""
    bids, holders = asked["bids"], asked["holders"]
    order = list(range(len(asked["keys"])))
    if bids is not None:
        order.sort(key=lambda turn: -bids[turn])
    free, newest = asked["n_free"].tolist(), asked["newest"].tolist()
    held = [{int(key): i for i, key in enumerate(row) if key < N_KEYS} for row in holders]
    in_layer = [np.bincount([key // N_EXPERTS for key in row], minlength=N_LAYERS) for row in held]
    closed: set[int] = set()
    left, found = asked["budget_bytes"], []
    for turn in order:
        key, pool = int(asked["keys"][turn]), int(asked["pools"][turn])
        victim = FREE
        if pool != ROOMY and not free[pool]:
            layer = key // N_EXPERTS

            def may(other: int, pool: int = pool, layer: int = layer) -> bool:
                spare = in_layer[pool][other // N_EXPERTS] > asked["floors"][pool]
                leaves = asked["may_leave"][other] and not asked["needed"][other]
                has_room = not asked["floors"][pool] or spare or other // N_EXPERTS == layer
                return bool(leaves and has_room)

            able = [other for other in held[pool] if may(other)]
            if not able or pool in closed:
                continue
            victim = min(
                able,
                key=lambda other: (
                    other == newest[pool],
                    asked["values"][pool][held[pool][other]],
                    asked["recency"][other],
                ),
            )
            value = asked["values"][pool][held[pool][victim]]
            if bids is not None and bids[turn] <= value:
                closed.add(pool)
                continue
        if turn >= asked["n_landed"]:
            left -= asked["slot_bytes"][turn]
            if left < 0:
                continue
        if pool != ROOMY:
            in_layer[pool][key // N_EXPERTS] += 1
            newest[pool] = None
            if victim == FREE:
                free[pool] -= 1
            else:
                del held[pool][victim]
                in_layer[pool][victim // N_EXPERTS] -= 1
        found.append((turn, victim))
    return found


def answer(asked: dict[str, Any]) -> list[tuple[int, int]]:
    return _residency.admit(*(asked[name] for name in NAMES))


def test_it_chooses_as_one_newcomer_after_the_other_would() -> None:
    random = np.random.default_rng(7)
    n_evicted = n_refused = 0
    for _ in range(3000):
        asked = case(random)
        found = answer(asked)
        assert found == chosen(asked), asked
        n_evicted += sum(victim != FREE for _, victim in found)
        n_refused += len(asked["keys"]) - len(found)
    assert n_evicted > 500 and n_refused > 500, "both happen"


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("keys", np.full(3, N_KEYS)),
        ("keys", np.full(3, -1)),
        ("pools", np.full(3, 2)),
        ("pools", np.full(3, -2)),
        ("slot_bytes", np.ones(2, np.int64)),
        ("bids", np.ones(4)),
        ("holders", np.full((2, 6), N_KEYS + 1)),
        ("holders", np.full((2, 6), -1)),
        ("values", np.ones((2, 5))),
        ("n_free", np.ones(3, np.int64)),
        ("newest", np.ones(1, np.int64)),
        ("floors", np.ones(1, np.int64)),
        ("may_leave", np.ones(N_KEYS, np.bool_)),
        ("needed", np.ones(N_KEYS + 1, np.bool_)),
        ("recency", np.ones(N_KEYS, np.int32)),
        ("n_experts", 0),
        ("n_experts", 5),
    ],
)
def test_what_does_not_fit_is_refused(name: str, wrong: Any) -> None:
    asked = case(np.random.default_rng(1))
    three = {"keys": np.arange(3), "pools": np.zeros(3, np.int64), "bids": None, "n_landed": 0}
    asked |= three | {"slot_bytes": np.ones(3, np.int64)}
    answer(asked)
    with pytest.raises((ValueError, TypeError)):
        answer(asked | {name: wrong})
