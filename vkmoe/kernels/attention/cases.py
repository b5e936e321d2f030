"""Compares attention, latent_attention and attention_combine with their twins, token after token,
and hadamard row by row.

Rows of a cache that were never written, and those outside a window, are poisoned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
from numpy.typing import NDArray

from vkmoe.facts import AttentionSpec, DeltaNetSpec, LatentSpec
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.attention import twins
from vkmoe.kernels.attention.caches import hadamard
from vkmoe.kernels.attention.hadamard import HeadRows
from vkmoe.kernels.attention.hadamard import hadamard as append_hadamard
from vkmoe.kernels.attention.layers import GivenRows, layer_of
from vkmoe.kernels.attention.operations import AttentionTensors
from vkmoe.kernels.attention.shapes import (
    UNIT_DIMS,
    AttentionShape,
    AttentionSplit,
    LatentShape,
    Shape,
    choose_split,
    shape_of,
)
from vkmoe.kernels.comparison import Checks, Words
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.family import Family, Setting, Setup, Trial, Used, Work, trial
from vkmoe.kernels.inputs import EPS, PARAMS, params_words
from vkmoe.kernels.rows import N_DRAWN, RowBatch, RowCase, Rowed, RowsCase
from vkmoe.kernels.tuning import Tuning, choose_tuning
from vkmoe.kv_types import KV_NUMBERS, KvTypes, both

Floats = NDArray[np.floating]
Wide = NDArray[np.float64]
Token = NDArray[np.float32]

QWEN3 = AttentionShape(
    n_heads=8,
    n_kv_heads=2,
    head_dim=64,
    rotary_dim=64,
    context=200,
    rope_style="neox",
    norm="per_head",
    eps=EPS,
    scale=64**-0.5,
    kv_types=both("f16"),
)
DEEPSEEK2 = LatentShape(
    n_heads=8,
    kv_rank=64,
    rope_dim=32,
    nope_dim=24,
    context=200,
    eps=EPS,
    scale=56**-0.5,
    kv_type="f16",
)


def qwen3_shape(**changes: object) -> AttentionShape:
    """Make small grouped heads with the norms and rotation of Qwen3."""
    return replace(QWEN3, **changes)  # type: ignore[arg-type]


def gpt_oss_shape(**changes: object) -> AttentionShape:
    """Make small heads with the window, sinks and rotation of gpt-oss, without norms of q and k."""
    return qwen3_shape(**{"norm": "none", "window": 50, "sinks": True, **changes})


def gemma4_shape(**changes: object) -> AttentionShape:
    """Make small heads with the norms of Gemma 4: of q, k and v; their caches are rings."""
    gemma4 = {"value_norm": True, "window": 24, "ring": 64, "scale": 1.0}
    return qwen3_shape(**{**gemma4, **changes})


def hunyuan_shape(**changes: object) -> AttentionShape:
    """Make small heads with the norms of Hunyuan-A13B, whose gains are behind the rotation."""
    return qwen3_shape(**{"norm": "per_head_turned", **changes})


def wide_shape(**changes: object) -> AttentionShape:
    """Make heads as wide as those of Gemma 4 that see everything: few dims of 512 turn."""
    wide = {"head_dim": 512, "rotary_dim": 128, "scale": 512**-0.5}
    return qwen3_shape(**{**wide, **changes})


def deepseek2_shape(**changes: object) -> LatentShape:
    """Make a small row with the proportions and rotation of DeepSeek-V2."""
    return replace(DEEPSEEK2, **changes)  # type: ignore[arg-type]


class AttentionCase:
    """Runs tokens over a layer's caches on the device, and keeps what they append.

    Rows `n_unseen` ... `n_filled` of the caches are random, others are NaN; where the caches are
    another layer's, one row more. `sinks` [n_heads] are in place of random ones, where the shape
    has sinks.
    """

    def __init__(
        self,
        runner: Runner,
        shape: Shape,
        split: AttentionSplit,
        n_filled: int,
        n_unseen: int = 0,
        sinks: Floats | None = None,
    ) -> None:
        self._runner, self.shape, self.split = runner, shape, split
        filled = slice(n_unseen, n_filled + (not shape.appends))
        self._layer = layer_of(runner, shape, filled, GivenRows(), sinks)
        self.caches = self._layer.caches
        partials = TensorRef("partials", split.partials_words(shape))
        out = TensorRef("out", shape.n_heads * shape.value_dim)
        self._tensors, self._program = AttentionTensors(PARAMS, partials, out), Program("attention")
        op = OpContext(self._program, choose_tuning(runner.device.info), "attention")
        self._layer.append(op, split, self._tensors)

    def token(self) -> Token:
        """Draw all that a kernel is given of a random token."""
        token: Token = self._layer.draw(1)[0]
        return token

    def run(self, positions: Sequence[int]) -> Checks:
        """Compare one random token at each of the positions, in order."""
        checks = Checks()
        for position in positions:
            self.step(position, self.token(), checks)
        return checks

    def step(self, position: int, token: Token, checks: Checks) -> Token:
        """Run one token, check all it left behind, keep what it appended; returns the output."""
        inputs = {**self._layer.inputs(token[None]), PARAMS: params_words(position)}
        partials, out = self._runner.run(self._program, inputs, *self._tensors[1:])
        row = min(position, self.shape.context - 1)
        left = self._layer.twin(token, row)
        self._layer.compare(checks, [(0, row)], [left.cached])
        attended = out.view(np.float32)
        self._compare_attended(checks, row, left.queries, partials.view(np.float32), attended)
        return attended

    def _compare_attended(
        self, checks: Checks, row: int, queries: Wide, partials: Token, out: Token
    ) -> None:
        """Compare partials and output with those over what was appended, by weighted magnitudes."""
        shape, window = self.shape, self.shape.window
        seen = slice(twins.first_seen(row, window), row + 1)
        keys, values = (cached[0][:, seen] for cached in self._layer.rows())
        wanted = twins.attention(shape.scale * queries, keys, values, self.split.n_splits)
        joined = twins.attention_combine(wanted, row, window, self._layer.sinks)
        joined = hadamard(joined, shape.hadamard_blocks[1])
        found, used = partials.reshape(wanted.shape), ~np.isnan(wanted[..., -1])
        unwritten = np.isnan(found[~used])
        checks.equal("unused splits stay unwritten", unwritten, np.ones_like(unwritten))
        found, wanted = found[used], wanted[used]
        top, total = wanted[:, -2], wanted[:, -1]
        largest = float(np.abs(values.astype(np.float64)).max())
        checks.close("split maxima", found[:, -2], top, 1.0 + np.abs(top))
        checks.close("split totals", found[:, -1], total, total, 3e-5)
        checks.close("split sums", found[:, :-2], wanted[:, :-2], largest * total[:, None], 3e-5)
        checks.close("out", out.reshape(joined.shape), joined, largest, 2e-5)


@dataclass(frozen=True)
class HadamardCase(RowCase):
    """Transforms heads that begin at word 3 of a row, with words of something else between them."""

    tuning: Tuning
    n_heads: int
    head_dims: int
    block: int
    gap: int = 5

    def append(self, runner: Runner, op: OpContext, batch: RowBatch) -> Rowed:
        stride, offset = self.head_dims + self.gap, 3
        width = offset + self.n_heads * stride
        given = np.random.default_rng(0).normal(0, 2, (N_DRAWN, width)).astype(np.float32)
        rows = batch.tensor("rows", width)
        heads = HeadRows(rows, offset, self.n_heads, stride, self.head_dims)
        append_hadamard(op, heads, self.block, batch.params_ref)

        def compare(row: int, checks: Checks, words: Sequence[Words]) -> None:
            left, before = words[0].view(np.float32), given[row]
            parts = [of[offset:].reshape(self.n_heads, stride) for of in (left, before)]
            (found, beside), (raw, was) = (np.split(of, [self.head_dims], axis=1) for of in parts)
            largest = float(np.abs(raw).max()) * self.block**0.5
            checks.close("heads", found, hadamard(raw, self.block), largest)
            checks.equal("words between the heads", beside, was)
            checks.equal("words in front", left[:offset], before[:offset])

        return Rowed({rows: given}, (rows,), compare, lambda of: of.params())


# ----- what is compared -----


POSITIONS, POSITIONS_IN_WINDOWS = (0, 31, 32, 150), (120, 150)
# The types of caches that are compared, the usual ones first; measured are those of one type.
SAME_TYPES = tuple(both(kv_type) for kv_type in KV_NUMBERS)
CACHES = (*SAME_TYPES[:3], KvTypes("q8_0", "f16"), KvTypes("q4_0", "q5_1"))
# Gains behind RoPE; and the widest heads: with and without norms and windows, all dims turning or
# some.
OTHER_SHAPES = (
    hunyuan_shape(rotary_dim=48, head_dim=72),
    wide_shape(),
    wide_shape(kv_types=both("f32"), norm="none", window=50, rotary_dim=512),
    wide_shape(kv_types=both("q8_0"), window=50),
    qwen3_shape(kv_types=KvTypes("q5_1", "q4_0"), norm="full_width", head_dim=72, rotary_dim=72),
)


def _attention(setting: Setting) -> Iterator[Trial]:
    """Compare where everything is seen; then in windows, nothing written outside, with sinks, with
    normed values, and over the caches of another layer."""
    for kv_types in CACHES:
        full, windowed = qwen3_shape(kv_types=kv_types), gpt_oss_shape(kv_types=kv_types)
        normed = gemma4_shape(kv_types=kv_types)
        yield Trial(
            str(kv_types),
            [
                _in_splits(setting, full),
                _in_splits(setting, windowed, POSITIONS_IN_WINDOWS),
                _in_splits(setting, normed, POSITIONS_IN_WINDOWS),
                _in_splits(setting, replace(normed, appends=False), POSITIONS_IN_WINDOWS),
            ],
        )
    for shape in OTHER_SHAPES:
        compare = _in_splits(setting, shape, POSITIONS_IN_WINDOWS)
        yield Trial(f"{shape.kv_types}, {shape.head_dim} dims", [compare])


def _combine(setting: Setting) -> Iterator[Trial]:
    yield next(_attention(setting))


def _latent_attention(setting: Setting) -> Iterator[Trial]:
    for kv_type in KV_NUMBERS:
        shape = deepseek2_shape(kv_type=kv_type)
        yield Trial(kv_type, [_in_splits(setting, shape)])


def _hadamard(setting: Setting) -> Iterator[Trial]:
    """Compare every size of a block, and rows of more blocks than a workgroup has lanes."""
    for n_heads, head_dims, block in ((3, 96, 32), (5, 80, 16), (40, 72, 8)):
        case = HadamardCase(setting.tuning, n_heads, head_dims, block)
        yield trial(case, RowsCase(case), what=f"blocks of {block}")


def _attended(
    shape: Shape, split: AttentionSplit, positions: Sequence[int], runner: Runner
) -> Checks:
    """Compare tokens at some positions; nothing is written before the first that is seen."""
    unseen = twins.first_seen(positions[0], shape.window)
    return AttentionCase(runner, shape, split, positions[-1], unseen).run(positions)


def _in_splits(
    setting: Setting, shape: Shape, positions: Sequence[int] = POSITIONS
) -> Callable[[Runner], Checks]:
    """Compare in three splits."""
    return partial(_attended, shape, _split(setting.tuning, shape, 3), positions)


def _split(tuning: Tuning, shape: Shape, n: int = 0) -> AttentionSplit:
    """Choose a split in the tuning's variant; `n` splits, where that is not 0."""
    return replace(choose_split(shape, tuning, n_splits=n), subgroup=tuning.subgroup)


