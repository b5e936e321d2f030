"""However experts move, the answer is the same to the bit: every pair of ways meets here.

Executor, slots, policy, how a miss is served, promotion, size of the host pool, and copies that
come late or fail. Slots that nobody may read hold NaN, and contradictions are looked for after
every token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from tests.engine.caches import Rows, assert_same_bits, rows
from tests.engine.covers import Row, covering_rows, pairs
from tests.engine.tiny import mixed_model, model_path
from tests.experts.rig import DelayedUploads
from tests.samples import sampled
from vkmoe.choices import PolicyName
from vkmoe.closing import Closing
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import GpuError
from vkmoe.execute import expert_memory
from vkmoe.experts.decide.keys import Keys, Mask
from vkmoe.experts.store.slots import Landings
from vkmoe.gpu.transfer import Transfer
from vkmoe.kernels.experts.operations import kept_bytes
from vkmoe.llm import demo_model_path
from vkmoe.placement import memory
from vkmoe.placement.pools import SlotLayout
from vkmoe.weights.sizes import expert_shape, weight_bytes

pytestmark = pytest.mark.usefixtures("one_device")

N_TOKENS = 14
FACTORS: dict[str, tuple[Any, ...]] = {
    "executor": ("fused", "stepped"),
    "slots": ("one", "top-k", "half", "all but one"),
    "policy": get_args(PolicyName),
    "miss": ("read", "gather"),
    "promote": (False, True),
    "pool": ("all", "exchange", "half", "top-k"),
    "copies": ("waited for", "overlapped", "3 tokens late", "fail once", "always fail"),
}
NAMES = tuple(FACTORS)
# Experts in no memory need the stepped executor; some that exchange have one place, where a copy
# takes them.
IMPOSSIBLE = {
    ("executor", "fused", "pool", "half"),
    ("executor", "fused", "pool", "top-k"),
    ("pool", "exchange", "copies", "always fail"),
}
N_SPARE = 3  # experts of each size that have a home beside their slot


def possible(row: Row) -> bool:
    asked = dict(zip(NAMES, row, strict=True))
    if asked["slots"] == "all but one" and asked["copies"] == "always fail":
        return bool(asked["pool"] == "all")  # any pool exchanges with so many slots
    return not any(asked[one] == a and asked[other] == b for one, a, other, b in IMPOSSIBLE)


ROWS = covering_rows([row for row in product(*FACTORS.values()) if possible(row)])


def test_every_possible_pair_occurs() -> None:
    met = set().union(*map(pairs, ROWS))
    for (i, one), (j, other) in combinations(enumerate(NAMES), 2):
        for a, b in product(FACTORS[one], FACTORS[other]):
            impossible = (one, a, other, b) in IMPOSSIBLE
            assert ((i, a, j, b) in met) != impossible, (one, a, other, b)
    assert len(ROWS) < 45


def tokens_of(n_vocab: int) -> list[int]:
    """Tokens that keep coming back, and new ones."""
    return [(7 * i * i + 3 * (i % 4)) % (n_vocab - 1) + 1 for i in range(N_TOKENS)]


@pytest.fixture(scope="module", autouse=True)
def pools_of_tiny_experts() -> Iterator[None]:
    """Bytes are counted as if no allocation was rounded up, or a few experts would be all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "GRANULARITY", 256)
        yield


