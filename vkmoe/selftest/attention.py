"""Compares attention, latent_attention and attention_combine with their twins, token after token.

Rows of a cache that were never written, and those outside a window, are poisoned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import Runner
from vkmoe.ops.attention import (
    AttentionTensors,
    KvCache,
    LatentCache,
    LatentQkv,
    attention,
    latent_attention,
)
from vkmoe.ops.attention_shapes import AttentionShape, AttentionSplit, LatentShape
from vkmoe.reference.attention import AttentionInputs, attention_combine, first_seen
from vkmoe.reference.attention import attention as attention_twin
from vkmoe.reference.latent_attention import LatentInputs
from vkmoe.reference.latent_attention import latent_attention as latent_twin
from vkmoe.selftest.comparison import Checks
from vkmoe.selftest.inputs import PARAMS, params_words

__all__ = ["AttentionCase", "LatentCase", "deepseek2_shape", "gpt_oss_shape", "qwen3_shape"]

Floats = NDArray[np.floating]
Words = NDArray[np.float32]
Q_OFFSET, KV_OFFSET = 3, 5  # words of something else before both
POISON = 0xFF  # bytes of cache rows that were never written: NaN in both types


def qwen3_shape(**changes: object) -> AttentionShape:
    """Make small grouped heads with the norms and rotation of Qwen3."""
    base = AttentionShape(
        n_heads=8,
        n_kv_heads=2,
        head_dim=64,
        rotary_dim=64,
        context=200,
        rope_style="neox",
        norm="per_head",
        eps=1e-6,
        scale=64**-0.5,
        kv_type="F16",
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def gpt_oss_shape(**changes: object) -> AttentionShape:
    """Make small heads with the window, sinks and rotation of gpt-oss, without norms of q and k."""
    return qwen3_shape(**{"norm": "none", "window": 50, "sinks": True, **changes})


def deepseek2_shape(**changes: object) -> LatentShape:
    """Make a small row with the proportions and rotation of DeepSeek-V2."""
    base = LatentShape(
        n_heads=8,
        kv_rank=64,
        rope_dim=32,
        nope_dim=24,
        context=200,
        eps=1e-6,
        scale=56**-0.5,
        kv_type="F16",
    )
    return replace(base, **changes)  # type: ignore[arg-type]


class AttentionCase:
    """Checks grouped attention; cache rows `n_unseen` ... `n_filled` are random, others are NaN."""

    def __init__(
        self,
        runner: Runner,
        shape: AttentionShape,
        split: AttentionSplit,
        n_filled: int,
        seed: int = 0,
        n_unseen: int = 0,
        sinks: Floats | None = None,
    ) -> None:
        """Fill the cache; `sinks` [n_heads] in place of random ones, where the shape has sinks."""
        self.shape, self.split, self._runner = shape, split, runner
        self._rng = np.random.default_rng(seed)
        cache_shape = (shape.n_kv_heads, shape.context, shape.head_dim)
        self.keys, self.values = (_poisoned(cache_shape, shape.kv_type) for _ in range(2))
        for cache in (self.keys, self.values):
            filled = cache[:, n_unseen:n_filled]
            filled[...] = self._rng.normal(0, 1, filled.shape)
        self.rope = _rotations(self._rng, shape.context, shape.rotary_dim)
        self.gains = [self._gain(n_heads) for n_heads in (shape.n_heads, shape.n_kv_heads)]
        drawn = self._rng.normal(0, 2, shape.n_heads) if shape.sinks and sinks is None else sinks
        self.sinks = None if drawn is None else drawn.astype(np.float32)
        self.cache = KvCache(
            runner.place(self.keys),
            runner.place(self.values),
            runner.place(self.rope),
            *(0 if gain is None else runner.place(gain) for gain in (*self.gains, self.sinks)),
        )
        self.qkv = TensorRef("qkv", shape.qkv_width)
        self.partials = TensorRef("partials", split.partials_words(shape))
        self.out = TensorRef("out", shape.n_heads * shape.head_dim)
        self._program = Program("attention")
        attention(
            self._program,
            shape,
            split,
            self.cache,
            self.qkv,
            AttentionTensors(PARAMS, self.partials, self.out),
            "attention",
        )

    def token(self) -> NDArray[np.float32]:
        """Draw raw q, k and v [qkv_width] of a random token."""
        return self._rng.normal(0, 1, self.shape.qkv_width).astype(np.float32)

    def run(self, positions: Sequence[int]) -> Checks:
        """Compare one random token at each of the positions, in order."""
        checks = Checks()
        for position in positions:
            self.step(position, self.token(), checks)
        return checks

    def step(
        self,
        position: int,
        qkv: NDArray[np.float32],
        checks: Checks,
    ) -> NDArray[np.float32]:
        """Run one token, check all it left behind, keep its k and v; returns the output."""
        partials, out = self._runner.run(
            self._program, {self.qkv: qkv, PARAMS: params_words(position)}, self.partials, self.out
        )
        keys, values = self._stored()
        row = min(position, self.shape.context - 1)
        twin = attention_twin(
            self._inputs(qkv),
            *(self.keys, self.values, position, self.split.n_splits),
            window=self.shape.window,
            appended_key=keys[:, row],
        )
        half_step = 2.0**-10 if self.shape.kv_type == "F16" else 0.0
        checks.equal("appended v", values[:, row], twin.value)
        checks.close(
            "appended k",
            keys[:, row],
            twin.key,
            0.2 + np.abs(twin.key.astype(np.float64)),
            half_step + 1e-5,
        )
        self.keys[:, row], self.values[:, row] = keys[:, row], values[:, row]
        checks.equal("the other rows of the K cache", *_bits(keys, self.keys))
        checks.equal("the other rows of the V cache", *_bits(values, self.values))
        seen = self.values[:, first_seen(row, self.shape.window) : row + 1]
        wanted = attention_combine(twin.partials, row, self.shape.window, self.sinks)
        _compare_attended(checks, partials, out, twin.partials, wanted, seen)
        return out.view(np.float32)

    def _inputs(self, qkv: NDArray[np.float32]) -> AttentionInputs:
        shape = self.shape
        q, k, v = np.split(
            qkv.reshape(-1, shape.head_dim), [shape.n_heads, shape.n_heads + shape.n_kv_heads]
        )
        q_gain, k_gain = self.gains
        return AttentionInputs(
            q, k, v, q_gain, k_gain, self.rope, shape.rope_style, shape.eps, shape.scale
        )

    def _stored(self) -> tuple[Floats, Floats]:
        """Read both caches back from the device."""
        keys, values = (
            self._runner.fetch(address, cache.nbytes).view(cache.dtype).reshape(cache.shape)
            for address, cache in ((self.cache.keys, self.keys), (self.cache.values, self.values))
        )
        return keys, values

    def _gain(self, n_heads: int) -> NDArray[np.float32] | None:
        if self.shape.norm == "none":
            return None
        gain = self._rng.uniform(0.5, 1.5, (n_heads, self.shape.head_dim)).astype(np.float32)
        return gain if self.shape.norm == "full_width" else gain[0]


class LatentCase:
    """Checks latent attention; rows below `n_filled` of the cache are random, others poisoned."""

    def __init__(
        self,
        runner: Runner,
        shape: LatentShape,
        split: AttentionSplit,
        n_filled: int,
        seed: int = 0,
    ) -> None:
        self.shape, self.split, self._runner = shape, split, runner
        self._rng = np.random.default_rng(seed)
        self.rows = _poisoned((shape.context, shape.row_dim), shape.kv_type)
        self.rows[:n_filled] = self._rng.normal(0, 1, self.rows[:n_filled].shape)
        self.rope = _rotations(self._rng, shape.context, shape.rope_dim)
        self.gain = self._rng.uniform(0.5, 1.5, shape.kv_rank).astype(np.float32)
        self.cache = LatentCache(*(runner.place(a) for a in (self.rows, self.rope, self.gain)))
        # One tensor for q and kv, as where one matrix product makes both.
        self.absorbed = TensorRef("absorbed", shape.n_heads * shape.kv_rank)
        self.raw = TensorRef("q_kv", Q_OFFSET + shape.q_width + KV_OFFSET + shape.row_dim)
        self.partials = TensorRef("partials", split.partials_words(shape))
        self.out = TensorRef("out", self.absorbed.n_words)
        self._program = Program("latent attention")
        latent_attention(
            self._program,
            shape,
            split,
            self.cache,
            LatentQkv(
                absorbed=self.absorbed,
                q=self.raw,
                kv=self.raw,
                q_offset=Q_OFFSET,
                kv_offset=Q_OFFSET + shape.q_width + KV_OFFSET,
            ),
            AttentionTensors(PARAMS, self.partials, self.out),
            "attention",
        )

    def token(self) -> tuple[Words, Words]:
        """Draw absorbed queries, and the tensor of raw q and kv, of a random token."""
        absorbed, raw = (
            self._rng.normal(0, 1, n).astype(np.float32)
            for n in (self.absorbed.n_words, self.raw.n_words)
        )
        return absorbed, raw

    def run(self, positions: Sequence[int]) -> Checks:
        """Compare one random token at each of the positions, in order."""
        checks = Checks()
        for position in positions:
            self.step(position, self.token(), checks)
        return checks

    def step(self, position: int, token: tuple[Words, Words], checks: Checks) -> Words:
        """Run one token, check all it left behind, keep its row; returns the output."""
        absorbed, raw = token
        inputs = {self.absorbed: absorbed, self.raw: raw, PARAMS: params_words(position)}
        partials, out = self._runner.run(self._program, inputs, self.partials, self.out)
        stored = self._runner.fetch(self.cache.rows, self.rows.nbytes)
        rows = stored.view(self.rows.dtype).reshape(self.rows.shape)
        row = min(position, self.shape.context - 1)
        twin = latent_twin(
            self._inputs(absorbed, raw),
            *(self.rows, position, self.split.n_splits),
            appended_row=rows[row],
        )
        half_step = 2.0**-10 if self.shape.kv_type == "F16" else 0.0
        magnitude = 0.2 + np.abs(twin.row.astype(np.float64))
        checks.close("appended row", rows[row], twin.row, magnitude, half_step + 1e-5)
        self.rows[row] = rows[row]
        checks.equal("the other rows of the cache", *_bits(rows, self.rows))
        wanted = attention_combine(twin.partials, row)
        seen = self.rows[: row + 1, : self.shape.kv_rank]
        _compare_attended(checks, partials, out, twin.partials, wanted, seen)
        return out.view(np.float32)

    def _inputs(self, absorbed: Words, raw: Words) -> LatentInputs:
        shape = self.shape
        q = raw[Q_OFFSET : Q_OFFSET + shape.q_width].reshape(shape.n_heads, -1)
        return LatentInputs(
            absorbed=absorbed.reshape(shape.n_heads, -1),
            q_rope=q[:, shape.nope_dim :],
            kv=raw[-shape.row_dim :],
            gain=self.gain,
            rope=self.rope,
            rope_style=shape.rope_style,
            eps=shape.eps,
            scale=shape.scale,
        )


def _rotations(rng: np.random.Generator, context: int, dim: int) -> NDArray[np.float32]:
    """Draw (cos, sin) of random angles: float32 [context, dim / 2, 2]."""
    angles = rng.uniform(-np.pi, np.pi, (context, dim // 2))
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


def _poisoned(shape: tuple[int, ...], kv_type: str) -> Floats:
    """Make a cache none of whose rows has been written: NaN everywhere."""
    cache: Floats = np.empty(shape, np.float16 if kv_type == "F16" else np.float32)
    cache.view(np.uint8)[...] = POISON
    return cache


def _bits(*arrays: Floats) -> list[NDArray[np.uint8]]:
    """View arrays as bit patterns, so that NaNs can be equal."""
    return [np.ascontiguousarray(array).view(np.uint8) for array in arrays]


def _compare_attended(
    checks: Checks,
    partials: NDArray[np.uint32],
    out: NDArray[np.uint32],
    wanted: NDArray[np.float64],
    wanted_out: NDArray[np.float64],
    seen_values: Floats,
) -> None:
    """Compare partials [n_heads, n_splits, value_dim + 2] and output, by weighted magnitudes."""
    found = partials.view(np.float32).reshape(wanted.shape)
    used = ~np.isnan(wanted[..., -1])
    unwritten = np.isnan(found[~used])
    checks.equal("unused splits stay unwritten", unwritten, np.ones_like(unwritten))
    found, wanted = found[used], wanted[used]
    top, total = wanted[:, -2], wanted[:, -1]
    largest = float(np.abs(seen_values.astype(np.float64)).max())
    checks.close("split maxima", found[:, -2], top, 1.0 + np.abs(top))
    checks.close("split totals", found[:, -1], total, total, 3e-5)
    checks.close("split sums", found[:, :-2], wanted[:, :-2], largest * total[:, None], 3e-5)
    attended = out.view(np.float32).reshape(wanted_out.shape)
    checks.close("out", attended, wanted_out, largest, 2e-5)