# ----- what a model uses -----


PROBED_CONTEXT = 256  # positions, of more than as many


def shortened(shape: Shape) -> Shape:
    """Cut the context of a shape, but where its rows share the places of a ring; with EPS."""
    context = PROBED_CONTEXT
    if isinstance(shape, AttentionShape) and 0 < shape.ring < shape.context:
        context = shape.ring + PROBED_CONTEXT // 16
    return replace(shape, context=min(context, shape.context), eps=EPS)


@dataclass(frozen=True)
class AttentionProbe:
    """Checks two tokens at the end of a context."""

    shape: Shape
    split: AttentionSplit

    def run(self, runner: Runner) -> Checks:
        """Compare both."""
        last = self.shape.context - 1
        return _attended(self.shape, self.split, (max(0, last - 7), last), runner)


def _attention_probe(used: Used) -> AttentionProbe:
    """Compare the kernel that joins splits too."""
    return AttentionProbe(shortened(used.mixer.shape), used.mixer.split)


def _hadamard_probe(used: Used) -> HadamardCase:
    numbers = used.numbers
    dims = numbers["head_dims"]
    gap = numbers["stride"] - dims
    return HadamardCase(used.tuning, numbers["n_heads"], dims, numbers["block"], gap)


# ----- what is measured -----


