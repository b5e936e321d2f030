"""Random sequences of operations on every policy, beside a naive model of the rules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run

from tests.experts.policy_pool import OnePool
from vkmoe.choices import PolicyName
from vkmoe.experts.decide.keys import DecayedCounts, KeySpace
from vkmoe.experts.decide.policies import POLICIES

SPACE = KeySpace(3, 8)
KEYS = st.integers(0, SPACE.n_keys - 1)
TOKENS = st.lists(KEYS, min_size=1, max_size=6, unique=True)
SLRU_SHARE = 4  # 1/4 of the slots is protected


class PolicyMachine(RuleBasedStateMachine):
    """Knows who is resident, pinned, newest, how often and when used; recomputes each rule."""

    name: PolicyName
    capacity: int
    floor: int

    def __init__(self) -> None:
        super().__init__()
        self.counts = DecayedCounts(SPACE.n_keys, 2.0)
        self.policy = OnePool(self.name, self.capacity, SPACE, self.counts, self.floor)
        self.resident: list[int] = []  # by recency
        self.pinned: set[int] = set()
        self.newest: int | None = None
        self.used_at: dict[int, int] = {}
        self.again: set[int] = set()  # used since they were inserted

    # ----- the rules, naively -----

    def may_leave(self, newcomer: int, needed: list[int]) -> list[int]:
        layers = [SPACE.layer(key) for key in self.resident]
        return [
            key
            for key in self.resident
            if key not in needed
            and key not in self.pinned
            and (
                SPACE.layer(key) == SPACE.layer(newcomer)
                or layers.count(SPACE.layer(key)) > self.floor
            )
        ]

    def expected_victims(self, newcomer: int, needed: list[int]) -> list[int]:
        """All keys the rules allow as victim; more than one only where scores are equal."""
        allowed = self.may_leave(newcomer, needed)
        others = [key for key in allowed if key != self.newest] or allowed
        if not others:
            return []
        if self.name == "lru":
            return others[:1]
        values = self.counts.values()
        if self.name in ("slru", "forecast"):
            protected = self.protected()
            on_probation = [key for key in others if key not in protected]
            fewest = min((values[key] for key in on_probation), default=0.0)
            return ([key for key in on_probation if values[key] == fewest] or others)[:1]
        assert self.name == "lfru", f"no rule is known for {self.name}"
        score = {key: values[key] / (1 + self.counts.now - self.used_at[key]) for key in others}
        return [key for key in others if score[key] <= min(score.values()) * (1 + 1e-9)]

    def protected(self) -> list[int]:
        share = min(self.capacity // SLRU_SHARE, self.capacity - 1)
        room = max(0, share - len(self.pinned & set(self.resident)))
        again = [key for key in self.resident if key in self.again and key not in self.pinned]
        return again[len(again) - min(room, len(again)) :]

    def forget(self, key: int) -> None:
        self.resident.remove(key)
        self.again.discard(key)
        self.newest = None if key == self.newest else self.newest

    def admit(self, key: int) -> None:
        self.policy.insert(key)
        self.resident.append(key)
        self.newest, self.used_at[key] = key, self.counts.now

    # ----- operations -----

    @rule(keys=TOKENS)
    def token(self, keys: list[int]) -> None:
        self.counts.use(np.array(keys))
        missing = self.policy.use(keys)
        assert missing == [key for key in keys if key not in self.resident]
        for key in keys:
            if key in self.resident:
                self.resident.append(self.resident.pop(self.resident.index(key)))
                self.used_at[key] = self.counts.now
                self.again.add(key)
        for key in missing:
            self.promote(key, keys)
        self.counts.advance()

    @rule(key=KEYS, needed=TOKENS)
    def promote(self, key: int, needed: list[int]) -> None:
        """A prefetch, or a miss."""
        if key in self.resident:
            return
        victims = self.expected_victims(key, needed)
        found = self.policy.victim(key, needed)
        assert found in victims if victims else found is None, (found, victims)
        if len(self.resident) == self.capacity:
            if found is None:
                return
            self.policy.remove(found)
            self.forget(found)
        self.admit(key)

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.resident))
        self.policy.remove(key)
        self.forget(key)

    @rule(key=KEYS)
    def pin(self, key: int) -> None:
        self.policy.pin(key)
        self.pinned.add(key)

    @rule(key=KEYS)
    def unpin(self, key: int) -> None:
        self.policy.unpin(key)
        if key in self.pinned:
            self.pinned.remove(key)
            if self.name in ("slru", "forecast") and key in self.resident:
                self.resident.append(self.resident.pop(self.resident.index(key)))
                self.again.add(key)

    # ----- always -----

    @invariant()
    def agrees(self) -> None:
        self.policy.check_integrity()
        assert sorted(self.policy) == sorted(self.resident)
        assert len(self.policy) == len(self.resident) <= self.capacity
        for key in range(SPACE.n_keys):
            assert (key in self.policy) == (key in self.resident)
            assert self.policy.is_pinned(key) == (key in self.pinned)

    @invariant()
    def order_names_the_next_victim(self) -> None:
        if self.floor == 0:
            free = [key for key in self.policy if key not in self.pinned]
            assert self.policy.victim(0, ()) == (free[0] if free else None)


@pytest.mark.parametrize("n_scripts", [8, pytest.param(100, marks=pytest.mark.full)])
@pytest.mark.parametrize(("capacity", "floor"), [(1, 0), (8, 0), (12, 2)])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.sample(6)
def test_random_operations_keep_every_rule(
    name: PolicyName, capacity: int, floor: int, n_scripts: int
) -> None:
    """A forecast that knows nothing yet ranks as slru."""
    members = {"name": name, "capacity": capacity, "floor": floor}
    machine = type("Machine", (PolicyMachine,), members)
    run(
        machine,
        settings=settings(
            max_examples=n_scripts,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
