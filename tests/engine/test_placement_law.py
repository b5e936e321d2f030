"""Placement never changes the answer: slots, policies, residents and slow copies, to the bit.

Every pair of choices meets here; tools/soak.py draws from the full product.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from tests.engine.caches import Rows, assert_same_bits, recache, rows
from tests.engine.tiny import mixed_model
from tests.experts.pins import named, warm
from tests.experts.rig import DelayedUploads
from tests.samples import sampled
from vkmoe.choices import PolicyName
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import GpuError
from vkmoe.experts.decide.settings import CacheSettings
from vkmoe.experts.store.copies import Uploads
from vkmoe.gpu.transfer import Transfer
from vkmoe.llm import demo_model_path

pytestmark = pytest.mark.usefixtures("one_device")

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
N_TOKENS = 15


def tokens_of(n_vocab: int) -> list[int]:
    """Tokens that keep coming back, and new ones."""
    return [(7 * i * i + 3 * (i % 4)) % (n_vocab - 1) + 1 for i in range(N_TOKENS)]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixed_model(tmp_path_factory.mktemp("law") / "mixed.gguf")


@pytest.fixture(scope="module", params=["demo", "mixed"])
def model(request: pytest.FixtureRequest) -> Path:
    if request.param == "demo":
        return demo_model_path()
    found: Path = request.getfixturevalue("mixed")
    return found


@pytest.fixture(scope="module")
def wanted(model: Path) -> Rows:
    """The logits with all experts resident."""
    with Engine(model, EngineConfig(ctx_size=64)) as engine:
        assert engine.cache is None and engine.plan.mode.experts_in == "device"
        return rows(engine, tokens_of(engine.n_vocab))


def policy_of(slots: int, residents: int) -> PolicyName:
    """For the nth number of slots and kind of residents: so chosen that all pairs meet."""
    return POLICIES[(slots + residents) % len(POLICIES)]


def choices(n_slots: int) -> list[dict[str, Any]]:
    """The ways in which experts stay, timed so that each happens within the tokens."""
    few = max(1, n_slots // 2)
    return [
        {},
        {"pins": (warm(2, 6),)},
        {"pins": (named(*range(few)),)},
        {"pins": (named(*(5, 2, 7)[:few]),)},
    ]


def slot_counts(model: Path) -> dict[str, int]:
    n_experts, n_used = (32, 4) if model == demo_model_path() else (8, 2)
    return {"one": 1, "top-k": n_used, "twice": 2 * n_used, "half": n_experts // 2,
            "all but one": n_experts - 1}  # fmt: skip


each_number_of_slots = pytest.mark.parametrize(
    ("model", "cached"),
    sampled(
        product(("mixed", "demo"), ("one", "top-k", "twice", "half", "all but one")),
        lambda case: case[0] == "mixed" or case[1] == "twice",
    ),
    indirect=True,
)


@pytest.fixture(scope="module")
def cached(model: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Engine, int]]:
    index, n_slots = (
        list(slot_counts(model)).index(request.param),
        slot_counts(model)[request.param],
    )
    # Copies alone: what is kept as it is read, the default of cards, is in test_moving_law.py.
    config = EngineConfig(ctx_size=64, expert_slots=n_slots, promote_on_read=False)
    with Engine(model, config, checks=True) as engine:
        assert engine.plan.mode.experts_in == "cache"
        yield engine, index


@each_number_of_slots
def test_slots_policy_and_residents_do_not_matter(cached: tuple[Engine, int], wanted: Rows) -> None:
    """Each number of slots with each kind of residents; policies turn, so that all pairs meet."""
    engine, index = cached
    n_slots = min(engine.plan.expert_slots)
    for turn, choice in enumerate(choices(n_slots)):
        policy = policy_of(index, turn)
        cache = recache(engine, CacheSettings(policy, **choice))
        assert_same_bits(rows(engine, tokens_of(engine.n_vocab)), wanted)
        hit_rate = engine.profiler.served().total.hit_rate if engine.profiler else None
        assert hit_rate is not None and 0 < hit_rate < 1, (policy, choice)
        assert cache.counters.n_uploads > 0


def test_all_pairs_meet() -> None:
    """Slots x policy and policy x residents; slots x residents are all run."""
    n = len(choices(4))
    met = {(s, policy_of(s, c), c) for s in range(5) for c in range(n)}
    assert {(s, p) for s, p, _ in met} == set(product(range(5), POLICIES))
    assert {(p, c) for _, p, c in met} == set(product(POLICIES, range(n)))


@each_number_of_slots
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_copies_that_arrive_late_do_not_matter(
    cached: tuple[Engine, int], wanted: Rows, delay: int
) -> None:
    """A slow second queue: copies land tokens later, and until then the slots hold NaN."""
    engine, _ = cached
    uploads = DelayedUploads(Uploads(engine.device), delay)
    cache = recache(engine, CacheSettings("slru"), uploads, wait=False)
    assert_same_bits(rows(engine, tokens_of(engine.n_vocab)), wanted)
    assert uploads.copied and cache.counters.n_uploads > 0


@each_number_of_slots
def test_copies_that_fail_do_not_matter(cached: tuple[Engine, int], wanted: Rows) -> None:
    engine, _ = cached
    uploads = DelayedUploads(Uploads(engine.device), failures=5, error=GpuError)
    cache = recache(engine, CacheSettings("slru"), uploads)
    assert_same_bits(rows(engine, tokens_of(engine.n_vocab)), wanted)
    assert cache.counters.n_failed_uploads >= 5 and cache.counters.n_uploads > 0


def test_shared_slots_do_not_matter(model: Path, wanted: Rows) -> None:
    config = EngineConfig(ctx_size=64, expert_slots=3, expert_allocation="global")
    with Engine(model, config, checks=True) as engine:
        for policy in POLICIES:
            recache(engine, CacheSettings(policy, pins=(warm(1, 5),)))
            assert_same_bits(rows(engine, tokens_of(engine.n_vocab)), wanted)


def test_memory_that_is_not_mapped_does_not_matter(
    model: Path, wanted: Rows, everything_staged: list[int]
) -> None:
    """Slots, homes and table as on a card whose memory the host cannot write."""
    config = EngineConfig(ctx_size=64, expert_slots=3, expert_policy="lru")
    with Engine(model, config, checks=True) as engine:
        n_staged = len(everything_staged)
        assert_same_bits(rows(engine, tokens_of(engine.n_vocab)), wanted)
        assert engine.cache is not None and engine.cache.counters.n_table_writes > 3
        assert len(everything_staged) >= n_staged + engine.cache.counters.n_table_writes


def test_a_warm_start_does_not_matter(model: Path, wanted: Rows) -> None:
    config = EngineConfig(ctx_size=64, expert_slots=4)
    with Engine(model, config, checks=True) as engine:
        rows(engine, tokens_of(engine.n_vocab))
        left = engine.history()
    with Engine(model, config, seed=left, checks=True) as engine:
        assert engine.cache is not None and engine.profiler is not None
        first = rows(engine, tokens_of(engine.n_vocab)[:1])
        assert engine.profiler.counts[1].sum() > 0, "the first token found nothing"
        assert_same_bits(first, wanted[:1])
        assert_same_bits(rows(engine, tokens_of(engine.n_vocab)), wanted)


ALL_SLOTS: list[dict[str, Any]] = [
    {"expert_policy": "lru", "moe_warmpin": 0},
    {"expert_policy": "slru", "moe_warmpin": 2, "moe_warmpin_after": 3},
    {"expert_policy": "lfru", "expert_resident_ids": "5,2"},
    {},
]


@pytest.mark.parametrize("asked", ALL_SLOTS)
def test_enough_slots_for_all_move_nothing_after_the_start(
    model: Path, wanted: Rows, asked: dict[str, Any]
) -> None:
    """No uploads and no table writes, whatever else was asked."""
    n_experts = 32 if model == demo_model_path() else 8
    config = EngineConfig(ctx_size=64, expert_slots=n_experts, **asked)
    with Engine(model, config, checks=True) as engine:
        written = engine._table.n_writes
        assert_same_bits(rows(engine, tokens_of(engine.n_vocab)), wanted)
        assert engine.cache is None and engine._table.n_writes == written == 1
        assert engine.profiler is not None and engine.profiler.served().total.hit_rate == 1.0


def test_a_slot_holds_its_home_byte_for_byte(model: Path) -> None:
    # What is kept as it is read has no bytes in the gaps of a span.
    config = EngineConfig(ctx_size=64, expert_slots=3, promote_on_read=False)
    with Engine(model, config, checks=True) as engine, Transfer(engine.device) as transfer:
        rows(engine, tokens_of(engine.n_vocab))
        cache = engine.cache
        assert cache is not None and cache.residency.present.any()
        cache.begin()  # the last token's copies arrive
        for key in np.flatnonzero(cache.residency.present).tolist():
            layer, expert = divmod(key, cache._space.n_experts)
            home, slot = cache._homes[key], cache._tier.slot(key).memory
            n_bytes = cache._memory.span_bytes[layer]
            read = transfer.read
            assert (read(slot.buffer, slot.offset, n_bytes)
                    == read(home.buffer, home.offset, n_bytes)).all(), (layer, expert)  # fmt: skip


@pytest.mark.parametrize("n_layers", [0, 1, 99])
@pytest.mark.sample(3)
def test_layers_in_host_memory_change_no_bit(model: Path, wanted: Rows, n_layers: int) -> None:
    """Neither alone nor where experts move, too; more layers than there are means all."""
    for slots in (None, 3):
        config = EngineConfig(ctx_size=64, gpu_layers=n_layers, expert_slots=slots)
        with Engine(model, config) as engine:
            n_host = max(0, engine.spec.n_layers - n_layers)
            assert engine.plan.host_layers == n_host
            lines = [line for line in engine.plan.lines if line.name == "host weights"]
            assert [line.place for line in lines] == ["host"] * bool(n_host)
            np.testing.assert_array_equal(rows(engine, tokens_of(engine.n_vocab)), wanted)
