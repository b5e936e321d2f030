"""Compares append_rows, append_latent_rows and prompt_attention with their twins, batch by batch.

Rows of a cache that were never written are poisoned, and so are the inert rows of a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import TokenBatch
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import Runner
from vkmoe.gpu.token_io import pack_params, param_words
from vkmoe.ops.attention import KvCache, LatentCache, LatentQkv
from vkmoe.ops.attention_shapes import AttentionShape, LatentShape
from vkmoe.ops.context import OpContext
from vkmoe.ops.prompt_attention import (
    PromptTensors,
    append_latent_rows,
    append_rows,
    choose_tiling,
    latent_prompt_attention,
    prompt_attention,
)
from vkmoe.ops.tuning import Tuning
from vkmoe.reference import prompt_attention as twins
from vkmoe.reference.attention import AttentionInputs, LatentInputs
from vkmoe.reference.kv_cache import CacheShape, KvRows, rounding_step
from vkmoe.selftest.comparison import Checks, Inputs, Words

__all__ = ["GroupedPrompts", "LatentPrompts", "PromptBatch", "Prompts", "prompts"]

Floats = NDArray[np.floating]
Singles = NDArray[np.float32]
POISON = 0xFF  # bytes of cache rows that were never written: NaN in all types
NOTHING = slice(0)
GAP = 8  # words of something else behind a row of a tensor, and in front of what is in it


class PromptBatch(NamedTuple):
    """Holds rows of prompts: where they stand, and all that a kernel is given of them."""

    positions: Sequence[int]
    sequences: Sequence[int]
    raw: Singles  # [n_rows, raw_words]

    def part(self, rows: Sequence[int] | range) -> PromptBatch:
        """Return some of the rows, in an order of their own."""
        places = [(self.positions[row], self.sequences[row]) for row in rows]
        positions, sequences = zip(*places, strict=True)
        return PromptBatch(positions, sequences, self.raw[list(rows)])

    def params(self, n_rows: int) -> Words:
        """Make the parameters of a program that has `n_rows` rows."""
        words, unused = np.zeros(param_words(n_rows), np.uint32), (0,) * len(self.positions)
        positions, sequences = tuple(self.positions), tuple(self.sequences)
        batch = TokenBatch(unused, positions, sequences, (False,) * len(unused), "prompt")
        pack_params(words.data, batch, 0, 0)
        return words


class _Cache(NamedTuple):
    """Holds what a cache on the device must hold."""

    name: str
    address: int
    rows: KvRows


class Prompts(ABC):
    """Runs batches over caches on the device, and keeps what they append in copies of the caches.

    The program has `n_rows` rows; its batches have as many or fewer.
    """

    n_regions = 2

    def __init__(
        self, runner: Runner, shape: AttentionShape | LatentShape, tuning: Tuning, n_rows: int
    ) -> None:
        self._runner, self._shape, self._n_rows = runner, shape, n_rows
        self._rng = np.random.default_rng(0)
        self._tiling, self.caches = choose_tiling(shape, tuning), list[_Cache]()
        self._program = Program("prompt attention")
        self._op = OpContext(self._program, tuning, "prompt", n_rows=n_rows)
        self._params = TensorRef(f"params of {n_rows}", param_words(n_rows))
        self._out = self._rows("out", shape.n_heads * shape.value_dim + GAP)
        self._tensors = PromptTensors(self._params, self._out)

    @property
    @abstractmethod
    def _turned(self) -> tuple[TensorRef, slice]:
        """Return the tensor whose queries are turned in place, and its words in a batch's raw."""

    @property
    @abstractmethod
    def _is_turned(self) -> NDArray[np.bool_]:
        """Mark the words of a row of that tensor that are turned."""

    @abstractmethod
    def _inputs(self, raw: Singles) -> Inputs:
        """Name the tensors of some rows."""

    @abstractmethod
    def _append_twin(self, raw: Singles, position: int) -> twins.Appended:
        """Compute what a row leaves."""

    @abstractmethod
    def _queries(self, raw: Singles, appended: twins.Appended) -> Floats:
        """Return a row's queries [n_heads, row_dim], not scaled."""

    def draw(self, positions: Sequence[int], sequences: Sequence[int] = ()) -> PromptBatch:
        """Draw random rows at some positions; without sequences all are of region 0."""
        n_words = sum(ref.row_words for ref in self._inputs(np.zeros((1, 0), np.float32)))
        raw = self._rng.normal(0, 1, (len(positions), n_words)).astype(np.float32)
        return PromptBatch(positions, sequences or [0] * len(positions), raw)

    def outputs(self, batch: PromptBatch) -> Singles:
        """Run a batch and compare nothing; returns [n_rows, n_heads * value_dim]."""
        inputs = {**self._inputs(batch.raw), self._params: batch.params(self._n_rows)}
        (out,) = self._runner.run(self._program, inputs, self._out)
        return self._split(out, len(batch.raw))[0]

    def step(self, batch: PromptBatch, checks: Checks) -> Singles:
        """Run a batch, check all it left behind, keep what it appended; returns as `outputs`."""
        inputs = {**self._inputs(batch.raw), self._params: batch.params(self._n_rows)}
        turned, out = self._runner.run(self._program, inputs, self._turned[0], self._out)
        rows = zip(batch.raw, batch.positions, strict=True)
        appended = [self._append_twin(raw, position) for raw, position in rows]
        self._compare_queries(checks, turned, batch, appended)
        self._compare_caches(checks, batch, appended)
        left, untouched = self._split(out, len(batch.raw))
        checks.untouched("words beyond the rows of out", untouched)
        wanted, largest = self._out_twin(batch, appended)
        checks.close("out", left, wanted.reshape(left.shape), largest, 2e-5)
        return left

    def _rows(self, name: str, row_words: int) -> TensorRef:
        return TensorRef(f"{name} of {self._n_rows}", self._n_rows * row_words, self._n_rows)

    def _place_caches(self, names: str, n_kv_heads: int, filled: slice) -> list[int]:
        """Make caches of which only some positions have been written; returns addresses."""
        context, row_dim = self._shape.context, self._shape.row_dim
        shape, n_filled = (
            CacheShape(self.n_regions, n_kv_heads, context, row_dim),
            len(range(context)[filled]),
        )
        for name, kv_type in zip(names, self._shape.kv_types, strict=False):
            rows = KvRows(kv_type, shape, POISON)
            drawn = self._rng.normal(0, 1, (self.n_regions, n_kv_heads, n_filled, row_dim))
            rows.write(np.s_[:, :, filled], drawn)
            self.caches.append(_Cache(name, self._runner.place(rows.data), rows))
        return [cache.address for cache in self.caches]

    def _place_rotations(self, dim: int) -> int:
        angles = self._rng.uniform(-np.pi, np.pi, (self._shape.context, dim // 2))
        rope = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
        self._rope: Singles = rope.astype(np.float32)
        return self._runner.place(self._rope)

    def _split(self, out: Words, n_rows: int) -> tuple[Singles, Words]:
        """Split the words of `out` into what a batch leaves and what it must not touch."""
        words, width = out.reshape(self._n_rows, -1), self._out.row_words - GAP
        left = np.ascontiguousarray(words[:n_rows, :width]).view(np.float32)
        return left, np.concatenate([words[:n_rows, width:].ravel(), words[n_rows:].ravel()])

    def _compare_queries(
        self, checks: Checks, words: Words, batch: PromptBatch, appended: Sequence[twins.Appended]
    ) -> None:
        n_rows, is_turned = len(batch.raw), self._is_turned
        found = words.reshape(self._n_rows, -1)
        given = np.ascontiguousarray(batch.raw[:, self._turned[1]]).view(np.uint32)
        checks.equal("words beside the queries", found[:n_rows, ~is_turned], given[:, ~is_turned])
        checks.untouched("queries of inert rows", found[n_rows:])
        wanted = np.array([twin.queries.ravel() for twin in appended])
        left = np.ascontiguousarray(found[:n_rows, is_turned]).view(np.float32)
        checks.close("turned queries", left, wanted, 0.2 + np.abs(wanted))

    def _compare_caches(
        self, checks: Checks, batch: PromptBatch, appended: Sequence[twins.Appended]
    ) -> None:
        for i, (name, address, rows) in enumerate(self.caches):
            data = self._runner.fetch(address, rows.data.nbytes)
            left = KvRows(rows.kv_type, rows.shape, data)
            # Values are only rounded; keys and latent rows are normed and rotated before.
            values, limit = left.values(), 0.0 if name == "V" else 1.0
            for row, twin in enumerate(appended):
                place = (batch.sequences[row], slice(None), batch.positions[row])
                wanted = twin.cached[i].reshape(values[place].shape)
                allowed = rounding_step(wanted, rows.kv_type) + 1e-5 * (0.2 + np.abs(wanted))
                what = f"appended row of the {name} cache"
                checks.close(what, values[place], wanted, allowed, limit)
                rows.take(left, place)
            checks.equal(f"the other rows of the {name} cache", left.data, rows.data)

    def _out_twin(
        self, batch: PromptBatch, appended: Sequence[twins.Appended]
    ) -> tuple[Floats, float]:
        """Compute the outputs over the rows that were appended, and the largest value seen."""
        rows = zip(batch.raw, appended, strict=True)
        queries = self._shape.scale * np.array([self._queries(*row) for row in rows])
        all_keys, all_values = self.caches[0].rows.values(), self.caches[-1].rows.values()
        keys = [all_keys[sequence] for sequence in batch.sequences]
        width = self._shape.value_dim
        values = [all_values[sequence][..., :width] for sequence in batch.sequences]
        sinks, window = self._sinks, self._shape.window
        wanted = twins.prompt_attention(queries, keys, values, batch.positions, window, sinks)
        return wanted, float(np.nanmax(np.abs(np.array(values).astype(np.float64))))

    _sinks: Singles | None = None


class GroupedPrompts(Prompts):
    """Checks prompts of grouped heads; positions `filled` of all regions are random at first."""

    def __init__(
        self,
        runner: Runner,
        shape: AttentionShape,
        tuning: Tuning,
        n_rows: int,
        filled: slice = NOTHING,
        sinks: Singles | None = None,
    ) -> None:
        """Fill the caches; `sinks` [n_heads] in place of random ones, where the shape has sinks."""
        super().__init__(runner, shape, tuning, n_rows)
        self.shape = shape
        keys, values = self._place_caches("KV", shape.n_kv_heads, filled)
        rope = self._place_rotations(shape.rotary_dim)
        self._q_gain, self._k_gain = self._gain(shape.n_heads), self._gain(shape.n_kv_heads)
        drawn = self._rng.normal(0, 2, shape.n_heads).astype(np.float32)
        self._sinks = (drawn if sinks is None else sinks) if shape.sinks else None
        others = (self._q_gain, self._k_gain, self._sinks)
        q_gain, k_gain, placed_sinks = (0 if v is None else runner.place(v) for v in others)
        cache = KvCache(keys, values, rope, q_gain, k_gain, placed_sinks, self.n_regions)
        self._qkv = self._rows("qkv", shape.qkv_width + GAP)
        append_rows(self._op, shape, cache, self._qkv, self._params)
        prompt_attention(self._op, shape, self._tiling, cache, self._qkv, self._tensors)

    @property
    def _turned(self) -> tuple[TensorRef, slice]:
        return self._qkv, slice(None)

    @property
    def _is_turned(self) -> NDArray[np.bool_]:
        return np.arange(self._qkv.row_words) < self.shape.n_heads * self.shape.head_dim

    def _inputs(self, raw: Singles) -> Inputs:
        return {self._qkv: raw}

    def _append_twin(self, raw: Singles, position: int) -> twins.Appended:
        shape = self.shape
        heads = raw[: shape.qkv_width].reshape(-1, shape.head_dim)
        q, k, v = np.split(heads, [shape.n_heads, shape.n_heads + shape.n_kv_heads])
        inputs = AttentionInputs(
            *(q, k, v, self._q_gain, self._k_gain),
            *(self._rope, shape.rope_style, shape.eps, shape.scale, shape.kv_types),
        )
        return twins.append_row(inputs, position)

    def _queries(self, raw: Singles, appended: twins.Appended) -> Floats:
        return appended.queries

    def _gain(self, n_heads: int) -> Singles | None:
        if self.shape.norm == "none":
            return None
        gain = self._rng.uniform(0.5, 1.5, (n_heads, self.shape.head_dim)).astype(np.float32)
        return gain if self.shape.norm == "full_width" else gain[0]


class LatentPrompts(Prompts):
    """Checks prompts of latent attention; positions `filled` of all regions are random at first."""

    def __init__(
        self,
        runner: Runner,
        shape: LatentShape,
        tuning: Tuning,
        n_rows: int,
        filled: slice = NOTHING,
    ) -> None:
        super().__init__(runner, shape, tuning, n_rows)
        self.shape = shape
        (rows,) = self._place_caches("C", 1, filled)
        rope = self._place_rotations(shape.rope_dim)
        self._gain = self._rng.uniform(0.5, 1.5, shape.kv_rank).astype(np.float32)
        cache = LatentCache(rows, rope, runner.place(self._gain), self.n_regions)
        self._absorbed = self._rows("absorbed", shape.n_heads * shape.kv_rank + GAP)
        # One tensor for q and kv, as where one matrix product makes both.
        self._kv_offset = GAP + shape.q_width + GAP
        self._raw = self._rows("q_kv", self._kv_offset + shape.row_dim)
        qkv = LatentQkv(self._absorbed, self._raw, self._raw, GAP, self._kv_offset)
        append_latent_rows(self._op, shape, cache, qkv, self._params)
        latent_prompt_attention(self._op, shape, self._tiling, cache, qkv, self._tensors)

    @property
    def _turned(self) -> tuple[TensorRef, slice]:
        return self._raw, slice(self._absorbed.row_words, None)

    @property
    def _is_turned(self) -> NDArray[np.bool_]:
        mask = np.zeros(self._raw.row_words, np.bool_)
        q = mask[GAP : GAP + self.shape.q_width].reshape(self.shape.n_heads, -1)
        q[:, self.shape.nope_dim :] = True
        return mask

    def _inputs(self, raw: Singles) -> Inputs:
        absorbed, rest = np.split(raw, [self._absorbed.row_words], axis=1)
        return {self._absorbed: absorbed, self._raw: rest}

    def _append_twin(self, raw: Singles, position: int) -> twins.Appended:
        shape, rest = self.shape, raw[self._absorbed.row_words :]
        q = rest[GAP : GAP + shape.q_width].reshape(shape.n_heads, -1)
        inputs = LatentInputs(
            absorbed=self._absorbed_of(raw),
            q_rope=q[:, shape.nope_dim :],
            kv=rest[self._kv_offset :],
            gain=self._gain,
            rope=self._rope,
            rope_style=shape.rope_style,
            eps=shape.eps,
            scale=shape.scale,
            kv_type=shape.kv_type,
        )
        return twins.append_latent_row(inputs, position)

    def _queries(self, raw: Singles, appended: twins.Appended) -> Floats:
        return np.hstack([self._absorbed_of(raw), appended.queries])

    def _absorbed_of(self, raw: Singles) -> Singles:
        return raw[: self.shape.n_heads * self.shape.kv_rank].reshape(self.shape.n_heads, -1)


def prompts(
    runner: Runner,
    shape: AttentionShape | LatentShape,
    tuning: Tuning,
    n_rows: int,
    filled: slice = NOTHING,
) -> Prompts:
    """Make the case of a shape's kind."""
    if isinstance(shape, LatentShape):
        return LatentPrompts(runner, shape, tuning, n_rows, filled)
    return GroupedPrompts(runner, shape, tuning, n_rows, filled)
