"""Compares expert_tiles, bring_experts and combine_rows with what they should leave: places and
bytes exactly, sums within rounding.

Rows that are not in use have ids and weights too, which nothing may look at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import TokenBatch
from vkmoe.gpu.program import Program, TensorRef, memory_range
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.gpu.token_io import pack_params, param_words
from vkmoe.kernels.comparison import Checks, KernelCase, Prepared, Words
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.experts.operations import NO_WORD
from vkmoe.kernels.family import Family, Setting, Setup, Trial, Used, Work, trial
from vkmoe.kernels.matmul.operations import TILE_HEADER_WORDS, TILE_WORDS
from vkmoe.kernels.memory.operations import GROUP_BYTES as COPIED_BYTES
from vkmoe.kernels.prompt_experts import twins
from vkmoe.kernels.prompt_experts.operations import (
    N_HALVES,
    BroughtPlaces,
    Combining,
    PairTiles,
    RoutedRows,
    SharedRows,
    bring_experts,
    clear_done,
    combine_rows,
    expert_tiles,
    places_of_round,
)
from vkmoe.kernels.router.operations import RouterShape, routing_words, shared_weight_word
from vkmoe.kernels.router.twins import AT_HOME
from vkmoe.kernels.shapes import TINY
from vkmoe.kernels.tuning import Tuning

N_LAYERS, LAYER = 3, 1
PLACE_BYTES = 4096
FIRST_PLACE = (1 << 40) - PLACE_BYTES  # the others lie beyond a multiple of 4 GiB; nothing is there


@dataclass(frozen=True)
class RowsInUse:
    """Draws the routing of a program of `n_rows` rows, of which the first `n_used_rows` are used.

    Without `ids` [n_rows, n_used], each row chooses distinct experts, low ones more often.
    """

    shape: RouterShape
    n_rows: int
    n_used_rows: int
    ids: NDArray[np.uint32] | None = None
    seed: int = 0

    @cached_property
    def routed(self) -> RoutedRows:
        row_words = -(-routing_words(self.shape) // 4) * 4 + 4
        params = TensorRef("params", param_words(self.n_rows))
        return RoutedRows(
            TensorRef("routing", self.n_rows * row_words), row_words, self.shape, params
        )

    @cached_property
    def chosen(self) -> NDArray[np.uint32]:
        """Return the ids [n_rows, n_used]."""
        if self.ids is not None:
            return self.ids
        shape, rng = self.shape, np.random.default_rng([self.seed, self.n_rows])
        keys = rng.random((self.n_rows, shape.n_experts)) * np.arange(1, shape.n_experts + 1)
        return np.argsort(keys, axis=1)[:, : shape.n_used].astype(np.uint32)

    @cached_property
    def weights(self) -> NDArray[np.float32]:
        """Draw weights [n_rows, n_used + 1]; the last one is a shared expert's."""
        rng = np.random.default_rng([self.seed, self.n_rows, 1])
        return rng.uniform(-1.0, 1.0, (self.n_rows, self.shape.n_used + 1)).astype(np.float32)

    @property
    def wants(self) -> tuple[bool, ...]:
        """Say which rows in use want logits: every third one."""
        return tuple(row % 3 == 1 for row in range(self.n_used_rows))

    def taken(self, picks: bool) -> NDArray[np.intp]:
        """List the rows that take part: those in use, or those of them that want logits."""
        return np.flatnonzero(self.wants) if picks else np.arange(self.n_used_rows)

    def words(self) -> Words:
        """Make the words of the routing; those that are no id and no weight are SENTINEL."""
        n_used = self.shape.n_used
        words = np.full((self.n_rows, self.routed.row_words), SENTINEL, np.uint32)
        words[:, :n_used] = self.chosen
        words[:, n_used : 2 * n_used] = self.weights[:, :n_used].view(np.uint32)
        if self.shape.shared_gate:
            words[:, shared_weight_word(n_used)] = self.weights[:, n_used].view(np.uint32)
        return words

    def params(self, table: int = 0) -> Words:
        words, n = np.zeros(self.routed.params.n_words, np.uint32), self.n_used_rows
        batch = TokenBatch((0,) * n, tuple(range(n)), (0,) * n, self.wants, "prompt")
        pack_params(words.data, batch, table, serial=1)
        return words


