"""Compares attention, latent_attention and attention_combine with their twins, token after token.

Rows of a cache that were never written, and those outside a window, are poisoned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.choices import KvType
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import Runner
from vkmoe.kv_types import both
from vkmoe.ops.attention import (
    AttentionTensors,
    KvCache,
    LatentCache,
    LatentQkv,
    attention,
    latent_attention,
)
from vkmoe.ops.attention_shapes import AttentionShape, AttentionSplit, LatentShape
from vkmoe.ops.context import OpContext
from vkmoe.ops.tuning import choose_tuning
from vkmoe.reference import attention as twins
from vkmoe.reference.kv_cache import CacheShape, KvRows, rounding_step
from vkmoe.selftest.comparison import Checks, Inputs, Words
from vkmoe.selftest.inputs import PARAMS, params_words

__all__ = ["AttentionCase", "LatentCase", "deepseek2_shape", "gpt_oss_shape", "qwen3_shape"]

Floats = NDArray[np.floating]
Wide = NDArray[np.float64]
Token = NDArray[np.float32]
Q_OFFSET, KV_OFFSET = 3, 5  # words of something else before both
POISON = 0xFF  # bytes of cache rows that were never written: NaN in all types

QWEN3 = AttentionShape(
    n_heads=8,
    n_kv_heads=2,
    head_dim=64,
    rotary_dim=64,
    context=200,
    rope_style="neox",
    norm="per_head",
    eps=1e-6,
    scale=64**-0.5,
    kv_types=both("f16"),
)
DEEPSEEK2 = LatentShape(
    n_heads=8,
    kv_rank=64,
    rope_dim=32,
    nope_dim=24,
    context=200,
    eps=1e-6,
    scale=56**-0.5,
    kv_type="f16",
)


def qwen3_shape(**changes: object) -> AttentionShape:
    """Make small grouped heads with the norms and rotation of Qwen3."""
    return replace(QWEN3, **changes)  # type: ignore[arg-type]


def gpt_oss_shape(**changes: object) -> AttentionShape:
    """Make small heads with the window, sinks and rotation of gpt-oss, without norms of q and k."""
    return qwen3_shape(**{"norm": "none", "window": 50, "sinks": True, **changes})


def deepseek2_shape(**changes: object) -> LatentShape:
    """Make a small row with the proportions and rotation of DeepSeek-V2."""
    return replace(DEEPSEEK2, **changes)  # type: ignore[arg-type]


class _Wanted(NamedTuple):
    """Holds what a token must leave: partials, the appended row of each cache, and the output."""

    partials: Wide  # [n_heads, n_splits, value_dim + 2]
    rows: Sequence[Floats]
    out: Wide  # [n_heads, value_dim]
    seen_values: Floats


class _Cache(NamedTuple):
    """Holds what a cache on the device must hold, in its one region."""

    name: str
    address: int
    rows: KvRows

    @property
    def values(self) -> Floats:
        """Decode the rows: [n_kv_heads, context, row_dim]."""
        values: Floats = self.rows.values()[0]
        return values


class _CachedCase(ABC):
    """Runs tokens over caches on the device, and keeps what they append in copies of the caches."""

    def __init__(
        self, runner: Runner, shape: AttentionShape | LatentShape, split: AttentionSplit, seed: int
    ) -> None:
        self._runner, self._context, self.split = runner, shape.context, split
        self._row_dim = shape.row_dim
        self._rng = np.random.default_rng(seed)
        self.partials = TensorRef("partials", split.partials_words(shape))
        self.out = TensorRef("out", shape.n_heads * shape.value_dim)
        self._tensors = AttentionTensors(PARAMS, self.partials, self.out)
        self._program = Program("attention")
        self._op = OpContext(self._program, choose_tuning(runner.device.info), "attention")
        self.caches: list[_Cache] = []

    @abstractmethod
    def token(self) -> Token:
        """Draw all that a kernel is given of a random token."""

    @abstractmethod
    def _inputs(self, token: Token) -> Inputs:
        """Name the tensors of a token."""

    @abstractmethod
    def _twin(self, token: Token, position: int, appended: Sequence[Floats]) -> _Wanted:
        """Compute what a token must leave, where `appended` are the rows that it did append."""

    def run(self, positions: Sequence[int]) -> Checks:
        """Compare one random token at each of the positions, in order."""
        checks = Checks()
        for position in positions:
            self.step(position, self.token(), checks)
        return checks

    def step(self, position: int, token: Token, checks: Checks) -> Token:
        """Run one token, check all it left behind, keep what it appended; returns the output."""
        inputs = {**self._inputs(token), PARAMS: params_words(position)}
        partials, out = self._runner.run(self._program, inputs, self.partials, self.out)
        found = [
            KvRows(rows.kv_type, rows.shape, self._runner.fetch(address, rows.data.nbytes))
            for _, address, rows in self.caches
        ]
        row = min(position, self._context - 1)
        appended = [rows.values()[0, :, row] for rows in found]
        wanted = self._twin(token, position, appended)
        compared = zip(self.caches, found, appended, wanted.rows, strict=True)
        for (name, _, rows), left, left_row, twin in compared:
            # Values are only rounded; keys and latent rows are normed and rotated before.
            allowed = rounding_step(twin, rows.kv_type) + 1e-5 * (0.2 + np.abs(twin))
            limit = 0.0 if name == "V" else 1.0
            checks.close(f"appended row of the {name} cache", left_row, twin, allowed, limit)
            rows.take(left, np.s_[:, :, row])
            checks.equal(f"the other rows of the {name} cache", left.data, rows.data)
        _compare_attended(checks, partials, out, wanted)
        return out.view(np.float32)

    def _place_cache(self, name: str, kv_type: KvType, n_heads: int, filled: slice) -> int:
        """Make a cache of which only the rows `filled` have been written; returns its address."""
        shape = CacheShape(1, n_heads, self._context, self._row_dim)
        rows, n_filled = KvRows(kv_type, shape, POISON), len(range(self._context)[filled])
        drawn = self._rng.normal(0, 1, (1, n_heads, n_filled, self._row_dim))
        rows.write(np.s_[:, :, filled], drawn)
        self.caches.append(_Cache(name, self._runner.place(rows.data), rows))
        return self.caches[-1].address

    def _rotations(self, dim: int) -> NDArray[np.float32]:
        """Draw (cos, sin) of random angles: float32 [context, dim / 2, 2]."""
        angles = self._rng.uniform(-np.pi, np.pi, (self._context, dim // 2))
        return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


class AttentionCase(_CachedCase):
    """Checks grouped attention; cache rows `n_unseen` ... `n_filled` are random, others are NaN."""

    def __init__(
        self,
        runner: Runner,
        shape: AttentionShape,
        split: AttentionSplit,
        n_filled: int,
        n_unseen: int = 0,
        sinks: Floats | None = None,
    ) -> None:
        """Fill the cache; `sinks` [n_heads] in place of random ones, where the shape has sinks."""
        super().__init__(runner, shape, split, seed=0)
        self.shape = shape
        filled = slice(n_unseen, n_filled)
        keys, values = (
            self._place_cache(name, kv_type, shape.n_kv_heads, filled)
            for name, kv_type in zip("KV", shape.kv_types, strict=True)
        )
        self._rope = self._rotations(shape.rotary_dim)
        self._gains = [self._gain(n_heads) for n_heads in (shape.n_heads, shape.n_kv_heads)]
        drawn = self._rng.normal(0, 2, shape.n_heads) if shape.sinks and sinks is None else sinks
        self._sinks = None if drawn is None else drawn.astype(np.float32)
        others = (*self._gains, self._sinks)
        cache = KvCache(
            keys,
            values,
            runner.place(self._rope),
            *(0 if other is None else runner.place(other) for other in others),
        )
        self._qkv = TensorRef("qkv", shape.qkv_width)
        attention(self._op, shape, split, cache, self._qkv, self._tensors)

    def token(self) -> Token:
        """Draw raw q, k and v [qkv_width]."""
        return self._rng.normal(0, 1, self.shape.qkv_width).astype(np.float32)

    def _inputs(self, token: Token) -> Inputs:
        return {self._qkv: token}

    def _twin(self, token: Token, position: int, appended: Sequence[Floats]) -> _Wanted:
        shape = self.shape
        q, k, v = np.split(
            token.reshape(-1, shape.head_dim), [shape.n_heads, shape.n_heads + shape.n_kv_heads]
        )
        q_gain, k_gain = self._gains
        inputs = twins.AttentionInputs(
            q, k, v, q_gain, k_gain, self._rope, shape.rope_style, shape.eps, shape.scale,
            shape.kv_types,
        )  # fmt: skip
        keys, values = (cache.values for cache in self.caches)
        left = twins.attention(
            inputs,
            keys,
            values,
            position,
            self.split.n_splits,
            window=shape.window,
            appended_key=appended[0],
        )
        row = min(position, shape.context - 1)
        out = twins.attention_combine(left.partials, row, shape.window, self._sinks)
        seen = slice(twins.first_seen(row, shape.window), row)
        seen_values = np.concatenate([values[:, seen], appended[1][:, None]], axis=1)
        return _Wanted(left.partials, (left.key, left.value), out, seen_values)

    def _gain(self, n_heads: int) -> NDArray[np.float32] | None:
        if self.shape.norm == "none":
            return None
        gain = self._rng.uniform(0.5, 1.5, (n_heads, self.shape.head_dim)).astype(np.float32)
        return gain if self.shape.norm == "full_width" else gain[0]


class LatentCase(_CachedCase):
    """Checks latent attention; rows below `n_filled` of the cache are random, others are NaN."""

    def __init__(
        self, runner: Runner, shape: LatentShape, split: AttentionSplit, n_filled: int
    ) -> None:
        super().__init__(runner, shape, split, seed=0)
        self.shape = shape
        rows = self._place_cache("latent", shape.kv_type, 1, slice(n_filled))
        self._rope = self._rotations(shape.rope_dim)
        self._gain = self._rng.uniform(0.5, 1.5, shape.kv_rank).astype(np.float32)
        cache = LatentCache(rows, runner.place(self._rope), runner.place(self._gain))
        self._absorbed = TensorRef("absorbed", self.out.n_words)
        # One tensor for q and kv, as where one matrix product makes both.
        kv_offset = Q_OFFSET + shape.q_width + KV_OFFSET
        self._raw = TensorRef("q_kv", kv_offset + shape.row_dim)
        inputs = LatentQkv(self._absorbed, self._raw, self._raw, Q_OFFSET, kv_offset)
        latent_attention(self._op, shape, split, cache, inputs, self._tensors)

    def token(self) -> Token:
        """Draw absorbed queries, and behind them the tensor of raw q and kv."""
        n_words = self._absorbed.n_words + self._raw.n_words
        return self._rng.normal(0, 1, n_words).astype(np.float32)

    def _inputs(self, token: Token) -> Inputs:
        absorbed, raw = np.split(token, [self._absorbed.n_words])
        return {self._absorbed: absorbed, self._raw: raw}

    def _twin(self, token: Token, position: int, appended: Sequence[Floats]) -> _Wanted:
        shape = self.shape
        absorbed, raw = np.split(token, [self._absorbed.n_words])
        q = raw[Q_OFFSET : Q_OFFSET + shape.q_width].reshape(shape.n_heads, -1)
        inputs = twins.LatentInputs(
            absorbed=absorbed.reshape(shape.n_heads, -1),
            q_rope=q[:, shape.nope_dim :],
            kv=raw[-shape.row_dim :],
            gain=self._gain,
            rope=self._rope,
            rope_style=shape.rope_style,
            eps=shape.eps,
            scale=shape.scale,
            kv_type=shape.kv_type,
        )
        rows, (own,) = self.caches[0].values[0], appended[0]
        left = twins.latent_attention(inputs, rows, position, self.split.n_splits, own)
        row = min(position, shape.context - 1)
        seen_values = np.vstack([rows[:row], own])[:, : shape.kv_rank]
        out = twins.attention_combine(left.partials, row)
        return _Wanted(left.partials, (left.row[None],), out, seen_values)


def _compare_attended(checks: Checks, partials: Words, out: Words, twin: _Wanted) -> None:
    """Compare partials and output, by weighted magnitudes."""
    found = partials.view(np.float32).reshape(twin.partials.shape)
    used = ~np.isnan(twin.partials[..., -1])
    unwritten = np.isnan(found[~used])
    checks.equal("unused splits stay unwritten", unwritten, np.ones_like(unwritten))
    found, wanted = found[used], twin.partials[used]
    top, total = wanted[:, -2], wanted[:, -1]
    largest = float(np.abs(twin.seen_values.astype(np.float64)).max())
    checks.close("split maxima", found[:, -2], top, 1.0 + np.abs(top))
    checks.close("split totals", found[:, -1], total, total, 3e-5)
    checks.close("split sums", found[:, :-2], wanted[:, :-2], largest * total[:, None], 3e-5)
    attended = out.view(np.float32).reshape(twin.out.shape)
    checks.close("out", attended, twin.out, largest, 2e-5)
