"""Compares attention, latent_attention and attention_combine with their twins, token after token.

Rows of a cache that were never written, and those outside a window, are poisoned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.attention import twins
from vkmoe.kernels.attention.layers import GroupedLayer, LatentLayer, Layer
from vkmoe.kernels.attention.operations import (
    AttentionTensors,
    LatentQkv,
    attention,
    latent_attention,
)
from vkmoe.kernels.attention.shapes import AttentionShape, AttentionSplit, LatentShape, choose_split
from vkmoe.kernels.attention.twins import first_seen
from vkmoe.kernels.comparison import Checks, Inputs, Words
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.family import Family, Setting, Setup, Trial, Work
from vkmoe.kernels.inputs import PARAMS, params_words
from vkmoe.kernels.shapes import TINY
from vkmoe.kernels.tuning import Tuning, choose_tuning
from vkmoe.kv_types import KV_NUMBERS, KvTypes, both

__all__ = [
    "FAMILIES",
    "AttentionCase",
    "LatentCase",
    "deepseek2_shape",
    "gpt_oss_shape",
    "qwen3_shape",
]

Floats = NDArray[np.floating]
Wide = NDArray[np.float64]
Token = NDArray[np.float32]
Q_OFFSET, KV_OFFSET = 3, 5  # words of something else before both

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


class _CachedCase(ABC):
    """Runs tokens over a layer's caches on the device, and keeps what they append."""

    def __init__(
        self, runner: Runner, layer: Layer, shape: AttentionShape | LatentShape, n_partials: int
    ) -> None:
        self._runner, self._layer, self._context = runner, layer, shape.context
        self.caches = layer.caches
        self.partials = TensorRef("partials", n_partials)
        self.out = TensorRef("out", shape.n_heads * shape.value_dim)
        self._tensors = AttentionTensors(PARAMS, self.partials, self.out)
        self._program = Program("attention")
        self._op = OpContext(self._program, choose_tuning(runner.device.info), "attention")

    @property
    @abstractmethod
    def _n_words(self) -> int:
        """Count the words that a kernel is given of a token."""

    @abstractmethod
    def _inputs(self, token: Token) -> Inputs:
        """Name the tensors of a token."""

    @abstractmethod
    def _twin(self, token: Token, position: int, appended: Sequence[Floats]) -> _Wanted:
        """Compute what a token must leave, where `appended` are the rows that it did append."""

    def token(self) -> Token:
        """Draw all that a kernel is given of a random token."""
        return self._layer.rng.normal(0, 1, self._n_words).astype(np.float32)

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
        left, place = self._layer.left(), (0, slice(None), min(position, self._context - 1))
        wanted = self._twin(token, position, [rows.values()[place] for rows in left])
        self._layer.compare(checks, left, [place], [wanted.rows])
        _compare_attended(checks, partials, out, wanted)
        return out.view(np.float32)


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
        self._drawn = GroupedLayer(runner, shape, slice(n_unseen, n_filled), sinks=sinks)
        super().__init__(runner, self._drawn, shape, split.partials_words(shape))
        self.shape, self.split = shape, split
        self._qkv = TensorRef("qkv", shape.qkv_width)
        attention(self._op, shape, split, self._drawn.cache, self._qkv, self._tensors)

    @property
    def _n_words(self) -> int:
        return self._qkv.n_words

    def _inputs(self, token: Token) -> Inputs:
        return {self._qkv: token}

    def _twin(self, token: Token, position: int, appended: Sequence[Floats]) -> _Wanted:
        shape, inputs, n_splits = self.shape, self._drawn.inputs(token), self.split.n_splits
        keys, values = (cache.values for cache in self.caches)
        left = twins.attention(
            inputs, keys, values, position, n_splits, shape.window, appended_key=appended[0]
        )
        row = min(position, shape.context - 1)
        out = twins.attention_combine(left.partials, row, shape.window, self._drawn.sinks)
        seen = slice(twins.first_seen(row, shape.window), row)
        seen_values = np.concatenate([values[:, seen], appended[1][:, None]], axis=1)
        return _Wanted(left.partials, (left.key, left.value), out, seen_values)


