"""latent_attention and attention_combine against their twins, token after token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import Runner
from vkmoe.ops.attention_shapes import AttentionSplit, LatentShape
from vkmoe.ops.latent_attention import LatentCache, latent_attention
from vkmoe.reference.attention import attention_combine
from vkmoe.reference.latent_attention import LatentInputs
from vkmoe.reference.latent_attention import latent_attention as latent_twin
from vkmoe.selftest.attention import bits, compare_attended, poisoned
from vkmoe.selftest.comparison import Checks
from vkmoe.selftest.parameters import PARAMS, params_words

__all__ = ["LatentCase", "deepseek2_shape"]

Words = NDArray[np.float32]
Q_OFFSET, KV_OFFSET = 3, 5  # words of something else before both


def deepseek2_shape(**changes: object) -> LatentShape:
    """A small row with the proportions and rotation of DeepSeek-V2."""
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


class LatentCase:
    """Rows below `n_filled` of the cache are random, the others poisoned."""

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
        self.rows = poisoned((shape.context, shape.row_dim), shape.kv_type)
        self.rows[:n_filled] = self._rng.normal(0, 1, self.rows[:n_filled].shape)
        angles = self._rng.uniform(-np.pi, np.pi, (shape.context, shape.rope_dim // 2))
        self.rope = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
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
            self.absorbed,
            self.raw,
            self.raw,
            PARAMS,
            self.partials,
            self.out,
            "attention",
            q_offset=Q_OFFSET,
            kv_offset=Q_OFFSET + shape.q_width + KV_OFFSET,
        )

    def token(self) -> tuple[Words, Words]:
        """Absorbed queries, and the tensor of raw q and kv, of a random token."""
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
        checks.equal("the other rows of the cache", *bits(rows, self.rows))
        wanted = attention_combine(twin.partials, row)
        seen = self.rows[: row + 1, : self.shape.kv_rank]
        compare_attended(checks, partials, out, twin.partials, wanted, seen)
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
