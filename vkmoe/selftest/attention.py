"""attention and attention_combine against their twins: one configuration, token after token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import Runner
from vkmoe.ops.attention import AttentionShape, AttentionSplit, KvCache, attention
from vkmoe.reference.attention import AttentionInputs, AttentionResult, attention_combine
from vkmoe.reference.attention import attention as attention_twin
from vkmoe.selftest.comparison import Checks
from vkmoe.selftest.parameters import PARAMS, params_words

__all__ = ["AttentionCase", "qwen3_shape"]

Floats = NDArray[np.floating]
POISON = 0xFF  # bytes of cache rows that were never written: NaN in both types


def qwen3_shape(**changes: object) -> AttentionShape:
    """Small grouped heads with the norms and rotation of Qwen3."""
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


class AttentionCase:
    """Rows below `n_filled` of both caches are random, the others poisoned."""

    def __init__(
        self,
        runner: Runner,
        shape: AttentionShape,
        split: AttentionSplit,
        n_filled: int,
        seed: int = 0,
    ) -> None:
        self.shape, self.split, self._runner = shape, split, runner
        self._rng = np.random.default_rng(seed)
        kv = np.float16 if shape.kv_type == "F16" else np.float32
        cache_shape = (shape.n_kv_heads, shape.context, shape.head_dim)
        self.keys, self.values = (np.full(cache_shape, np.nan, kv) for _ in range(2))
        for cache in (self.keys, self.values):
            cache.view(np.uint8)[...] = POISON
            cache[:, :n_filled] = self._rng.normal(0, 1, cache[:, :n_filled].shape)
        self.rope = self._rotations()
        self.gains = [self._gain(n_heads) for n_heads in (shape.n_heads, shape.n_kv_heads)]
        self.cache = KvCache(
            runner.place(self.keys),
            runner.place(self.values),
            runner.place(self.rope),
            *(0 if gain is None else runner.place(gain) for gain in self.gains),
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
            PARAMS,
            self.partials,
            self.out,
            "attention",
        )

    def token(self) -> NDArray[np.float32]:
        """Raw q, k and v [qkv_width] of a random token."""
        return self._rng.normal(0, 1, self.shape.qkv_width).astype(np.float32)

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
            self._inputs(qkv), self.keys, self.values, position, self.split.n_splits, keys[:, row]
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
        checks.equal("the other rows of the K cache", *_bytes(keys, self.keys))
        checks.equal("the other rows of the V cache", *_bytes(values, self.values))
        self._compare(partials, out, twin, row, checks)
        return out.view(np.float32)

    def _compare(
        self,
        partials: NDArray[np.uint32],
        out: NDArray[np.uint32],
        twin: AttentionResult,
        position: int,
        checks: Checks,
    ) -> None:
        """Partials and output, by the sum of the weighted magnitudes."""
        wanted = twin.partials
        found = partials.view(np.float32).reshape(wanted.shape)
        used = ~np.isnan(wanted[..., -1])
        checks.equal(
            "unused splits stay unwritten",
            np.isnan(found[~used]),
            np.ones_like(wanted[~used], bool),
        )
        top, total = wanted[used][:, -2], wanted[used][:, -1]
        largest = float(np.abs(self.values[:, : position + 1].astype(np.float64)).max())
        checks.close("split maxima", found[used][:, -2], top, 1.0 + np.abs(top))
        checks.close("split totals", found[used][:, -1], total, total, 3e-5)
        checks.close(
            "split sums", found[used][:, :-2], wanted[used][:, :-2], largest * total[:, None], 3e-5
        )
        checks.close(
            "out",
            out.view(np.float32).reshape(len(wanted), -1),
            attention_combine(wanted, position),
            largest,
            2e-5,
        )

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
        """Both caches as they lie on the device."""
        keys, values = (
            self._runner.fetch(address, cache.nbytes).view(cache.dtype).reshape(cache.shape)
            for address, cache in ((self.cache.keys, self.keys), (self.cache.values, self.values))
        )
        return keys, values

    def _rotations(self) -> NDArray[np.float32]:
        angles = self._rng.uniform(-np.pi, np.pi, (self.shape.context, self.shape.rotary_dim // 2))
        return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)

    def _gain(self, n_heads: int) -> NDArray[np.float32] | None:
        if self.shape.norm == "none":
            return None
        gain = self._rng.uniform(0.5, 1.5, (n_heads, self.shape.head_dim)).astype(np.float32)
        return gain if self.shape.norm == "full_width" else gain[0]


def _bytes(*arrays: Floats) -> list[NDArray[np.uint8]]:
    """Bit patterns, so that NaNs can be equal."""
    return [np.ascontiguousarray(array).view(np.uint8) for array in arrays]