def _attention_works(setup: Setup) -> Iterator[Work]:
    """Read all of the cache, or the last positions of a window."""
    kind = LatentSpec if setup.variant.family == "latent_attention" else AttentionSpec
    for shape in shapes_of(setup, kind):
        n_bytes = seen_bytes(shape, 1)
        check = _at_the_end(setup, shape)
        yield Work(attention_text(shape), n_bytes, check, is_usual=has_usual_caches(shape))


def _combine_works(setup: Setup) -> Iterator[Work]:
    """Join what the splits of either kind left."""
    for shape in filter(has_usual_caches, shapes_of(setup)):  # whose type has no say
        n_bytes = 4 * _split(setup.tuning, shape).partials_words(shape)
        yield Work(f"join of {attention_text(shape)}", n_bytes, _at_the_end(setup, shape))


def _hadamard_works(setup: Setup) -> Iterator[Work]:
    """Transform what the heads of a token leave."""
    for shape in filter(has_usual_caches, shapes_of(setup)):
        case = HadamardCase(setup.tuning, shape.n_heads, shape.value_dim, UNIT_DIMS, gap=0)
        text = f"transform of {shape.n_heads} heads of {shape.value_dim}"
        yield Work(text, 8 * shape.n_heads * shape.value_dim, case.run)


