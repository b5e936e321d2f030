"""Compares expert_tiles and combine_rows with their twins: places exactly, sums within rounding.

Rows that are not in use have ids and weights too, which nothing may look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import TokenBatch
from vkmoe.gpu.program import Program, TensorRef, memory_range
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.gpu.token_io import pack_params, param_words
from vkmoe.ops.context import OpContext
from vkmoe.ops.matmul import TILE_WORDS
from vkmoe.ops.prompt_experts import (
    PairTiles,
    RoutedRows,
    SharedRows,
    clear_done,
    combine_rows,
    expert_tiles,
)
from vkmoe.ops.router import RouterShape, routing_words, shared_weight_word
from vkmoe.ops.tuning import Tuning
from vkmoe.reference import prompt_experts as twins
from vkmoe.reference.logits import AT_HOME
from vkmoe.selftest.comparison import Checks, KernelCase, Prepared, Words

__all__ = ["CombineCase", "RowsInUse", "TilesCase"]

N_LAYERS, LAYER = 3, 1


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
        batch = TokenBatch((0,) * n, tuple(range(n)), (0,) * n, (False,) * n, "prompt")
        pack_params(words.data, batch, table, serial=1)
        return words


@dataclass(frozen=True)
class TilesCase(KernelCase):
    """Checks expert_tiles on experts of which some are nowhere, some done, some at home.

    A second round has the table that the first lacked: it takes up the rest. `clears` runs
    clear_done before, so that the experts that were marked take part too.
    """

    tuning: Tuning
    rows: RowsInUse
    columns: int
    absent: float = 0.2  # share of experts that are nowhere, and as many again that are done
    clears: bool = False

    def prepare(self, runner: Runner) -> Prepared:
        routed = self.rows.routed
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
        expert_tiles(op, tiles, LAYER, table)
        rounds = []
        for version in (0, 1):
            inputs = {
                routed.tensor: self.rows.words(),
                routed.params: self.rows.params(address + version * entries[0].nbytes),
                tiles.done: done.astype(np.uint32),
            }
            before = np.zeros_like(done) if self.clears else done
            rounds.append((inputs, partial(self._compare, present[version], before)))
            done = self._twin(present[version], before).done
        return Prepared(program, (tiles.tiles, tiles.sorted_pairs, tiles.done), rounds)

    def _twin(self, present: NDArray[np.bool_], done: NDArray[np.bool_]) -> twins.Sorted:
        used = self.rows.chosen[: self.rows.n_used_rows]
        return twins.expert_tiles(used, present, done, self.columns)

    def _compare(
        self,
        present: NDArray[np.bool_],
        done: NDArray[np.bool_],
        checks: Checks,
        words: Sequence[Words],
    ) -> None:
        wanted = self._twin(present, done)
        tiles, pairs, marks = words
        n_tiles, n_pairs = len(wanted.tiles), len(wanted.pairs)
        header, listed, rest = np.split(tiles, [TILE_WORDS, TILE_WORDS * (1 + n_tiles)])
        checks.equal("number of tiles", header, np.array([n_tiles, 0, 0, 0]))
        listed = listed.reshape(-1, TILE_WORDS)
        checks.equal("tiles", listed[:, :3].astype(np.int64), wanted.tiles)
        checks.equal("ends of tiles", listed[:, 3], np.zeros(n_tiles, np.uint32))
        checks.untouched("tiles behind the last", rest)
        checks.equal("pairs", pairs[:n_pairs].astype(np.int64), wanted.pairs)
        checks.untouched("pairs behind the last", pairs[n_pairs:])
        checks.equal("done", marks, wanted.done.astype(np.uint32))


@dataclass(frozen=True)
class CombineCase(KernelCase):
    """Checks hidden += the weighted sum of what experts gave, and of a shared one if it is there.

    `shared` None: there is none; else whether its weight is routed. Experts that no row in use
    chose are not done.
    """

    tuning: Tuning
    rows: RowsInUse
    width: int
    shared: bool | None = None

    def prepare(self, runner: Runner) -> Prepared:
        routed, width, n_rows = self.rows.routed, self.width, self.rows.n_rows
        rng = np.random.default_rng([width, n_rows])
        hidden, expert_out, shared = (
            rng.standard_normal((n, width), np.float32) for n in (n_rows, routed.n_pairs, n_rows)
        )
        hidden_ref = TensorRef("hidden", hidden.size + 4)
        out_ref = TensorRef("expert_out", expert_out.size)
        shared_ref = TensorRef("shared_out", shared.size)
        program = Program("combine_rows")
        rows = None if self.shared is None else SharedRows(shared_ref, self.shared)
        op = OpContext(program, self.tuning, "combine", n_rows=n_rows)
        tiles = PairTiles(routed, columns=1)
        combine_rows(op, tiles, out_ref, hidden_ref, width, rows)
        done = np.zeros(tiles.done.n_words, np.uint32)
        done[self.rows.chosen[: self.rows.n_used_rows]] = 1
        inputs = {
            tiles.done: done,
            **{routed.tensor: self.rows.words(), routed.params: self.rows.params()},
            **{hidden_ref: hidden, out_ref: expert_out, shared_ref: shared},
        }
        compare = partial(self._compare, hidden, expert_out.reshape(n_rows, -1, width), shared)
        n_bytes = hidden.nbytes * (2 + (self.shared is not None)) + expert_out.nbytes
        return Prepared(program, (hidden_ref,), [(inputs, compare)], n_bytes)

    def _compare(
        self,
        hidden: NDArray[np.float32],
        expert_out: NDArray[np.float32],
        shared: NDArray[np.float32],
        checks: Checks,
        words: Sequence[Words],
    ) -> None:
        n, n_used = self.rows.n_used_rows, self.rows.shape.n_used
        found = words[0][:-4].view(np.float32).reshape(hidden.shape)
        weights, gate = self.rows.weights[:n, :n_used], self.rows.weights[:n, n_used]
        if not self.shared:
            gate = np.full(n, 0.0 if self.shared is None else 1.0, np.float32)
        wanted = twins.combine_rows(hidden[:n], expert_out[:n], weights, shared[:n], gate)
        size = np.abs
        magnitude = twins.combine_rows(
            size(hidden[:n]), size(expert_out[:n]), size(weights), size(shared[:n]), size(gate)
        )
        checks.close("rows", found[:n], wanted, magnitude)
        checks.equal("rows that are not used", found[n:], hidden[n:])
        checks.untouched("words behind the last row", words[0][-4:])