@dataclass(frozen=True)
class TilesCase(KernelCase):
    """Checks expert_tiles on experts of which some are nowhere, some done, some at home.

    A second run has the table that the first lacked: it takes up the rest. `clears` runs clear_done
    before, so that the experts that were marked take part too. `brings`: those at home are brought.
    `picks`: rows that want logits take part alone.
    """

    tuning: Tuning
    rows: RowsInUse
    columns: int
    absent: float = 0.2  # share of experts that are nowhere, and as many again that are done
    clears: bool = False
    brings: bool = False
    picks: bool = False

    def prepare(self, runner: Runner) -> Prepared:
        routed, places = self.rows.routed, self._places
        tiles, program = PairTiles(routed, self.columns), Program("expert_tiles")
        n_experts = self.rows.shape.n_experts
        rng = np.random.default_rng([n_experts, self.columns])
        entries = rng.integers(1, 1 << 56, (2, N_LAYERS, n_experts), np.uint64) << np.uint64(8)
        entries |= rng.integers(0, 2, entries.shape, np.uint64) * AT_HOME
        state = rng.random(n_experts)
        present = np.array([state >= self.absent, state < self.absent])
        entries[:, LAYER][~present] = 0
        done = (state >= self.absent) & (state < 2 * self.absent)
        address = runner.place(entries)
        table, op = memory_range(address, entries.nbytes), OpContext(program, self.tuning, "tiles")
        if self.clears:
            clear_done(op, tiles)
        expert_tiles(op, tiles, LAYER, table, places, self.picks)
        runs = []
        for version in (0, 1):
            inputs = {
                routed.tensor: self.rows.words(),
                routed.params: self.rows.params(address + version * entries[0].nbytes),
                tiles.done: done.astype(np.uint32),
            }
            before = np.zeros_like(done) if self.clears else done
            wanted = self._twin(entries[version, LAYER], before)
            runs.append((inputs, partial(self._compare, wanted, entries[version, LAYER])))
            done = wanted.done
        outputs = (tiles.tiles, tiles.sorted_pairs, tiles.done, tiles.brought)
        return Prepared(program, outputs, runs)

    @property
    def _places(self) -> BroughtPlaces | None:
        if not self.brings:
            return None
        n_experts = self.rows.shape.n_experts
        return BroughtPlaces(FIRST_PLACE, PLACE_BYTES, -(-n_experts // 11), n_experts)

    def _twin(self, entries: NDArray[np.uint64], done: NDArray[np.bool_]) -> twins.Sorted:
        rows = self.rows.taken(self.picks)
        n_places = self._places.n_places if self._places else 0
        at_home, present = entries & AT_HOME != 0, entries != 0
        used, columns = self.rows.chosen[rows], self.columns
        found = twins.expert_tiles(used, present, done, columns, at_home, n_places)
        numbered, ranks = np.divmod(found.pairs, self.rows.shape.n_used)
        return found._replace(pairs=rows[numbered] * self.rows.shape.n_used + ranks)

    def _compare(
        self,
        wanted: twins.Sorted,
        entries: NDArray[np.uint64],
        checks: Checks,
        words: Sequence[Words],
    ) -> None:
        tiles, pairs, marks, brought = words
        n_tiles, n_pairs = len(wanted.tiles), len(wanted.pairs)
        ends = [TILE_HEADER_WORDS, TILE_HEADER_WORDS + TILE_WORDS * n_tiles]
        header, listed, rest = np.split(tiles, ends)
        n_starts = len(wanted.round_starts)
        checks.equal("rounds", header[:n_starts].astype(np.int64), wanted.round_starts)
        checks.untouched("header behind the rounds", header[n_starts:])
        listed = np.ascontiguousarray(listed.reshape(-1, TILE_WORDS))
        spans = entries & ~AT_HOME
        if places := self._places:
            ways = np.zeros((len(entries) + places.n_places, 2), np.uint64)
            rounds, index = np.divmod(np.arange(len(wanted.brought)), wanted.n_each)
            at = rounds * places.n_places + index
            ways[at, 0] = spans[wanted.brought]
            spans[wanted.brought] = (
                places.address + at % (N_HALVES * places.n_places) * places.place_bytes
            )
            ways[at, 1] = spans[wanted.brought]
            of_ranks, behind = np.split(brought, [4 * len(ways)])
            checks.equal("brought", of_ranks.view(np.uint64).reshape(-1, 2), ways)
            checks.untouched("brought behind the last rank", behind)
        else:
            checks.untouched("brought", brought)
        checks.equal("tiles", listed[:, 2:].astype(np.int64), wanted.tiles[:, 1:])
        found = listed[:, :2].copy().view(np.uint64)[:, 0]
        checks.equal("spans of tiles", found, spans[wanted.tiles[:, 0]])
        checks.untouched("tiles behind the last", rest)
        checks.equal("pairs", pairs[:n_pairs].astype(np.int64), wanted.pairs)
        checks.untouched("pairs behind the last", pairs[n_pairs:])
        checks.equal("done", marks, wanted.done.astype(np.uint32))


@dataclass(frozen=True)
class BringCase(KernelCase):
    """Checks bring_experts in a round of which all places but `idle` get an expert.

    Of each span the last `part_bytes` are copied, or all. The next round's experts are named too,
    and stay where they are.
    """

    tuning: Tuning
    span_bytes: int
    n_experts: int
    n_places: int
    round_index: int = 1
    idle: int = 0
    part_bytes: int = 0

    def prepare(self, runner: Runner) -> Prepared:
        rng = np.random.default_rng([self.span_bytes, self.n_experts])
        place_bytes = -(-self.span_bytes // 256) * 256 + 256
        homes = rng.integers(0, 256, (self.n_experts, place_bytes), np.uint8)
        n_places = N_HALVES * self.n_places
        before = rng.integers(0, 256, (n_places, place_bytes), np.uint8)
        from_, to = runner.place(homes), runner.place(before)
        places = BroughtPlaces(to, place_bytes, self.n_places, self.n_experts)
        ids = np.random.default_rng(1).permutation(self.n_experts)
        first = (self.round_index - 1) * places.n_places
        last = min(first + places.n_places - self.idle, self.n_experts)
        routed = RowsInUse(RouterShape(self.n_experts, 1), 1, 1).routed
        tiles, program = PairTiles(routed, columns=1), Program("bring_experts")
        ways = np.zeros((tiles.brought.n_words // 4, 2), np.uint64)
        for rank, expert in enumerate(ids):
            if not last <= rank < first + places.n_places:
                place = to + rank % n_places * place_bytes
                ways[rank] = from_ + int(expert) * place_bytes, place
        part = slice(self.span_bytes - (self.part_bytes or self.span_bytes), self.span_bytes)
        brought = {int(ids[rank]): rank % n_places for rank in range(first, last)}
        wanted = twins.bring_experts(homes, before, brought, part)
        op = OpContext(program, self.tuning, "bring")
        memory = (memory_range(from_, homes.nbytes),)
        bring_experts(op, tiles, places, self.round_index, part, memory)

        def compare(checks: Checks, words: Sequence[Words]) -> None:
            found = runner.fetch(to, before.size).reshape(before.shape)
            checks.equal("places", found, wanted)
            checks.equal("homes", runner.fetch(from_, homes.size).reshape(homes.shape), homes)

        inputs = {tiles.brought: ways}
        return Prepared(program, (), [(inputs, compare)])


@dataclass(frozen=True)
class CombineCase(KernelCase):
    """Checks hidden += the weighted sum of what experts gave, and of a shared one if it is there.

    `shared` None: there is none; else whether its weight is routed. Experts that no row in use
    chose are not done; `partial`: nor is every third id, which gave NaN. `picks`: rows that want
    logits alone, and what those chose is done. Unless it `adds`, hidden was NaN.
    """

    tuning: Tuning
    rows: RowsInUse
    width: int
    shared: bool | None = None
    partial: bool = False
    picks: bool = False
    adds: bool = True

    def prepare(self, runner: Runner) -> Prepared:
        routed, width, n_rows = self.rows.routed, self.width, self.rows.n_rows
        rng = np.random.default_rng([width, n_rows])
        hidden, expert_out, shared = (
            rng.standard_normal((n, width), np.float32) for n in (n_rows, routed.n_pairs, n_rows)
        )
        hidden[:] = hidden if self.adds else np.nan
        hidden_ref = TensorRef("hidden", hidden.size + 4)
        out_ref = TensorRef("expert_out", expert_out.size)
        shared_ref = TensorRef("shared_out", shared.size)
        program = Program("combine_rows")
        rows = None if self.shared is None else SharedRows(shared_ref, self.shared)
        op = OpContext(program, self.tuning, "combine", n_rows=n_rows)
        tiles = PairTiles(routed, columns=1)
        how = Combining(self.partial, self.picks, self.adds)
        combine_rows(op, tiles, out_ref, hidden_ref, how, rows)
        done = np.zeros(tiles.done.n_words, np.uint32)
        done[self.rows.chosen[self.rows.taken(self.picks)]] = 1
        if self.partial:
            done[::3] = 0
            expert_out[self._elsewhere.reshape(-1)] = np.nan
        inputs = {
            tiles.done: done,
            **{routed.tensor: self.rows.words(), routed.params: self.rows.params()},
            **{hidden_ref: hidden, out_ref: expert_out, shared_ref: shared},
        }
        compare = partial(self._compare, hidden, expert_out.reshape(n_rows, -1, width), shared)
        return Prepared(program, (hidden_ref,), [(inputs, compare)])

    @property
    def _elsewhere(self) -> NDArray[np.bool_]:
        """Mark the pairs that are left out, [n_rows, n_used]."""
        elsewhere: NDArray[np.bool_] = (self.rows.chosen % 3 == 0) & self.partial
        return elsewhere

    def _compare(
        self,
        hidden: NDArray[np.float32],
        expert_out: NDArray[np.float32],
        shared: NDArray[np.float32],
        checks: Checks,
        words: Sequence[Words],
    ) -> None:
        rows, n_used = self.rows.taken(self.picks), self.rows.shape.n_used
        found = words[0][:-4].view(np.float32).reshape(hidden.shape)
        weights, gate = self.rows.weights[rows, :n_used], self.rows.weights[rows, n_used]
        if not self.shared:
            gate = np.full(len(rows), 0.0 if self.shared is None else 1.0, np.float32)
        expert_out = np.where(self._elsewhere[..., None], np.float32(0.0), expert_out)
        before = hidden[rows] if self.adds else np.zeros_like(hidden[rows])
        given = [before, expert_out[rows], weights, shared[rows], gate]
        wanted = twins.combine_rows(*given)
        magnitude = twins.combine_rows(*map(np.abs, given))
        checks.close("rows", found[rows], wanted, magnitude)
        others = np.setdiff1d(np.arange(len(hidden)), rows)
        unchanged = found[others].view(np.uint32), hidden[others].view(np.uint32)
        checks.equal("rows that take no part", *unchanged)
        checks.untouched("words behind the last row", words[0][-4:])


# ----- what is compared -----


def _expert_tiles(setting: Setting) -> Iterator[Trial]:
    rows = RowsInUse(RouterShape(60, 4), 77, 71)
    cases = [TilesCase(setting.tuning, rows, columns=8, clears=clears) for clears in (False, True)]
    cases.append(TilesCase(setting.tuning, rows, columns=8, picks=True))
    if setting.tuning.layout == "planes":  # a CPU reads experts where they are
        cases += [replace(case, brings=True) for case in (cases[0], cases[-1])]
    yield trial(*cases)


def _bring_experts(setting: Setting) -> Iterator[Trial]:
    n_bytes = 2 * COPIED_BYTES + 16 * 67
    yield trial(*(BringCase(setting.tuning, n_bytes, 8, 3, index, 1) for index in (1, 2)))


def _combine_rows(setting: Setting) -> Iterator[Trial]:
    gated, tuning = RouterShape(60, 4, shared_gate=True), setting.tuning
    few = RowsInUse(gated, 5, 3)
    cases = [CombineCase(tuning, few, 300, use) for use in (None, False, True)]
    cases.append(CombineCase(tuning, few, 300, True, partial=True))
    cases += [CombineCase(tuning, few, 300, True, partial, picks=True) for partial in (False, True)]
    cases += [CombineCase(tuning, few, 300, use, adds=False) for use in (None, True)]
    cases.append(CombineCase(tuning, few, 300, True, partial=True, picks=True, adds=False))
    yield trial(*cases)


# ----- what a model uses -----


def _expert_tiles_probe(used: Used) -> TilesCase:
    """Compare what clears too: both are of one pipeline."""
    numbers = used.numbers
    rows = RowsInUse(RouterShape(numbers["n_experts"], numbers["n_used"]), 77, 71)
    brings, picks = numbers["n_places"] != 0, numbers["picks"] != 0
    columns = numbers["tile_columns"]
    return TilesCase(used.tuning, rows, columns, clears=True, brings=brings, picks=picks)


def _bring_experts_probe(used: Used) -> BringCase:
    return BringCase(used.tuning, 2 * COPIED_BYTES + 16 * 67, 8, 3, 1, 1)


def _combine_rows_probe(used: Used) -> CombineCase:
    numbers, n_used = used.numbers, used.numbers["n_used"]
    rows = RowsInUse(RouterShape(4 * n_used, n_used, shared_gate=True), 5, 3)
    gated = numbers["weight_word"] != NO_WORD if numbers["shared"] else None
    how = (numbers[name] != 0 for name in ("partial", "picks", "adds"))
    return CombineCase(used.tuning, rows, 4 * numbers["row_vec4s"], gated, *how)


# ----- what is measured -----


PROMPT_ROWS, TILE_COLUMNS = (128, 512), 32


def _bring_experts_works(setup: Setup) -> Iterator[Work]:
    span, n_experts = setup.shapes.span_bytes, setup.shapes.router.n_experts
    n_places = places_of_round(n_experts, span)
    case = BringCase(setup.tuning, span, n_places, n_places)
    yield Work(f"bring {n_places} x {span} bytes", n_places * span, case.run)


def _expert_tiles_works(setup: Setup) -> Iterator[Work]:
    router = setup.shapes.router
    for rows in _prompts_of_model(setup):
        case = TilesCase(setup.tuning, rows, TILE_COLUMNS, absent=0.0)
        n_pairs = rows.routed.n_pairs
        yield Work(f"sort {n_pairs} pairs by {router.n_experts} experts", 8 * n_pairs, case.run)


def _combine_rows_works(setup: Setup) -> Iterator[Work]:
    width = setup.shapes.width
    for rows in _prompts_of_model(setup):
        shared = rows.shape.shared_gate if setup.shapes.experts.shared_width else None
        case = CombineCase(setup.tuning, rows, width, shared)
        n_read = rows.routed.n_pairs + (1 if shared is None else 2) * rows.n_rows
        what = f"sums of {rows.n_rows} rows, {rows.shape.n_used} experts each"
        yield Work(what, 4 * width * n_read, case.run)


def _prompts_of_model(setup: Setup) -> Iterator[RowsInUse]:
    for n_rows in (1, 5) if setup.shapes is TINY else PROMPT_ROWS:
        yield RowsInUse(setup.shapes.router, n_rows, n_rows)


FAMILIES = {
    "expert_tiles": Family(_expert_tiles, _expert_tiles_works, probe=_expert_tiles_probe),
    "bring_experts": Family(_bring_experts, _bring_experts_works, probe=_bring_experts_probe),
    "combine_rows": Family(_combine_rows, _combine_rows_works, probe=_combine_rows_probe),
}
