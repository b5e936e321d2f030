"""Draws what an attention layer reads, for cases of tokens and of prompts, and keeps its caches.

Rows of a cache that were never written are poisoned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.gpu.program import TensorRef
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.attention import twins
from vkmoe.kernels.attention.caches import CacheShape, KvRows, rounding_step
from vkmoe.kernels.attention.operations import (
    AttentionTensors,
    KvCache,
    LatentCache,
    LatentQkv,
    attention,
    latent_attention,
)
from vkmoe.kernels.attention.shapes import AttentionShape, AttentionSplit, LatentShape, Shape
from vkmoe.kernels.comparison import Checks
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.prompt_attention.operations import (
    PromptTensors,
    PromptTiling,
    append_latent_rows,
    append_rows,
    latent_prompt_attention,
    prompt_attention,
)

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


class GivenRows(NamedTuple):
    """Says how many rows a program has, of how many sequences, and what lies between their parts.

    All but the rows are words of something else.
    """

    n_rows: int = 1
    n_regions: int = 1
    before_q: int = 3  # of latent rows
    before_kv: int = 5
    behind: int = 0

    def tensor(self, name: str, row_words: int) -> TensorRef:
        """Name a tensor that has so many words for each row, and what lies behind them."""
        n_words = self.n_rows * (row_words + self.behind)
        return TensorRef(f"{name} of {self.n_rows}", n_words, self.n_rows)


class Layer(ABC):
    """Places caches of which the positions `filled` of all regions are random at first."""

    sinks: Singles | None = None
    rounded_only = ""  # the cache whose rows have no arithmetic before
    tensors: tuple[TensorRef, ...]  # what kernels are given of each row

    def __init__(
        self,
        runner: Runner,
        shape: Shape,
        names: str,
        filled: slice,
        n_regions: int,
    ) -> None:
        self._runner, self.rng, self._value_dim = runner, np.random.default_rng(0), shape.value_dim
        if isinstance(shape, LatentShape):
            n_heads, rotary = 1, shape.rope_dim
        else:
            n_heads, rotary = shape.n_kv_heads, shape.rotary_dim
        self._n_places, self._context = shape.n_places, shape.context
        sizes = CacheShape(n_regions, n_heads, self._n_places, shape.row_dim)
        at = np.arange(shape.context)[filled][-self._n_places :] % self._n_places
        self.caches: list[CacheRows] = []
        for name, kv_type in zip(names, shape.kv_types, strict=False):
            rows = KvRows(kv_type, sizes, POISON)
            drawn = self.rng.normal(0, 1, (n_regions, n_heads, len(at), shape.row_dim))
            rows.write(np.s_[:, :, at], drawn)
            self.caches.append(CacheRows(name, runner.place(rows.data), rows))
        angles = self.rng.uniform(-np.pi, np.pi, (shape.context, rotary // 2))
        # (cos, sin) of random angles: [context, rotary dims / 2, 2]
        self.rope = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)

    @abstractmethod
    def append(self, op: OpContext, split: AttentionSplit, tensors: AttentionTensors) -> None:
        """Append the attention of tokens."""

    @abstractmethod
    def append_prompt(self, op: OpContext, tiling: PromptTiling, tensors: PromptTensors) -> None:
        """Append the attention of prompts, which turns queries in their place."""

    @abstractmethod
    def twin(self, raw: Singles, position: int) -> twins.Appended:
        """Compute what a row leaves."""

    @property
    @abstractmethod
    def turned(self) -> tuple[int, NDArray[np.bool_]]:
        """Return which tensor has the queries that are turned, and mark the words of a row."""

    def draw(self, n_rows: int) -> Singles:
        """Draw all that kernels are given of random rows: [n_rows, n_words]."""
        n_words = sum(ref.row_words for ref in self.tensors)
        return self.rng.normal(0, 1, (n_rows, n_words)).astype(np.float32)

    def inputs(self, raw: Singles) -> dict[TensorRef, Singles]:
        """Part rows [n_rows, n_words] among the tensors."""
        ends = np.cumsum([ref.row_words for ref in self.tensors])
        return dict(zip(self.tensors, np.split(raw, ends[:-1], axis=1), strict=True))

    def rows(self) -> tuple[Floats, Floats]:
        """Decode all keys and values: [n_regions, n_kv_heads, context, row_dim or value_dim].

        Of positions that share a place, each is what the last of them brought.
        """
        at = np.arange(self._context) % self._n_places
        keys, values = (self.caches[i].rows.values()[:, :, at] for i in (0, -1))
        return keys, values[..., : self._value_dim]

    def compare(
        self, checks: Checks, rows: Sequence[tuple[int, int]], wanted: Sequence[Sequence[Floats]]
    ) -> None:
        """Compare what was appended to each cache, by region and position, and keep it.

        `wanted` are a twin's for each row and cache; all other rows must be as they were.
        """
        places = [(region, slice(None), position % self._n_places) for region, position in rows]
        for i, (name, address, kept) in enumerate(self.caches):
            found = KvRows(kept.kv_type, kept.shape, self._runner.fetch(address, kept.data.nbytes))
            # Most values are only rounded; keys and latent rows are normed and rotated before.
            values, limit = found.values(), 0.0 if name == self.rounded_only else 1.0
            for place, of_caches in zip(places, wanted, strict=True):
                if not of_caches:  # these are another layer's
                    continue
                twin = of_caches[i]
                allowed = rounding_step(twin, kept.kv_type) + 1e-5 * (0.2 + np.abs(twin))
                what = f"appended row of the {name} cache"
                checks.close(what, values[place], twin, allowed, limit)
                kept.take(found, place)
            checks.equal(f"the other rows of the {name} cache", found.data, kept.data)


class GroupedLayer(Layer):
    """Has the caches of grouped heads, gains, and sinks [n_heads] where the shape has any."""

    def __init__(
        self,
        runner: Runner,
        shape: AttentionShape,
        filled: slice,
        given: GivenRows,
        sinks: Floats | None = None,
    ) -> None:
        """Draw everything, or all but the sinks."""
        super().__init__(runner, shape, "KV", filled, given.n_regions)
        self._shape, self.tensors = shape, (given.tensor("qkv", shape.qkv_width),)
        is_changed = shape.value_norm or shape.hadamard_blocks[1] > 1
        self.rounded_only = "" if is_changed else "V"
        # A model whose scale is another has gains of queries that make up for it: its scores are
        # of the usual size, and what float32 loses in them too.
        usual = shape.head_dim**-0.5 / shape.scale
        self._gains = [self._gain(shape.n_heads, usual), self._gain(shape.n_kv_heads)]
        if shape.sinks:
            drawn = self.rng.normal(0, 2, shape.n_heads) if sinks is None else sinks
            self.sinks = drawn.astype(np.float32)
        keys, values = (cache.address for cache in self.caches)
        q_gain, k_gain, placed_sinks = (
            0 if one is None else runner.place(one) for one in (*self._gains, self.sinks)
        )
        rope = runner.place(self.rope)
        if not shape.appends:
            k_gain = q_gain
        self.cache = KvCache(keys, values, rope, q_gain, k_gain, placed_sinks, given.n_regions)

    def draw(self, n_rows: int) -> Singles:
        """Draw rows; where they bring no k and v, the words for these are NaN."""
        drawn = super().draw(n_rows)
        if not self._shape.appends:
            drawn[:, self._shape.n_heads * self._shape.head_dim :] = np.nan
        return drawn

    def append(self, op: OpContext, split: AttentionSplit, tensors: AttentionTensors) -> None:
        attention(op, self._shape, split, self.cache, self.tensors[0], tensors)

    def append_prompt(self, op: OpContext, tiling: PromptTiling, tensors: PromptTensors) -> None:
        shape, (qkv,) = self._shape, self.tensors
        append_rows(op, shape, self.cache, qkv, tensors.params)
        prompt_attention(op, shape, tiling, self.cache, qkv, tensors)

    def twin(self, raw: Singles, position: int) -> twins.Appended:
        shape = self._shape
        heads = raw[: shape.qkv_width].reshape(-1, shape.head_dim)
        q, k, v = np.split(heads, [shape.n_heads, shape.n_heads + shape.n_kv_heads])
        inputs = twins.AttentionInputs(
            q=q,
            k=k,
            v=v,
            q_gain=self._gains[0],
            k_gain=self._gains[1],
            rope=self.rope,
            rope_style=shape.rope_style,
            eps=shape.eps,
            kv_types=shape.kv_types,
            hadamard_blocks=shape.hadamard_blocks,
            value_norm=shape.value_norm,
            gains_last=shape.norm == "per_head_turned",
        )
        left = twins.append_row(inputs, position)
        return left if shape.appends else left._replace(cached=())

    @property
    def turned(self) -> tuple[int, NDArray[np.bool_]]:
        n_turned = self._shape.n_heads * self._shape.head_dim
        return 0, np.arange(self.tensors[0].row_words) < n_turned

    def _gain(self, n_heads: int, factor: float = 1.0) -> Singles | None:
        if self._shape.norm == "none":
            return None
        drawn = self.rng.uniform(0.5, 1.5, (n_heads, self._shape.head_dim))
        gain = (factor * drawn).astype(np.float32)
        return gain if self._shape.norm == "full_width" else gain[0]


class LatentLayer(Layer):
    """Has the cache of latent rows, and their gain."""

    def __init__(self, runner: Runner, shape: LatentShape, filled: slice, given: GivenRows) -> None:
        super().__init__(runner, shape, "C", filled, given.n_regions)
        self._shape, self._q_offset = shape, given.before_q
        self._gain = self.rng.uniform(0.5, 1.5, shape.kv_rank).astype(np.float32)
        places = (self.caches[0].address, runner.place(self.rope), runner.place(self._gain))
        self.cache = LatentCache(*places, given.n_regions)
        kv_offset = given.before_q + shape.q_width + given.before_kv
        absorbed = given.tensor("absorbed", shape.n_heads * shape.kv_rank)
        # One tensor for q and kv, as where one matrix product makes both.
        raw = given.tensor("q_kv", kv_offset + shape.row_dim)
        self.tensors = absorbed, raw
        self._qkv = LatentQkv(absorbed, raw, raw, given.before_q, kv_offset)

    def append(self, op: OpContext, split: AttentionSplit, tensors: AttentionTensors) -> None:
        latent_attention(op, self._shape, split, self.cache, self._qkv, tensors)

    def append_prompt(self, op: OpContext, tiling: PromptTiling, tensors: PromptTensors) -> None:
        append_latent_rows(op, self._shape, self.cache, self._qkv, tensors.params)
        latent_prompt_attention(op, self._shape, tiling, self.cache, self._qkv, tensors)

    def twin(self, raw: Singles, position: int) -> twins.Appended:
        shape = self._shape
        absorbed, rest = np.split(raw, [self.tensors[0].row_words])
        q, kv = rest[self._q_offset :][: shape.q_width], rest[self._qkv.kv_offset :]
        inputs = twins.LatentInputs(
            absorbed=absorbed[: shape.n_heads * shape.kv_rank].reshape(shape.n_heads, -1),
            q_rope=q.reshape(shape.n_heads, -1)[:, shape.nope_dim :],
            kv=kv[: shape.row_dim],
            gain=self._gain,
            rope=self.rope,
            rope_style=shape.rope_style,
            eps=shape.eps,
            kv_type=shape.kv_type,
            hadamard_block=shape.hadamard_blocks[0],
        )
        return twins.append_latent_row(inputs, position)

    @property
    def turned(self) -> tuple[int, NDArray[np.bool_]]:
        mask = np.zeros(self.tensors[1].row_words, np.bool_)
        q = mask[self._q_offset :][: self._shape.q_width].reshape(self._shape.n_heads, -1)
        q[:, self._shape.nope_dim :] = True
        return 1, mask


def layer_of(
    runner: Runner,
    shape: Shape,
    filled: slice,
    given: GivenRows,
    sinks: Floats | None = None,
) -> Layer:
    """Make the layer of a shape's kind; `sinks` [n_heads] in place of random ones."""
    if isinstance(shape, LatentShape):
        return LatentLayer(runner, shape, filled, given)
    return GroupedLayer(runner, shape, filled, given, sinks)
