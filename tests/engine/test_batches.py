"""The law for batches: cuts, neighbours and placement never change a bit.

Rows of prompts and rows that are decoded are two classes, each with one order of sums. They differ
from each other by rounding alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.caches import ROUNDING, Rows, assert_same_bits, rounding, rows
from tests.engine.covers import Row, covering_rows
from tests.engine.tiny import (
    ONE_OF_EACH,
    Tensor,
    lengthened,
    mixed_model,
    model_path,
    rewrite,
)
from tests.kernels.tunings import chosen_device
from tests.needs import missing
from tests.samples import sampled
from vkmoe.batch import Phase, TokenBatch
from vkmoe.choices import Executor
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.device import Device
from vkmoe.gpu.transfer import Transfer
from vkmoe.kernels.matmul.operations import TILE_HEADER_WORDS
from vkmoe.kernels.prompt_experts.twins import N_ROUNDS
from vkmoe.kernels.tuning import Tuning, matrix_tile
from vkmoe.llm import demo_model_path
from vkmoe.models import open_model
from vkmoe.placement.pools import SlotLayout
from vkmoe.weights.sizes import weight_bytes

pytestmark = pytest.mark.usefixtures("one_device")

LENGTHS = (1, 2, 31, 32, 33, 257)  # of prompts
N_TOKENS = LENGTHS[-1]
HALF_ROUNDING = 2e-3  # of the largest logit: prompts in tiles of f16 and of f32


def tokens_of(n_vocab: int, n_tokens: int = N_TOKENS) -> list[int]:
    return [(7 * i * i + 3 * (i % 4)) % (n_vocab - 1) + 1 for i in range(n_tokens)]


def batch(
    tokens: Sequence[int], first: int, count: int, region: int = 0, phase: Phase = "prompt"
) -> TokenBatch:
    """Rows of one sequence, of which the last wants logits; if they are decoded, all do."""
    decoded = phase == "decode"
    return TokenBatch(
        tuple(tokens[first : first + count]),
        tuple(range(first, first + count)),
        (region,) * count,
        (*(decoded for _ in range(count - 1)), True),
        phase,
    )


def joined(*batches: TokenBatch) -> TokenBatch:
    """Rows of several sequences in one batch."""
    return TokenBatch(
        tokens=tuple(token for each in batches for token in each.tokens),
        positions=tuple(position for each in batches for position in each.positions),
        sequences=tuple(region for each in batches for region in each.sequences),
        wants_logits=tuple(wants for each in batches for wants in each.wants_logits),
        phase=batches[0].phase,
    )


def prompt(engine: Engine, tokens: Sequence[int], cuts: Sequence[int], region: int = 0) -> Rows:
    """The logits at the end of every chunk of a prompt, chunks as long as `cuts`."""
    found, first = [], 0
    for count in cuts:
        engine.run(batch(tokens, first, count, region))
        found.append(engine.full_logits())
        first += count
    return np.stack(found)


# One with each kind of attention and of feed-forward block.
SAMPLE = ("dense_tied", "gptoss_odd", "qwen2moe_top1", "deepseek2_v3")


@pytest.fixture(
    scope="module", params=sampled(["demo", *ONE_OF_EACH], SAMPLE.__contains__), ids=str
)
def path(request: pytest.FixtureRequest) -> Path:
    return demo_model_path() if request.param == "demo" else model_path(request.param)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    config = EngineConfig(ctx_size=N_TOKENS + 7, parallel=8, ubatch_size=160)
    with Engine(lengthened(path, N_TOKENS + 7), config) as opened:
        yield opened


@pytest.mark.sample(1)
def test_a_prompt_has_the_same_bits_however_it_is_cut(engine: Engine) -> None:
    """And near those of its tokens as they are decoded one by one."""
    tokens = tokens_of(engine.n_vocab)
    wanted = prompt(engine, tokens, [1, 1, 29, 1, 1, 160, 64])[[0, 1, 2, 3, 4, 6]]
    for n_tokens, ends in zip(LENGTHS, wanted, strict=True):
        cuts = [160, 97] if n_tokens > 160 else [n_tokens]
        assert_same_bits(prompt(engine, tokens, cuts, 1)[-1:], ends[None])
    one_by_one = prompt(engine, tokens, [1] * 33, 2)
    assert_same_bits(one_by_one[np.array(LENGTHS[:5]) - 1], wanted[:5])
    engine.rewind(0, 0)
    decoded = rows(engine, tokens)[np.array(LENGTHS) - 1]
    assert np.abs(wanted - decoded).max() <= rounding(engine, ROUNDING) * np.abs(decoded).max()


def test_a_long_prompt_has_the_same_bits_however_it_is_cut() -> None:
    """Of 1,500 tokens, which leave a window far behind."""
    config = EngineConfig(ctx_size=1504, parallel=2, ubatch_size=512)
    with Engine(lengthened(model_path("gptoss_odd"), 1504), config) as engine:
        tokens = tokens_of(engine.n_vocab, 1500)
        wanted = prompt(engine, tokens, [512, 512, 476])
        for cuts in ([333, 179, 1, 511, 476], [512, 33, 479, 299, 177]):
            found = prompt(engine, tokens, cuts, 1)
            assert_same_bits(found[np.isin(np.cumsum(cuts), (512, 1024, 1500))], wanted)


@pytest.mark.parametrize(
    "ways",
    [{"promote_on_read": False}, {"promote_on_read": True}, {"miss": "gather"}],
    ids=["read", "promote", "gather"],
)
@pytest.mark.parametrize("executor", ["fused", "stepped"])
@pytest.mark.sample(3)
def test_an_expert_without_a_slot_crosses_the_bus_once_a_chunk(
    executor: Executor, ways: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows use it: it is brought, and its tiles are read where it was brought to."""
    monkeypatch.setattr(DeviceInfo, "is_uma", False)  # a card's memory is its own
    asked: dict[str, Any] = {"expert_slots": 12, "expert_copies": "wait", "executor": executor}
    config = EngineConfig(ctx_size=128, **asked, **ways)
    with Engine(demo_model_path(), config) as engine, Transfer(engine.device) as transfer:
        assert engine.workspace.prompt and engine.cache
        lists, tokens = engine.workspace.prompt.routed, tokens_of(engine.n_vocab, 80)
        assert lists is not None
        for first in (0, 40):  # the second finds some of them in slots
            rows = batch(tokens, first, 40)._replace(wants_logits=(True,) * 40)
            used = np.unique(engine.run(rows).routing[:, -1])
            brought, tiles = (
                transfer.read(engine._backend.tensor(ref), 0, ref.n_bytes).view(np.uint64)
                for ref in (lists.brought, lists.tiles)
            )
            starts = tiles.view(np.uint32)[: N_ROUNDS + 1]
            spans = tiles[TILE_HEADER_WORDS // 2 :].reshape(-1, 2)[: starts[-1], 0]
            n_ways = lists.routed.shape.n_experts + engine.plan.brought_places
            homes, places = brought[: 2 * n_ways].reshape(-1, 2).T
            homes, in_slots = homes[homes > 0], set(spans) - set(places)
            assert len(set(homes)) == len(homes) == len(used) - len(in_slots) > 0
            assert bool(in_slots) == (first > 0) and not set(spans) & set(homes)


@pytest.mark.sample(2)
def test_brought_experts_give_the_bits_of_those_on_the_device(engine: Engine, path: Path) -> None:
    """In all models: with biases, with gate and up of two types, in layers of other sizes."""
    if not engine.spec.moe_layers:
        return
    tokens, cuts = tokens_of(engine.n_vocab), [33, 64]
    wanted = prompt(engine, tokens, cuts)
    config = EngineConfig(ctx_size=100, ubatch_size=64, expert_slots=1, miss="gather")
    with Engine(path, config, checks=True) as other:
        assert other.plan.brought_places
        assert_same_bits(prompt(other, tokens, cuts), wanted)


def test_neighbours_change_no_bit_of_a_prompt(engine: Engine) -> None:
    """Three prompts in one chunk, at other positions, and one that all rows of a tile share."""
    tokens = tokens_of(engine.n_vocab)
    other = tokens[::-1]
    wanted = prompt(engine, tokens, [9, 4])
    engine.run(batch(other, 0, 5, region=1))
    engine.run(joined(batch(other, 5, 6, 1), batch(tokens, 0, 9, 0), batch(other, 0, 7, 2)))
    assert_same_bits(engine.full_logits(1)[None], wanted[:1])
    engine.run(joined(batch([1] * 20, 7, 13, 2), batch(tokens, 9, 4, 0)))
    assert_same_bits(engine.full_logits(1)[None], wanted[1:])


@pytest.mark.sample(2)
def test_neighbours_change_no_bit_of_what_is_decoded(engine: Engine) -> None:
    assert engine.max_decode_rows == 8
    tokens = tokens_of(engine.n_vocab)
    wanted = rows(engine, tokens[:9])
    for region in range(3):
        engine.rewind(region, 0)
    engine.run(batch(tokens[::-1], 0, 3, 2))
    for i in range(9):
        one, two = (batch(tokens, i, 1, region, "decode") for region in (0, 1))
        other = batch(tokens[::-1], 3 + i, 1, 2, "decode")
        engine.run(joined(*([other, one, two] if i % 2 else [one, two, other])))
        at = 1 if i % 2 else 0
        for index in (at, at + 1):
            assert_same_bits(engine.full_logits(index)[None], wanted[i : i + 1])


def test_rows_of_one_sequence_see_each_other(engine: Engine) -> None:
    """As what was guessed ahead is verified: the bits of decoding one after the other."""
    tokens = tokens_of(engine.n_vocab)
    wanted = rows(engine, tokens[:11])
    engine.rewind(0, 0)
    for first, count in ((0, 3), (3, 1), (4, 7)):
        engine.run(batch(tokens, first, count, 0, "decode"))
        found = np.stack([engine.full_logits(i) for i in range(count)])
        assert_same_bits(found, wanted[first : first + count])


def test_a_copied_region_goes_on_as_the_one_it_is_of(engine: Engine) -> None:
    """A recurrent one from where its state was copied: before the last row of a prompt."""
    tokens = tokens_of(engine.n_vocab)
    wanted = prompt(engine, tokens, [11, 24])
    engine.run(batch(tokens[::-1], 0, 30, 2))
    n_copied = engine.copy_region(0, 2, 11)
    assert n_copied == 11 - engine.spec.is_recurrent
    engine.run(batch(tokens, n_copied, 35 - n_copied, 2))
    assert_same_bits(engine.full_logits()[None], wanted[1:])


# ----- routing -----


def test_all_rows_may_choose_the_same_experts(tmp_path: Path) -> None:
    """Their pairs fill tiles of two experts; the others have none."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("ffn_gate_inp.bias"):
                tensor.data.view(np.float32)[[0, 2]] += 1e3

    path = rewrite(model_path("gptoss_plain"), tmp_path / "same.gguf", change)
    with Engine(path, EngineConfig(ctx_size=128, parallel=2, ubatch_size=100)) as engine:
        tokens = tokens_of(engine.n_vocab, 100)
        result = engine.run(batch(tokens, 0, 100))
        assert np.unique(result.routing).tolist() == [0, 2]
        wanted = engine.full_logits()[None]
        assert_same_bits(prompt(engine, tokens, [1, 31, 33, 35], 1)[-1:], wanted)
        engine.rewind(1, 0)
        engine.run(joined(batch(tokens, 0, 50, 1), batch(tokens[::-1], 0, 20, 0)))
        engine.run(batch(tokens, 50, 50, 1))
        assert_same_bits(engine.full_logits()[None], wanted)


def test_an_expert_that_is_never_brought_gives_no_numbers(mixed: Path, least_pool: str) -> None:
    """What lies in its place is another layer's: it must not pass for an answer."""
    config = EngineConfig(ctx_size=64, expert_slots=1, host_pool=least_pool)
    with Engine(mixed, config, checks=True) as engine:
        tokens = tokens_of(engine.n_vocab, 32)
        top = engine.run(batch(tokens, 0, 32)).top
        assert top is not None and not top.has_nan
        groups = engine._experts.groups
        engine._experts.groups = lambda experts: groups(experts)[1:]  # type: ignore[method-assign]
        top = engine.run(batch(tokens, 0, 32)).top
        assert top is not None and top.has_nan


@pytest.mark.full
def test_prompts_in_tiles_of_f16_keep_the_law() -> None:
    """In the mapping of GPUs: the same bits however a prompt is cut, near those of f32."""
    device = chosen_device()
    if "float16" not in device.features:
        missing("the device has no float16")
    lanes, config = Tuning("lanes", 64, 4, False), EngineConfig(ctx_size=64, ubatch_size=40)
    halves = [replace(lanes, half_tiles=True)]
    if (tile := matrix_tile(device)) is not None:
        halves.append(replace(lanes, matrix_tile=tile))
    found = []
    for tuning in (*halves, lanes):
        with Engine(demo_model_path(), config, tuning=tuning) as engine:
            tokens = tokens_of(engine.n_vocab, 35)
            found.append(prompt(engine, tokens, [2, 32, 1]))
            assert_same_bits(prompt(engine, tokens, [33, 2])[1:], found[-1][2:])
    *rounded, exact = found
    for half in rounded:
        assert 0.0 < np.abs(half - exact).max() <= HALF_ROUNDING * np.abs(exact).max()


# ----- placement -----

FACTORS: dict[str, tuple[Any, ...]] = {
    "executor": ("fused", "stepped"),
    "slots": (8, 1, 4),
    "miss": ("read", "gather"),
    "promote": (False, True),
    "pool": ("all", "half", "least"),
}
N_PROMPT, N_DECODED = 40, 6


def possible(row: Row) -> bool:
    """A small pool needs the stepped executor; where all experts have slots, none is missed."""
    asked = dict(zip(FACTORS, row, strict=True))
    if asked["slots"] == 8:
        return bool((asked["miss"], asked["promote"], asked["pool"]) == ("read", False, "all"))
    return bool(asked["executor"] == "stepped" or asked["pool"] == "all")


PLACEMENTS = covering_rows([row for row in product(*FACTORS.values()) if possible(row)])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight experts a layer, of which two are used, in mixed types."""
    return mixed_model(tmp_path_factory.mktemp("batches") / "mixed.gguf")


@pytest.fixture(scope="module")
def resident(mixed: Path) -> tuple[Rows, int]:
    """The logits of every row, alone and with all experts on the device; the bytes of those."""
    with Engine(mixed, EngineConfig(ctx_size=64)) as engine:
        tokens = tokens_of(engine.n_vocab)
        found = prompt(engine, tokens, [1] * N_PROMPT)
        for i in range(N_DECODED):
            engine.run(batch(tokens, N_PROMPT + i, 1, 0, "decode"))
            found = np.concatenate([found, engine.full_logits()[None]])
        (line,) = (line for line in engine.plan.lines if line.item == "experts")
        return found, line.n_bytes


@pytest.fixture(scope="module")
def least_pool(mixed: Path) -> str:
    """The smallest pool, which does not hold the experts of a layer."""
    with open_model(mixed) as model, Device() as device:
        spans, spec = weight_bytes(model.tensors).spans, model.spec.experts
        assert spec is not None
        return str(SlotLayout(device.info, spans, spec.n_experts, spec.n_used).least_host_bytes)


@pytest.mark.parametrize("row", PLACEMENTS, ids=["-".join(map(str, row)) for row in PLACEMENTS])
@pytest.mark.sample(4)
def test_no_placement_cut_or_neighbour_changes_a_bit(
    row: Row, mixed: Path, resident: tuple[Rows, int], least_pool: str
) -> None:
    asked = dict(zip(FACTORS, row, strict=True))
    config = EngineConfig(
        ctx_size=64,
        parallel=3,
        ubatch_size=40,
        executor=asked["executor"],
        expert_slots=asked["slots"],
        miss=asked["miss"],
        promote_on_read=asked["promote"],
        host_pool={"half": str(resident[1] // 2), "least": least_pool}.get(asked["pool"]),
    )
    with Engine(mixed, config, checks=True) as engine:
        seed = PLACEMENTS.index(row)
        positions, found = beside_others(engine, np.random.default_rng(seed))
        assert_same_bits(found, resident[0][positions])
        tokens = tokens_of(engine.n_vocab)
        assert_same_bits(prompt(engine, tokens, [40], 2), resident[0][39:40])  # experts are brought
        assert (engine.cache is None) == (asked["slots"] == 8)
        assert engine.profiler is not None and (engine.profiler.counts[0] > 0).all(), "an expert"


def beside_others(engine: Engine, rng: np.random.Generator) -> tuple[list[int], Rows]:
    """The logits at some positions of a sequence, cut at random, with two others beside it."""
    tokens, positions, found = tokens_of(engine.n_vocab), list[int](), list[NDArray[np.float32]]()
    texts, ends = (tokens[::-1], tokens, tokens[::-2]), [0, 0, 0]

    def run(regions: Sequence[int], counts: Sequence[int], phase: Phase) -> None:
        parts = [batch(texts[region], ends[region], count, region, phase)
                 for region, count in zip(regions, counts, strict=True)]  # fmt: skip
        engine.run(joined(*parts))
        for region, count in zip(regions, counts, strict=True):
            ends[region] += count
        found.append(engine.full_logits(regions.index(1)))
        positions.append(ends[1] - 1)

    while ends[1] < N_PROMPT:
        others = [region for region in (0, 2) if ends[region] < N_PROMPT and rng.random() < 0.7]
        regions = rng.permutation([1, *others]).tolist()
        run(regions, [min(int(rng.integers(1, 14)), N_PROMPT - ends[i]) for i in regions], "prompt")
    for _ in range(N_DECODED):
        others = rng.permutation([0, 2])[: rng.integers(0, engine.max_decode_rows)].tolist()
        regions = rng.permutation([1, *others]).tolist()
        run(regions, [1] * len(regions), "decode")
    return positions, np.stack(found)
