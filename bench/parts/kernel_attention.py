"""What `bench.kernels` runs of the attention kernels: a token at the end of a full cache.

Owns which contexts, windows and latent rows of a model each gets. The cases are those of
`vkmoe selftest`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from bench.parts.kernel_work import Setting, Work
from vkmoe.facts import LatentSpec
from vkmoe.gpu.runner import Runner
from vkmoe.ops.attention_shapes import AttentionShape, AttentionSplit, LatentShape, choose_split
from vkmoe.selftest.attention import AttentionCase, LatentCase
from vkmoe.selftest.comparison import Checks

__all__ = ["attention", "combine", "latent_attention"]


def attention(setting: Setting) -> Iterator[Work]:
    """All of the cache is read, or the last positions of a window."""
    if setting.shapes.latent is None or setting.shapes.name == "tiny":
        for shape in _grouped(setting):
            n_seen = min(shape.context, shape.window or shape.context)
            n_bytes = 2 * shape.cache_bytes // shape.context * n_seen
            yield Work(_text(shape), n_bytes, _check(shape, _split(setting, shape)))


def latent_attention(setting: Setting) -> Iterator[Work]:
    """Keys and values are the same bytes, read once."""
    for shape in _latent(setting):
        yield Work(_text(shape), shape.cache_bytes, _check(shape, _split(setting, shape)))


def combine(setting: Setting) -> Iterator[Work]:
    """The joins of both."""
    shapes: list[AttentionShape | LatentShape] = [*_latent(setting)] or [*_grouped(setting)]
    for shape in shapes:
        split = _split(setting, shape)
        yield Work(f"join of {_text(shape)}", 4 * split.partials_words(shape), _check(shape, split))


def _grouped(setting: Setting) -> Iterator[AttentionShape]:
    model = setting.shapes
    for context in model.contexts:
        for window in (0, model.window) if model.window else (0,):
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
                kv_type="F32" if setting.variant.axis == "F32" else "F16",
                window=window,
                sinks=model.sinks,
            )


def _latent(setting: Setting) -> Iterator[LatentShape]:
    model = setting.shapes
    latent: LatentSpec | None = model.latent
    for context in model.contexts if latent is not None else ():
        assert latent is not None
        yield LatentShape(
            model.n_heads,
            latent.kv_rank,
            latent.rope_dim,
            latent.nope_dim,
            context,
            eps=1e-6,
            scale=latent.query_dim**-0.5,
            kv_type="F32" if setting.variant.axis == "F32" else "F16",
        )


def _split(setting: Setting, shape: AttentionShape | LatentShape) -> AttentionSplit:
    chosen = choose_split(shape, setting.tuning)
    return replace(chosen, subgroup=setting.tuning.subgroup)


def _text(shape: AttentionShape | LatentShape) -> str:
    if isinstance(shape, LatentShape):
        return f"attention at {shape.context}, {shape.n_heads} heads over rows of {shape.row_dim}"
    seen = f" (last {shape.window})" if shape.window else ""
    heads = f"{shape.n_heads}/{shape.n_kv_heads} heads of {shape.head_dim}"
    return f"attention at {shape.context}{seen}, {heads}"


def _check(
    shape: AttentionShape | LatentShape, split: AttentionSplit
) -> Callable[[Runner], Checks]:
    last = shape.context - 1

    def check(runner: Runner) -> Checks:
        if isinstance(shape, LatentShape):
            return LatentCase(runner, shape, split, last).run((last,))
        return AttentionCase(runner, shape, split, last).run((last,))

    return check
