"""Rows of a batch leave the bits that they leave alone, wherever they stand and whatever is beside
them; those of one sequence see each other; and only one of them lets missed experts land.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.tunings import MAPPINGS, elsewhere, tuning_for
from tests.samples import sampled
from vkmoe.batch import TokenBatch
from vkmoe.gpu.device import Device
from vkmoe.gpu.program import Program, TensorRef, memory_range
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.gpu.token_io import pack_params, param_words
from vkmoe.kernels.attention.cases import (
    deepseek2_shape,
    gemma4_shape,
    gpt_oss_shape,
    hunyuan_shape,
    qwen3_shape,
    wide_shape,
)
from vkmoe.kernels.attention.layers import GivenRows, layer_of
from vkmoe.kernels.attention.operations import AttentionTensors
from vkmoe.kernels.attention.shapes import AttentionShape, LatentShape, choose_split
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.experts.cases import DownCase, GateUpCase
from vkmoe.kernels.experts.spans import Use
from vkmoe.kernels.matvec.cases import MatvecCase, ResidualCase
from vkmoe.kernels.router.cases import RouterCase
from vkmoe.kernels.router.operations import (
    Landing,
    RouterShape,
    RouterTensors,
    RoutingLog,
    router_topk,
    routing_words,
)
from vkmoe.kernels.router.twins import look_up
from vkmoe.kernels.rows import ALL, PAIR, RowBatch, RowsCase
from vkmoe.kernels.tuning import Tuning
from vkmoe.kv_types import KvTypes, both
from vkmoe.quants.types import Bytes

TUNINGS = [tuning_for(suffix, 8 if "blocks" in suffix else 64, 4) for suffix in MAPPINGS]
FEW = ("", "+subgroup", "+blocks")  # mappings of other devices, which CI alone tries
every_mapping = pytest.mark.parametrize(
    "tuning",
    [
        pytest.param(tuning, id=suffix or "lanes", marks=[pytest.mark.full] * (suffix in FEW))
        for tuning, suffix in zip(TUNINGS, MAPPINGS, strict=True)
    ],
)


def of_matrices(tuning: Tuning, *segments: tuple[str, int]) -> MatvecCase:
    return MatvecCase(tuning, segments, 512, n_partials=37, biased=True)


def of_heads(tuning: Tuning, kind: str) -> MatvecCase:
    return MatvecCase(tuning, ((kind, 11),), 256, n_heads=3, gap=8)


@every_mapping
@pytest.mark.full
def test_matrices(runner: Runner, tuning: Tuning) -> None:
    """Batches of 2, 4 and 8 rows, of which four have one that is inert; of others, of one size."""
    RowsCase(of_matrices(tuning, ("Q4_K", 5), ("Q4_K", 3), ("Q8_0", 7))).run(runner).verify()
    RowsCase(ResidualCase(tuning, "Q8_0", 13, 512), (RowBatch((5, 3, 6), 4),)).run(runner).verify()
    RowsCase(of_heads(tuning, "Q8_0"), (RowBatch(ALL[::-1], 8),)).run(runner).verify()


@pytest.mark.parametrize("most", [3, 8, *elsewhere(1, 2, 4)])
def test_however_many_columns_a_workgroup_takes(runner: Runner, most: int) -> None:
    """Of five rows one or all; of six one, two, three or all; of eight four or all."""
    tuning = replace(TUNINGS[-1], most_columns=most, rows=3)
    batches = (RowBatch((3, 0, 6, 1, 5), 5), RowBatch((1, 4, 0, 2, 6, 5), 6), RowBatch(ALL, 8))
    for case in (of_matrices(tuning, ("Q4_K", 7)), of_heads(tuning, "Q4_K")):
        RowsCase(case, batches).run(runner).verify()


@pytest.mark.parametrize(("rows", "loaded_words"), [(3, 4), *elsewhere((1, 16), (5, 16), (8, 4))])
def test_however_many_rows_a_walk_has(runner: Runner, rows: int, loaded_words: int) -> None:
    """Walks that do not divide the rows of a workgroup take some rows twice."""
    tuning = Tuning("lanes", 32, rows, False, loaded_words=loaded_words)
    for case in (ResidualCase(tuning, "Q4_0", 13, 512), of_matrices(tuning, ("IQ4_NL", 9))):
        RowsCase(case, (RowBatch((6, 1, 7), 3),)).run(runner).verify()


@every_mapping
def test_experts(runner: Runner, tuning: Tuning) -> None:
    """Each row has a routing of its own; of an inert row the addresses are null."""
    use = Use(4, 4, biased=True)
    for case in (
        GateUpCase(tuning, ("Q4_K", "Q4_K"), use, 5, 512),
        GateUpCase(tuning, ("Q4_K", "Q6_K"), use, 5, 512),
        DownCase(tuning, "Q6_K", use, 13, 256),
    ):
        RowsCase(case).run(runner).verify()


def test_routers_with_groups(runner: Runner) -> None:
    """The self-test has rows of all other kernels."""
    shape = RouterShape(64, 6, "sigmoid", n_groups=8, n_groups_used=3)
    RowsCase(RouterCase(TUNINGS[0], shape)).run(runner).verify()


def test_a_wrong_neighbour_is_found(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: with rows of y that overlap, rows differ from what they are alone."""
    monkeypatch.setattr(TensorRef, "row_words", property(lambda self: self.n_words // 8 // 4 * 4))
    with pytest.raises(AssertionError):
        RowsCase(of_matrices(TUNINGS[0], ("F32", 5)), PAIR).run(runner).verify()


# ----- attention -----


class Row(NamedTuple):
    """A token: its region of the caches, and its position there."""

    sequence: int
    position: int


CONTEXT, N_REGIONS = 150, 3
SHAPES: dict[str, AttentionShape | LatentShape] = {
    "grouped": qwen3_shape(context=CONTEXT),
    "window": gpt_oss_shape(context=CONTEXT, kv_types=both("f32"), sinks=False),
    "full width": qwen3_shape(context=CONTEXT, norm="full_width", n_heads=4),
    "512 dims": wide_shape(context=CONTEXT, window=50),
    "gains behind": hunyuan_shape(context=CONTEXT),
    "normed values": gemma4_shape(context=CONTEXT),
    "another's caches": gemma4_shape(context=CONTEXT, appends=False),
    "latent": deepseek2_shape(context=CONTEXT),
    "K q8_0, V f16": gpt_oss_shape(context=CONTEXT, kv_types=KvTypes("q8_0", "f16"), sinks=False),
    "latent q8_0": deepseek2_shape(context=CONTEXT, kv_type="q8_0"),
    "K q4_0, V q5_1": gpt_oss_shape(context=CONTEXT, kv_types=KvTypes("q4_0", "q5_1"), sinks=False),
    "latent q5_1": deepseek2_shape(context=CONTEXT, kv_type="q5_1"),
}
# One sequence alone; three of them, in any order; speculation beside others.
BATCHES: dict[str, list[Row]] = {
    "one sequence": [Row(1, position) for position in range(96, 104)],
    "from nothing": [Row(0, position) for position in range(4)],
    "several": [Row(2, 149), Row(0, 0), Row(1, 64)],
    "mixed": [Row(0, 31), Row(0, 32), Row(2, 7), Row(0, 33), Row(1, 120)],
}


class Attended:
    """A layer over caches of three regions with random rows in all places, in a program's rows."""

    def __init__(
        self, runner: Runner, shape: AttentionShape | LatentShape, tuning: Tuning, n_rows: int
    ) -> None:
        given, program = GivenRows(n_rows, N_REGIONS, 0, 0), Program("attention")
        wider, split = given._replace(behind=1), choose_split(shape, tuning, n_splits=3)
        self._runner, self._program, self._n_rows = runner, program, n_rows
        self._layer = layer_of(runner, shape, slice(None), given)
        self._params = TensorRef(f"params {n_rows}", param_words(n_rows))
        self._out = wider.tensor("out", shape.n_heads * shape.value_dim)
        partials = wider.tensor("partials", split.partials_words(shape))
        op = OpContext(program, tuning, "attention", n_rows=n_rows)
        self._layer.append(op, split, AttentionTensors(self._params, partials, self._out))

    def run(self, rows: list[Row]) -> NDArray[np.uint32]:
        """What attention leaves of some rows [rows, words], each of which has always the same
        numbers; those of inert rows stay NaN.
        """
        n_words = sum(ref.row_words for ref in self._layer.tensors)
        drawn = [np.random.default_rng(row).normal(0, 1, n_words) for row in rows]
        inputs: dict[TensorRef, NDArray[Any]] = {self._params: _params(rows, self._n_rows)}
        inputs |= self._layer.inputs(np.array(drawn, np.float32))
        (found,) = self._runner.run(self._program, inputs, self._out)
        return found.reshape(self._n_rows, -1)[: len(rows)]

    @property
    def cached(self) -> list[Bytes]:
        caches = self._layer.caches
        return [self._runner.fetch(each.address, each.rows.data.nbytes) for each in caches]


def _params(rows: list[Row], n_rows: int) -> NDArray[np.uint32]:
    words = np.full(param_words(n_rows), SENTINEL, np.uint32)
    sequences, positions = zip(*rows, strict=True)
    flags = (True,) * len(rows)
    pack_params(words.data, TokenBatch((0,) * len(rows), positions, sequences, flags), 0, 1)
    return words


@pytest.mark.parametrize("mapping", ["blocks", "lanes"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("which", sampled(BATCHES, "mixed".__eq__))
@pytest.mark.sample(4)
def test_attention_of_rows_is_that_of_one_after_the_other(
    device: Device, which: str, name: str, mapping: str
) -> None:
    """Output and caches, bit by bit: the rows of one sequence see those before them."""
    tuning, rows = TUNINGS[MAPPINGS.index("+blocks") if mapping == "blocks" else 0], BATCHES[which]
    shape = SHAPES[name]
    with Runner(device) as runner:
        alone = Attended(runner, shape, tuning, 1)
        wanted = [alone.run([row])[0] for row in rows]
        caches = alone.cached
    for n_rows in (len(rows), 8):
        with Runner(device) as runner:
            together = Attended(runner, shape, tuning, n_rows)
            np.testing.assert_array_equal(together.run(rows), wanted)
            for found, cache in zip(together.cached, caches, strict=True):
                np.testing.assert_array_equal(found, cache)


# ----- landing -----


@pytest.mark.parametrize("do_gather", [False, True])
@pytest.mark.parametrize("landing_row", [0, 2, 0xFFFFFFFF])
def test_only_the_landing_row_gets_places(
    runner: Runner, landing_row: int, do_gather: bool
) -> None:
    """Three rows of four that route alike: one has partners, an inert one no addresses at all."""
    shape, n_layers, n_rows, n_live = RouterShape(16, 4), 2, 4, 3
    rng = np.random.default_rng(12)
    table = 2 * rng.integers(1, 1 << 62, (n_layers, 16), np.uint64) + np.uint64(1)
    places = 256 * rng.integers(1, 1 << 55, (n_layers, 4), np.uint64)
    entries = np.concatenate([table.reshape(-1), places.reshape(-1)])
    address, logits = runner.place(entries), TensorRef("logits", 4 * 16, 4)
    routing = TensorRef("routing", 4 * routing_words(shape), 4)
    log, params = RoutingLog(n_layers, 4, n_rows), TensorRef("params", param_words(n_rows))
    program = Program("router")
    router_topk(
        OpContext(program, TUNINGS[0], "router", n_rows=n_rows),
        shape,
        1,
        RouterTensors(logits, params, routing, log),
        memory_range(address, entries.nbytes),
        Landing(n_layers, 4, do_gather),
    )
    words = np.full(params.n_words, SENTINEL, np.uint32)
    batch = TokenBatch((0,) * n_live, (0,) * n_live, (0,) * n_live, (True,) * n_live)
    pack_params(words.data, batch, address, 1, landing_row)
    drawn = np.tile(rng.normal(0, 1, 16).astype(np.float32), (n_rows, 1))
    found, logged = runner.run(program, {logits: drawn, params: words}, routing, log.tensor)
    chosen = np.argsort(-drawn[0])[:4]
    for row, part in enumerate(found.reshape(n_rows, -1)):
        ids, addresses, partners = part[:4], part[8:16].view("u8"), part[16:24].view("u8")
        if row >= n_live:
            assert not addresses.any() and not partners.any()
            continue
        wanted = look_up(table[1][chosen], places[1, : 4 * (row == landing_row)], do_gather)
        np.testing.assert_array_equal(ids, chosen)
        np.testing.assert_array_equal(addresses, wanted.addresses)
        np.testing.assert_array_equal(partners, wanted.partners)
    expected = np.full(log.tensor.n_words, SENTINEL, np.uint32)
    log.views(expected).ids[:n_live, 1] = chosen
    np.testing.assert_array_equal(logged, expected)