class LatentCase(_CachedCase):
    """Checks latent attention; rows below `n_filled` of the cache are random, others are NaN."""

    def __init__(
        self, runner: Runner, shape: LatentShape, split: AttentionSplit, n_filled: int
    ) -> None:
        self._drawn = LatentLayer(runner, shape, slice(n_filled))
        super().__init__(runner, self._drawn, shape, split.partials_words(shape))
        self.shape, self.split = shape, split
        self._absorbed = TensorRef("absorbed", self.out.n_words)
        # One tensor for q and kv, as where one matrix product makes both.
        kv_offset = Q_OFFSET + shape.q_width + KV_OFFSET
        self._raw = TensorRef("q_kv", kv_offset + shape.row_dim)
        inputs = LatentQkv(self._absorbed, self._raw, self._raw, Q_OFFSET, kv_offset)
        latent_attention(self._op, shape, split, self._drawn.cache, inputs, self._tensors)

    @property
    def _n_words(self) -> int:
        return self._absorbed.n_words + self._raw.n_words

    def _inputs(self, token: Token) -> Inputs:
        absorbed, raw = np.split(token, [self._absorbed.n_words])
        return {self._absorbed: absorbed, self._raw: raw}

    def _twin(self, token: Token, position: int, appended: Sequence[Floats]) -> _Wanted:
        shape, (absorbed, raw) = self.shape, np.split(token, [self._absorbed.n_words])
        q = raw[Q_OFFSET : Q_OFFSET + shape.q_width]
        inputs = self._drawn.inputs(absorbed, q, raw[-shape.row_dim :])
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


# ----- what is compared -----


POSITIONS, POSITIONS_IN_WINDOWS = (0, 31, 32, 150), (120, 150)
# The types of caches that are compared, the usual ones first; measured are those of one type.
CACHES = (both("f16"), both("f32"), both("q8_0"), KvTypes("q8_0", "f16"))


def _attention(setting: Setting) -> Iterator[Trial]:
    """Compare where everything is seen; then with a window and sinks, nothing written outside."""
    for kv_types in CACHES:
        full, windowed = qwen3_shape(kv_types=kv_types), gpt_oss_shape(kv_types=kv_types)
        yield Trial(
            str(kv_types),
            [_in_splits(setting, full), _in_splits(setting, windowed, POSITIONS_IN_WINDOWS)],
        )


def _combine(setting: Setting) -> Iterator[Trial]:
    yield next(_attention(setting))


def _latent_attention(setting: Setting) -> Iterator[Trial]:
    for kv_type in KV_NUMBERS:
        shape = deepseek2_shape(kv_type=kv_type)
        yield Trial(kv_type, [_in_splits(setting, shape)])


def _attended(
    shape: AttentionShape | LatentShape,
    split: AttentionSplit,
    positions: Sequence[int],
    runner: Runner,
) -> Checks:
    """Compare tokens at some positions; nothing is written before the first that is seen."""
    if isinstance(shape, LatentShape):
        return LatentCase(runner, shape, split, positions[-1]).run(positions)
    unseen = first_seen(positions[0], shape.window)
    return AttentionCase(runner, shape, split, positions[-1], n_unseen=unseen).run(positions)


def _in_splits(
    setting: Setting, shape: AttentionShape | LatentShape, positions: Sequence[int] = POSITIONS
) -> Callable[[Runner], Checks]:
    """Compare in three splits."""
    return partial(_attended, shape, _split(setting.tuning, shape, 3), positions)


def _split(tuning: Tuning, shape: AttentionShape | LatentShape, n: int = 0) -> AttentionSplit:
    """Choose a split in the tuning's variant; `n` splits, where that is not 0."""
    return replace(choose_split(shape, tuning, n_splits=n), subgroup=tuning.subgroup)


