"""What goes round the experts of prompts, against twins: in the shapes of real models, at the ends.

Also that experts in tiles, a few of a layer at a time, give what they give token by token.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.test_router import TUNINGS
from vkmoe.config import MAX_ROWS
from vkmoe.gpu.program import Program, TensorRef, memory_range
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.experts.twins import activated
from vkmoe.kernels.experts.twins import expert_down as down_twin
from vkmoe.kernels.matmul.operations import N_ROUNDS, TILE_HEADER_WORDS, TILE_WORDS
from vkmoe.kernels.matvec.twins import matvec
from vkmoe.kernels.prompt_experts import twins
from vkmoe.kernels.prompt_experts.cases import BringCase, CombineCase, RowsInUse, TilesCase
from vkmoe.kernels.prompt_experts.operations import (
    BroughtPlaces,
    PairTiles,
    SharedRows,
    bring_experts,
    clear_done,
    combine_rows,
    expert_tiles,
    places_of_round,
)
from vkmoe.kernels.router.operations import RouterShape, routing_words
from vkmoe.kernels.router.twins import router_topk, shared_weights
from vkmoe.kernels.tuning import Tuning

CPU, GPU = TUNINGS[0], TUNINGS[2]
OLMOE, QWEN3 = RouterShape(64, 8), RouterShape(128, 8)
SHARED = RouterShape(60, 4, shared_gate=True)
both_mappings = pytest.mark.parametrize("tuning", [CPU, GPU], ids=["blocks", "lanes"])

Floats = NDArray[np.float32]


# ----- the sort -----


@both_mappings
@pytest.mark.parametrize("how", ["", "cleared", "brought", "picked"])
@pytest.mark.parametrize(
    ("shape", "n_rows", "n_in_use"),
    [
        (OLMOE, 128, 128),
        (QWEN3, 512, 500),
        (SHARED, 33, 32),
        (RouterShape(257, 7), 65, 1),
        (RouterShape(8, 8), 70, 64),
        (RouterShape(1, 1), 1, 1),
        (RouterShape(1024, 32), MAX_ROWS, MAX_ROWS - 1),
    ],
    ids=str,
)
@pytest.mark.sample(16)
def test_pairs_are_sorted(
    runner: Runner, tuning: Tuning, shape: RouterShape, n_rows: int, n_in_use: int, how: str
) -> None:
    rows = RowsInUse(shape, n_rows, n_in_use)
    flags = {"clears": how == "cleared", "brings": how == "brought", "picks": how == "picked"}
    TilesCase(tuning, rows, columns=32, **flags).run(runner).verify()


@both_mappings
@pytest.mark.parametrize("columns", [1, 7, 32, 1000])
def test_all_rows_choose_the_same_experts(runner: Runner, tuning: Tuning, columns: int) -> None:
    """Only the last tile of each may have room left."""
    ids = np.tile(np.array([9, 63, 0, 31, 32, 5, 1, 8], np.uint32), (100, 1))
    rows = RowsInUse(OLMOE, 100, 100, ids)
    TilesCase(tuning, rows, columns, absent=0.0).run(runner).verify()


@both_mappings
@pytest.mark.parametrize("absent", [0.0, 0.5, 1.0])
def test_experts_that_are_nowhere_have_no_tiles(
    runner: Runner, tuning: Tuning, absent: float
) -> None:
    """None of them, half of them with all others done, all of them."""
    TilesCase(tuning, RowsInUse(SHARED, 40, 40), 8, absent).run(runner).verify()


def test_there_is_room_for_the_most_tiles() -> None:
    rng = np.random.default_rng(0)
    everything = np.ones(12, np.bool_), np.zeros(12, np.bool_)
    for n_rows in range(1, 40):
        for columns in (1, 2, 8, 32):
            few = rng.random((n_rows, 12)) * rng.choice([1.0, 30.0], 12)
            ids = np.argsort(few)[:, :4].astype(np.uint32)
            rows = RowsInUse(RouterShape(12, 4), n_rows, n_rows, ids)
            found = twins.expert_tiles(rows.chosen, *everything, columns).tiles
            assert len(found) <= PairTiles(rows.routed, columns).most
            assert found[:, 2].sum() == 4 * n_rows and found[:, 2].max() <= columns


def test_the_twin_sorts_as_stated() -> None:
    ids = np.array([[2, 0], [0, 2], [2, 1], [0, 3]])
    present, done = np.array([True, True, True, False]), np.array([False, True, False, False])
    found = twins.expert_tiles(ids, present, done, 2)
    assert found.pairs.tolist() == [1, 2, 6, 0, 3, 4]
    assert found.tiles.tolist() == [[0, 0, 2], [0, 2, 1], [2, 3, 2], [2, 5, 1]]
    assert found.done.tolist() == [True, True, True, False]


@pytest.mark.parametrize("span_bytes", [512, 3 << 20, 25 << 20, 300 << 20])
@pytest.mark.parametrize("n_experts", [1, 4, 8, 60, 64, 257])
def test_every_expert_is_brought_in_some_round(n_experts: int, span_bytes: int) -> None:
    """In no more rounds than tiles are counted for, and to places that the round before lacks."""
    n_places = places_of_round(n_experts, span_bytes)
    places = BroughtPlaces(1 << 40, span_bytes, n_places, n_experts)
    assert n_places * places.n_rounds >= n_experts > n_places * (places.n_rounds - 1)
    assert n_places * span_bytes <= 128 << 20 or n_places == -(-n_experts // 32)
    whole = memory_range(1 << 40, 2 * n_places * span_bytes)
    for index in range(1, places.n_rounds):
        one, next_one = places.half(index), places.half(index + 1)
        assert min(one.start, next_one.start) == whole.start
        assert max(one.end, next_one.end) == whole.end
        assert one.end <= next_one.start or next_one.end <= one.start


@pytest.mark.parametrize(("index", "idle"), [(1, 0), (2, 0), (3, 2), (7, 0)])
def test_experts_of_a_round_are_brought(runner: Runner, index: int, idle: int) -> None:
    """Of whole groups and of a part of one; the seventh round has fewer experts than places."""
    for span_bytes, part in ((16, 0), (8192 * 2, 0), (8192 * 2 + 48, 0), (8192 * 2 + 48, 8224)):
        BringCase(CPU, span_bytes, 20, 3, index, idle, part).run(runner).verify()


@pytest.mark.parametrize("n_experts", [2, 7, 8, 31, 32, 45])
def test_no_round_has_tiles_of_more_experts_than_it_may(n_experts: int) -> None:
    """By that many a dispatch has room for tiles; however many experts are brought."""
    fewest = -(-n_experts // (N_ROUNDS - 1))
    spare = []
    for n_places, n_missed in product(
        range(fewest, min(n_experts, fewest + 3) + 1), range(n_experts + 1)
    ):
        places = BroughtPlaces(0, 16, n_places, n_experts)
        everything = np.ones(n_experts, np.bool_), np.zeros(n_experts, np.bool_)
        at_home = np.arange(n_experts) < n_missed
        ids = np.arange(n_experts)[:, None]
        found = twins.expert_tiles(ids, *everything, 8, at_home, n_places)
        for index in range(1, places.n_rounds + 1):
            tiles = found.tiles[found.round_starts[index] : found.round_starts[index + 1]]
            spare.append(places.most_experts(index) - len(np.unique(tiles[:, 0])))
        assert found.round_starts[places.n_rounds + 1] == len(found.tiles), "none is left out"
    assert 0 <= min(spare) <= 1


# ----- the sum -----


@pytest.mark.parametrize("shared", [None, False, True], ids=["alone", "shared", "gated"])
@pytest.mark.parametrize(
    ("shape", "n_rows", "n_in_use", "width"),
    [
        (SHARED, 3, 3, 4),
        (SHARED, 33, 30, 2880),
        (RouterShape(1, 1, shared_gate=True), 1, 1, 256),
        (RouterShape(40, 32, shared_gate=True), 5, 4, 260),
    ],
    ids=str,
)
def test_sums_of_rows(
    runner: Runner, shape: RouterShape, n_rows: int, n_in_use: int, width: int, shared: bool | None
) -> None:
    rows = RowsInUse(shape, n_rows, n_in_use)
    for picks in (False, True):
        CombineCase(CPU, rows, width, shared, picks=picks).run(runner).verify()


@pytest.mark.parametrize("n_rows", [3, 5, 33])
def test_a_row_has_the_same_bits_beside_any_others(runner: Runner, n_rows: int) -> None:
    """In any place of programs of any size, and with rows behind it that are not in use."""
    rng = np.random.default_rng(3)
    width, n_used = 64, SHARED.n_used
    own = rng.standard_normal((2 + n_used, width), np.float32)  # hidden, shared, of its experts
    weights = rng.uniform(0, 1, n_used + 1).astype(np.float32)
    alone = _combined(runner, own, weights, place=0, n_rows=1)
    for place in {0, n_rows // 2, n_rows - 2}:
        with Runner(runner.device) as other:
            found = _combined(other, own, weights, place, n_rows)
        np.testing.assert_array_equal(found, alone)


def _combined(
    runner: Runner, own: Floats, weights: Floats, place: int, n_rows: int
) -> NDArray[np.uint32]:
    """The bits of a row at a place of a program; the last row, if there are more, is not used."""
    rng, width, n_used = np.random.default_rng(n_rows), own.shape[1], SHARED.n_used
    rows = RowsInUse(SHARED, n_rows, max(1, n_rows - 1))
    rows.weights[place] = weights
    values = rng.standard_normal((2 + n_used, n_rows, width), np.float32)
    values[:, place] = own
    tensors = [
        TensorRef(name, n_rows * n * width)
        for name, n in (("hidden", 1), ("shared_out", 1), ("expert_out", n_used))
    ]
    program = Program("combine")
    shared = SharedRows(tensors[1], gated=True)
    op = OpContext(program, GPU, "combine", n_rows=n_rows)
    tiles = PairTiles(rows.routed, 4)
    combine_rows(op, tiles, tensors[2], tensors[0], shared=shared)
    parts = (values[0], values[1], values[2:].swapaxes(0, 1))
    inputs = {rows.routed.tensor: rows.words(), rows.routed.params: rows.params()}
    inputs[tiles.done] = np.ones(SHARED.n_experts, np.uint32)
    given = inputs | dict(zip(tensors, parts, strict=True))
    (found,) = runner.run(program, given, tensors[0])
    bits: NDArray[np.uint32] = found.reshape(n_rows, width)[place]
    return bits


def test_rows_of_an_expert_that_is_not_done_are_no_numbers(runner: Runner) -> None:
    """What lies in its place is from another layer: it must not pass for an answer."""
    rows, width = RowsInUse(OLMOE, 9, 9), 64
    tiles, program = PairTiles(rows.routed, 4), Program("combine")
    hidden, out = TensorRef("hidden", 9 * width), TensorRef("out", rows.routed.n_pairs * width)
    combine_rows(OpContext(program, CPU, "combine", n_rows=9), tiles, out, hidden)
    missing = int(np.bincount(rows.chosen.ravel(), minlength=64).argsort()[-30])  # by some rows
    inputs = {
        **{rows.routed.tensor: rows.words(), rows.routed.params: rows.params()},
        **{hidden: np.zeros((9, width), np.float32), out: np.ones(out.n_words, np.float32)},
        tiles.done: (np.arange(OLMOE.n_experts) != missing).astype(np.uint32),
    }
    (words,) = runner.run(program, inputs, hidden)
    affected = (rows.chosen == missing).any(axis=1)
    assert 0 < affected.sum() < 9
    is_nan = np.isnan(words.view(np.float32).reshape(9, width))
    np.testing.assert_array_equal(is_nan, np.broadcast_to(affected[:, None], is_nan.shape))


# ----- what they declare -----


def test_they_declare_what_they_touch() -> None:
    rows = RowsInUse(SHARED, 8, 8)
    tiles, program = PairTiles(rows.routed, 4), Program("experts")
    op, table = OpContext(program, GPU), memory_range(4096, 2 * 8 * 60)
    clear_done(op.named("clear"), tiles)
    expert_tiles(op.named("sort"), tiles, 1, table)
    out, hidden = TensorRef("out", 8 * 4 * 20), TensorRef("hidden", 8 * 20 + 4)
    combine_rows(op.named("sum"), tiles, out, hidden)
    places, homes = BroughtPlaces(1 << 20, 256, 8, 60), memory_range(1 << 16, 1 << 16)
    bring_experts(op.named("bring"), tiles, places, 2, slice(32, 80), (homes,))
    clear, sort, total, bring = program.dispatches()
    assert set(bring.reads) == {tiles.brought.whole, homes}
    assert bring.writes == (memory_range((1 << 20) + 8 * 256, 8 * 256),)
    assert tiles.done.whole in clear.writes and table not in clear.reads
    inputs = {rows.routed.tensor.whole, rows.routed.params.whole}
    assert set(sort.reads) == {*inputs, tiles.done.whole, table}
    outputs = {tiles.done, tiles.tiles, tiles.sorted_pairs, tiles.brought}
    assert set(sort.writes) == {tensor.whole for tensor in outputs}
    assert set(total.reads) == {*inputs, tiles.done.whole, out.whole, hidden.words(0, 160)}
    assert total.writes == (hidden.words(0, 160),)


def test_what_does_not_fit_is_refused() -> None:
    rows = RowsInUse(OLMOE, 8, 8).routed
    op, table = OpContext(Program("experts"), GPU), memory_range(4096, 2 * 8 * 64)
    with pytest.raises(AssertionError):
        expert_tiles(op, PairTiles(rows, 4), 2, table)
    with pytest.raises(AssertionError):
        replace(rows, row_words=routing_words(OLMOE) - 1)
    with pytest.raises(AssertionError):
        replace(rows, tensor=TensorRef("routing", (MAX_ROWS + 1) * rows.row_words))
    out, hidden = TensorRef("out", 64 * 32), TensorRef("hidden", 8 * 32)
    with pytest.raises(AssertionError, match="shared"):
        combine_rows(op, PairTiles(rows, 4), out, hidden, shared=SharedRows(hidden, gated=True))


# ----- a layer's experts -----


class Layer:
    """Random experts, router and inputs; in float64, so that only the kernels round."""

    def __init__(self, n_rows: int, width: int = 32, inner: int = 24) -> None:
        rng = np.random.default_rng(n_rows)
        n = SHARED.n_experts
        self.n_rows, self.width = n_rows, width
        self.x, self.hidden = rng.standard_normal((2, n_rows, width), np.float32)
        self.router = rng.standard_normal((SHARED.n_logits, width), np.float32)
        self.gate, self.up = rng.standard_normal((2, n + 1, inner, width), np.float32)
        self.down = rng.standard_normal((n + 1, width, inner), np.float32)  # the last one is shared
        logits = self.x @ self.router.T  # step 7
        chosen = [router_topk(row[:n], SHARED.n_used) for row in logits]
        self.ids = np.array([one.ids for one in chosen], np.uint32)
        self.weights = np.array([one.weights for one in chosen], np.float32)
        self.gates = shared_weights(logits[:, n]).astype(np.float32)

    def token_by_token(self) -> NDArray[np.float64]:
        """Run each row through the twins of the kernels that decode: routed, then shared."""
        rows = []
        ones = np.ones(self.width)
        for row in range(self.n_rows):
            hidden = self.hidden[row].astype(np.float64)
            shared = np.array([SHARED.n_experts])
            weights = self.gates[row : row + 1]
            for slots, of_slots in ((self.ids[row], self.weights[row]), (shared, weights)):
                gate, up = (matvec(weights[slots], self.x[row]) for weights in (self.gate, self.up))
                act = activated(gate, up)
                zeros = np.zeros((len(slots), self.width))
                hidden = down_twin(self.down[slots], act, of_slots, hidden, ones, zeros).hidden
            rows.append(hidden)
        return np.array(rows)

    def run_tiles(self, tiles: NDArray[np.uint32], pairs: NDArray[np.uint32], out: Floats) -> None:
        """Fill out [pairs, width] as steps 9 and 10 do, from the words the sort left."""
        listed = tiles[TILE_HEADER_WORDS:].reshape(-1, TILE_WORDS)[tiles[0] : tiles[1]]
        for address, _, first, count in listed.tolist():
            mine = pairs[first : first + count].astype(np.int64)
            out[mine] = self.block(address // 256 - 1, self.x[mine // SHARED.n_used])

    def block(self, expert: int, x: Floats) -> NDArray[np.float64]:
        """One expert over rows [n, width]."""
        wide = x.astype(np.float64)
        act = activated(wide @ self.gate[expert].T, wide @ self.up[expert].T)
        out: NDArray[np.float64] = act @ self.down[expert].T.astype(np.float64)
        return out


@both_mappings
@pytest.mark.parametrize("n_groups", [1, 3])
@pytest.mark.parametrize("n_rows", [1, 33, 100])
def test_experts_in_tiles_give_what_they_give_token_by_token(
    runner: Runner, tuning: Tuning, n_rows: int, n_groups: int
) -> None:
    """All experts are there at once, or a third of them in turns: then the same sort runs again.

    Between the kernels NumPy multiplies, by what the words of tiles and pairs say.
    """
    layer = Layer(n_rows)
    rows = RowsInUse(SHARED, n_rows, n_rows, layer.ids)
    rows.weights[:] = np.column_stack([layer.weights, layer.gates])
    routed, tiles = rows.routed, PairTiles(rows.routed, 8)
    groups = np.arange(SHARED.n_experts) % n_groups == np.arange(n_groups)[:, None]
    addresses = 256 * (1 + np.arange(SHARED.n_experts, dtype=np.uint64))
    entries = np.where(groups, addresses, np.uint64(0))
    address, sort = runner.place(entries), Program("sort")
    expert_tiles(OpContext(sort, tuning), tiles, 0, memory_range(address, entries.nbytes))
    expert_out = np.full((routed.n_pairs, layer.width), np.nan, np.float32)
    done = np.zeros(SHARED.n_experts, np.uint32)
    outputs = tiles.tiles, tiles.sorted_pairs, tiles.done
    for group in range(n_groups):
        params = rows.params(address + group * entries[0].nbytes)
        inputs = {routed.tensor: rows.words(), routed.params: params, tiles.done: done}
        found, pairs, done = runner.run(sort, inputs, *outputs)
        layer.run_tiles(found, pairs, expert_out)
    assert set(np.flatnonzero(done)) == set(layer.ids.reshape(-1).tolist())

    hidden_ref, out_ref = TensorRef("hidden", layer.x.size), TensorRef("out", expert_out.size)
    shared_ref, total = TensorRef("shared", layer.x.size), Program("sum")
    shared = SharedRows(shared_ref, gated=True)
    op = OpContext(total, tuning, n_rows=n_rows)
    combine_rows(op, tiles, out_ref, hidden_ref, shared=shared)
    floats = {
        **{hidden_ref: layer.hidden, out_ref: expert_out},
        shared_ref: layer.block(SHARED.n_experts, layer.x).astype(np.float32),
    }
    routing = {routed.tensor: rows.words(), routed.params: rows.params(), tiles.done: done}
    (words,) = runner.run(total, {**routing, **floats}, hidden_ref)
    wanted = layer.token_by_token()
    found_rows = words.view(np.float32).reshape(wanted.shape)
    np.testing.assert_allclose(found_rows, wanted, atol=2e-6 * np.abs(wanted).max())