def _at_the_end(setup: Setup, shape: Shape) -> Callable[[Runner], Checks]:
    """Compare the last token of a full cache."""
    return partial(_attended, shape, _split(setup.tuning, shape), (shape.context - 1,))


def seen_bytes(shape: Shape, n_rows: int) -> int:
    """Count the bytes that the last rows of a full cache see together."""
    n_seen = min(shape.context, shape.window + n_rows - 1) if shape.window else shape.context
    return sum(shape.cache_bytes) // shape.n_places * n_seen


def has_usual_caches(shape: Shape) -> bool:
    return shape.kv_types == CACHES[0]


def shapes_of(
    setup: Setup, kind: type[AttentionSpec | LatentSpec] | None = None
) -> Iterator[Shape]:
    """List the shapes of a model's attention, of one kind or of all, in each type of caches."""
    found = (mixer for mixer in setup.shapes.mixers if not isinstance(mixer, DeltaNetSpec))
    mixers = [mixer for mixer in found if kind is None or isinstance(mixer, kind)]
    for kv_types, context, mixer in product(SAME_TYPES, setup.shapes.contexts, mixers):
        yield shape_of(mixer, context, kv_types, eps=EPS)


def attention_text(shape: Shape) -> str:
    cached = "" if has_usual_caches(shape) else f", cached as {shape.kv_types}"
    if isinstance(shape, LatentShape):
        heads = f"{shape.n_heads} heads over rows of {shape.row_dim}"
        return f"attention at {shape.context}, {heads}{cached}"
    seen = f" (last {shape.window})" if shape.window else ""
    heads = f"{shape.n_heads}/{shape.n_kv_heads} heads of {shape.head_dim}"
    return f"attention at {shape.context}{seen}, {heads}{cached}"


FAMILIES = {
    "attention": Family(_attention, _attention_works, "reduce_suffix", _attention_probe),
    "latent_attention": Family(
        _latent_attention, _attention_works, "reduce_suffix", _attention_probe
    ),
    "attention_combine": Family(_combine, _combine_works, probe=_attention_probe),
    "hadamard": Family(_hadamard, _hadamard_works, probe=_hadamard_probe),
}
