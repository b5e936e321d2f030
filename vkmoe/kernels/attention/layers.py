"""Draws what an attention layer reads, for cases of tokens and of prompts, and keeps its caches.

Rows of a cache that were never written are poisoned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.gpu.runner import Runner
from vkmoe.kernels.attention import twins
from vkmoe.kernels.attention.caches import CacheShape, KvRows, Place, rounding_step
from vkmoe.kernels.attention.operations import KvCache, LatentCache
from vkmoe.kernels.attention.shapes import AttentionShape, LatentShape
from vkmoe.kernels.comparison import Checks

__all__ = ["CacheRows", "GroupedLayer", "LatentLayer", "Layer"]

Floats = NDArray[np.floating]
Singles = NDArray[np.float32]
POISON = 0xFF  # bytes of cache rows that were never written: NaN in all types


class CacheRows(NamedTuple):
    """Holds what a cache on the device must hold."""

    name: str
    address: int
    rows: KvRows

    @property
    def values(self) -> Floats:
        """Decode the rows of the first region: [n_kv_heads, context, row_dim]."""
        values: Floats = self.rows.values()[0]
        return values


class Layer:
    """Places caches of which the positions `filled` of all regions are random at first."""

    sinks: Singles | None = None

    def __init__(
        self,
        runner: Runner,
        shape: AttentionShape | LatentShape,
        names: str,
        filled: slice,
        n_regions: int,
    ) -> None:
        self._runner, self.rng = runner, np.random.default_rng(0)
        if isinstance(shape, LatentShape):
            n_heads, rotary = 1, shape.rope_dim
        else:
            n_heads, rotary = shape.n_kv_heads, shape.rotary_dim
        sizes = CacheShape(n_regions, n_heads, shape.context, shape.row_dim)
        n_filled = len(range(shape.context)[filled])
        self.caches: list[CacheRows] = []
        for name, kv_type in zip(names, shape.kv_types, strict=False):
            rows = KvRows(kv_type, sizes, POISON)
            drawn = self.rng.normal(0, 1, (n_regions, n_heads, n_filled, shape.row_dim))
            rows.write(np.s_[:, :, filled], drawn)
            self.caches.append(CacheRows(name, runner.place(rows.data), rows))
        angles = self.rng.uniform(-np.pi, np.pi, (shape.context, rotary // 2))
        # (cos, sin) of random angles: [context, rotary dims / 2, 2]
        self.rope = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)

    def left(self) -> list[KvRows]:
        """Read what the caches hold now."""
        return [
            KvRows(rows.kv_type, rows.shape, self._runner.fetch(address, rows.data.nbytes))
            for _, address, rows in self.caches
        ]

    def compare(
        self,
        checks: Checks,
        left: Sequence[KvRows],
        places: Sequence[Place],
        wanted: Sequence[Sequence[Floats]],
    ) -> None:
        """Compare the rows of each cache that were appended in `places`, and keep them.

        `wanted` are a twin's for each place and cache; all other rows must be as they were.
        """
        for i, ((name, _, rows), found) in enumerate(zip(self.caches, left, strict=True)):
            # Values are only rounded; keys and latent rows are normed and rotated before.
            values, limit = found.values(), 0.0 if name == "V" else 1.0
            for place, of_caches in zip(places, wanted, strict=True):
                twin = of_caches[i].reshape(values[place].shape)
                allowed = rounding_step(twin, rows.kv_type) + 1e-5 * (0.2 + np.abs(twin))
                what = f"appended row of the {name} cache"
                checks.close(what, values[place], twin, allowed, limit)
                rows.take(found, place)
            checks.equal(f"the other rows of the {name} cache", found.data, rows.data)


class GroupedLayer(Layer):
    """Has the caches of grouped heads, gains, and sinks [n_heads] where the shape has any."""

    def __init__(
        self,
        runner: Runner,
        shape: AttentionShape,
        filled: slice,
        n_regions: int = 1,
        sinks: Floats | None = None,
    ) -> None:
        """Draw everything, or all but the sinks."""
        super().__init__(runner, shape, "KV", filled, n_regions)
        self._shape = shape
        self._gains = [self._gain(n_heads) for n_heads in (shape.n_heads, shape.n_kv_heads)]
        if shape.sinks:
            drawn = self.rng.normal(0, 2, shape.n_heads) if sinks is None else sinks
            self.sinks = drawn.astype(np.float32)
        keys, values = (cache.address for cache in self.caches)
        q_gain, k_gain, placed_sinks = (
            0 if one is None else runner.place(one) for one in (*self._gains, self.sinks)
        )
        rope = runner.place(self.rope)
        self.cache = KvCache(keys, values, rope, q_gain, k_gain, placed_sinks, n_regions)

    def inputs(self, raw: Singles) -> twins.AttentionInputs:
        """Return what twins take of the raw q, k and v of a row."""
        shape = self._shape
        heads = raw[: shape.qkv_width].reshape(-1, shape.head_dim)
        q, k, v = np.split(heads, [shape.n_heads, shape.n_heads + shape.n_kv_heads])
        q_gain, k_gain = self._gains
        return twins.AttentionInputs(
            *(q, k, v, q_gain, k_gain, self.rope),
            *(shape.rope_style, shape.eps, shape.scale, shape.kv_types),
        )

    def _gain(self, n_heads: int) -> Singles | None:
        if self._shape.norm == "none":
            return None
        gain = self.rng.uniform(0.5, 1.5, (n_heads, self._shape.head_dim)).astype(np.float32)
        return gain if self._shape.norm == "full_width" else gain[0]


class LatentLayer(Layer):
    """Has the cache of latent rows, and their gain."""

    def __init__(
        self, runner: Runner, shape: LatentShape, filled: slice, n_regions: int = 1
    ) -> None:
        super().__init__(runner, shape, "C", filled, n_regions)
        self._shape = shape
        self._gain = self.rng.uniform(0.5, 1.5, shape.kv_rank).astype(np.float32)
        places = (self.caches[0].address, runner.place(self.rope), runner.place(self._gain))
        self.cache = LatentCache(*places, n_regions)

    def inputs(self, absorbed: Singles, q: Singles, kv: Singles) -> twins.LatentInputs:
        """Return what twins take of a row's absorbed and raw queries, and of its raw kv."""
        shape = self._shape
        return twins.LatentInputs(
            absorbed=absorbed.reshape(shape.n_heads, -1),
            q_rope=q.reshape(shape.n_heads, -1)[:, shape.nope_dim :],
            kv=kv,
            gain=self._gain,
            rope=self.rope,
            rope_style=shape.rope_style,
            eps=shape.eps,
            scale=shape.scale,
            kv_type=shape.kv_type,
        )