@pytest.fixture(scope="module", params=["demo", "mixed"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "demo":
        return demo_model_path()
    return mixed_model(tmp_path_factory.mktemp("law") / "mixed.gguf")


@pytest.fixture(scope="module")
def wanted(model: Path) -> Rows:
    """The logits with all experts resident."""
    with Engine(model, EngineConfig(ctx_size=32)) as engine:
        assert engine.cache is None and engine.plan.executor == "fused"
        return rows(engine, tokens_of(engine.n_vocab))


@pytest.fixture(scope="module")
def layout(model: Path) -> SlotLayout:
    with Engine(model, EngineConfig(ctx_size=32)) as engine:
        spans, spec = weight_bytes(engine.model.tensors).spans, engine.spec.experts
        assert spec is not None
        return SlotLayout(engine.device.info, spans, spec.n_experts, spec.n_used)


def host_pool(asked: str, n_slots: int, layout: SlotLayout) -> str | None:
    """The size of a pool for all experts, half of them, a layer's, or those without a slot.

    The last has some more of each size: so many can leave their slots at a time.
    """
    n_of_size = Counter(layout.span_bytes).values()
    places = {
        "half": [layout.n_experts * n // 2 - 1 for n in n_of_size],
        "top-k": layout.least_host_slots,
        "exchange": [
            (layout.n_experts - n_slots) * n + min(N_SPARE, n_slots * n - 1) for n in n_of_size
        ],
    }
    return None if asked == "all" else str(layout.host_bytes(places[asked]))


def config_of(row: Row, layout: SlotLayout) -> EngineConfig:
    n_experts, n_used = layout.n_experts, layout.n_used
    asked = dict(zip(NAMES, row, strict=True))
    slots = {"one": 1, "top-k": n_used, "half": n_experts // 2, "all but one": n_experts - 1}
    n_slots = slots[asked["slots"]]
    return EngineConfig(
        ctx_size=32,
        executor=asked["executor"],
        expert_slots=n_slots,
        expert_policy=asked["policy"],
        miss=asked["miss"],
        promote_on_read=asked["promote"],
        host_pool=host_pool(asked["pool"], n_slots, layout),
        expert_copies="wait" if asked["copies"] == "waited for" else "overlap",
    )


class LateCopies(DelayedUploads, Closing):
    """A thread's copies that arrive only after some questions whether they have.

    A thread waits for its copies at once: what is late has to be so for who asks the thread.
    """

    def close(self) -> None:
        self.real.close()  # type: ignore[attr-defined]


def inject(copies: str, monkeypatch: pytest.MonkeyPatch) -> list[DelayedUploads]:
    """Copies and reads from the file that come late or fail; what needs them gets them in time.

    Returns those who copy, once there are any.
    """
    faulty: list[DelayedUploads] = []

    def wrap(name: str, made: Callable[[Any], DelayedUploads]) -> None:
        real = getattr(expert_memory, name)

        def make(*arguments: Any) -> DelayedUploads:
            faulty.append(made(real(*arguments)))
            return faulty[-1]

        monkeypatch.setattr(expert_memory, name, make)

    if copies == "3 tokens late":
        wrap("Prefetcher", partial(LateCopies, delay=3))
    # What an expert that a layer needs is read for must succeed at the second attempt.
    for name, always in (("Uploads", 10**6), ("FileReads", 1)):
        n_failures = {"fail once": 1, "always fail": always}.get(copies, 0)
        if n_failures:
            wrap(name, partial(DelayedUploads, failures=n_failures))
    return faulty


CASES = [*product(("mixed", "demo"), ROWS)]


@pytest.mark.parametrize(
    ("model", "row"),
    sampled(CASES, lambda case: case[0] == "mixed" or ROWS.index(case[1]) % 7 == 0),
    ids=["-".join(map(str, (name, *row))) for name, row in CASES],
    indirect=["model"],
)
@pytest.mark.sample(12)
def test_no_way_of_moving_changes_a_bit(
    model: Path,
    row: Row,
    wanted: Rows,
    layout: SlotLayout,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = dict(zip(NAMES, row, strict=True))
    inject(asked["copies"], monkeypatch)
    with Engine(model, config_of(row, layout), checks=True) as engine:
        assert_same_bits(rows(engine, tokens_of(engine.n_vocab)), wanted)
        assert engine.cache is not None and engine.profiler is not None
        counters, hit_rate = engine.cache.counters, engine.profiler.served().total.hit_rate
        assert (engine.cache.pool is None) == (asked["pool"] == "all")
        assert engine.plan.exchanges or asked["pool"] != "exchange"
        assert engine.plan.executor == asked["executor"]
        missed = counters.missed_bytes > 0
        if (backing := engine.cache.residency.backing) is not None:
            assert counters.n_written_back > 0 or not (missed and min(backing.n_spare))
        assert counters.n_landed > 0 or not (asked["promote"] and missed)
        n_moved = counters.n_uploads + counters.n_landed
        if asked["copies"] == "always fail":
            assert counters.n_uploads == 0
        else:
            assert n_moved > 0
        if asked["copies"] == "waited for":
            assert hit_rate is not None and hit_rate > 0 and (hit_rate < 1) == missed


def test_a_start_whose_copies_fail_is_one_error(
    model: Path, layout: SlotLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some experts that exchange have room on the device alone: without them nothing can run."""
    inject("always fail", monkeypatch)
    config = EngineConfig(ctx_size=32, expert_slots=2, host_pool=host_pool("exchange", 2, layout))
    with pytest.raises(GpuError, match="neither to the device nor to host memory"):
        Engine(model, config, checks=True)


def test_late_copies_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun after the first token, looked for before each of the next four."""
    late = inject("3 tokens late", monkeypatch)
    moving: dict[str, Any] = {"expert_copies": "overlap", "promote_on_read": False}
    config = EngineConfig(ctx_size=32, expert_slots=2, **moving)
    n_arrived = []
    with Engine(model_path("moe_plain"), config, checks=True) as engine:
        assert engine.cache is not None and len(late) == 1
        for position in range(5):
            engine.run_token(7 * position + 1, position)
            n_arrived.append(engine.cache.counters.n_uploads)
    assert n_arrived[:4] == [0, 0, 0, 0] and n_arrived[4] > 0


@pytest.mark.parametrize("miss", ["read", "gather"])
def test_a_model_that_uses_one_expert_of_a_layer_lands_it(miss: Any) -> None:
    path, tokens = model_path("moe_yarn_top1"), [3, 17, 5, 9, 17, 3]
    with Engine(path, EngineConfig(ctx_size=32)) as engine:
        wanted = rows(engine, tokens)
    config = EngineConfig(ctx_size=32, expert_slots=2, promote_on_read=True, miss=miss)
    with Engine(path, config, checks=True) as engine:
        assert_same_bits(rows(engine, tokens), wanted)
        assert engine.cache is not None and engine.cache.counters.n_landed > 0


@pytest.mark.parametrize("miss", ["read", "gather"])
def test_what_landed_is_its_home_byte_for_byte(
    model: Path, miss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When an expert keeps its landing slot, every byte of its weights is there."""
    config = EngineConfig(
        ctx_size=32, expert_slots=2, promote_on_read=True, miss=miss, expert_policy="lru"
    )
    kept: list[int] = []
    real = Landings.keep
    with Engine(model, config, checks=True) as engine, Transfer(engine.device) as transfer:
        layers = engine.model.tensors.layers
        weights = [kept_bytes(expert_shape(layer.block)) for layer in layers]
        cache, read = engine.cache, transfer.read
        assert cache is not None

        def keep(self: Landings, keys: Keys, has_victim: Mask) -> None:
            real(self, keys, has_victim)
            for key in keys.tolist():
                slot = self._slots.all[self._locations.slot_of(key)]
                layer, (buffer, offset, _) = cache._space.layer(key), cache._homes[key]
                n_bytes = cache._memory.span_bytes[layer]
                home = read(buffer, offset, n_bytes)
                differs = home != read(slot.memory.buffer, slot.memory.offset, n_bytes)
                differs &= weights[layer]
                assert not differs.any(), np.flatnonzero(differs)
                kept.append(key)

        monkeypatch.setattr(Landings, "keep", keep)
        rows(engine, tokens_of(engine.n_vocab))
    assert len(set(kept)) > 5 and all(mask.mean() > 0.8 for mask in weights)