# ----- what is measured -----


def _attention_works(setup: Setup) -> Iterator[Work]:
    """Read all of the cache, or the last positions of a window."""
    if setup.shapes.latent is None or setup.shapes is TINY:
        for shape in grouped_shapes(setup):
            n_seen = min(shape.context, shape.window or shape.context)
            n_bytes = sum(shape.cache_bytes) // shape.context * n_seen
            yield _decoding_work(setup, shape, n_bytes)


def _latent_attention_works(setup: Setup) -> Iterator[Work]:
    """Read keys and values that are the same bytes once."""
    for shape in latent_shapes(setup):
        yield _decoding_work(setup, shape, sum(shape.cache_bytes))


def _decoding_work(setup: Setup, shape: AttentionShape | LatentShape, n_bytes: int) -> Work:
    check = _at_the_end(setup, shape)
    return Work(attention_text(shape), n_bytes, check, is_usual=has_usual_caches(shape))


def _at_the_end(setup: Setup, shape: AttentionShape | LatentShape) -> Callable[[Runner], Checks]:
    """Compare the last token of a full cache."""
    return partial(_attended, shape, _split(setup.tuning, shape), (shape.context - 1,))


def has_usual_caches(shape: AttentionShape | LatentShape) -> bool:
    return shape.kv_types == CACHES[0]


def _combine_works(setup: Setup) -> Iterator[Work]:
    """Join what the splits of either kind left."""
    shapes: list[AttentionShape | LatentShape] = [*latent_shapes(setup)] or [*grouped_shapes(setup)]
    for shape in filter(has_usual_caches, shapes):  # whose type has no say
        n_bytes = 4 * _split(setup.tuning, shape).partials_words(shape)
        yield Work(f"join of {attention_text(shape)}", n_bytes, _at_the_end(setup, shape))


def grouped_shapes(setup: Setup) -> Iterator[AttentionShape]:
    model = setup.shapes
    windows = (0, model.window) if model.window else (0,)
    for kv_types, context in product(CACHES[:3], model.contexts):
        for window in windows:
            yield AttentionShape(
                model.n_heads,
                model.n_kv_heads,
                model.head_dim,
                rotary_dim=model.head_dim,
                context=context,
                rope_style=model.rope_style,
                norm=model.norm,
                eps=1e-6,
                scale=model.head_dim**-0.5,
                kv_types=kv_types,
                window=window,
                sinks=model.sinks,
            )


def latent_shapes(setup: Setup) -> Iterator[LatentShape]:
    model = setup.shapes
    latent = model.latent
    for kv_types, context in product(CACHES[:3], model.contexts if latent is not None else ()):
        assert latent is not None
        yield LatentShape(
            model.n_heads,
            latent.kv_rank,
            latent.rope_dim,
            latent.nope_dim,
            context,
            eps=1e-6,
            scale=latent.query_dim**-0.5,
            kv_type=kv_types.keys,
        )


def attention_text(shape: AttentionShape | LatentShape) -> str:
    cached = "" if has_usual_caches(shape) else f", cached as {shape.kv_types}"
    if isinstance(shape, LatentShape):
        heads = f"{shape.n_heads} heads over rows of {shape.row_dim}"
        return f"attention at {shape.context}, {heads}{cached}"
    seen = f" (last {shape.window})" if shape.window else ""
    heads = f"{shape.n_heads}/{shape.n_kv_heads} heads of {shape.head_dim}"
    return f"attention at {shape.context}{seen}, {heads}{cached}"


FAMILIES = {
    "attention": Family(_attention, _attention_works, "reduce_suffix"),
    "latent_attention": Family(_latent_attention, _latent_attention_works, "reduce_suffix"),
    "attention_combine": Family(_combine, _combine_works),
}
