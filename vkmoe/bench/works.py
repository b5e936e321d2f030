"""This module says what `vkmoe bench kernels` runs: self-test cases in the shapes of real models.

It owns the table of kernel families, which shapes of a model each gets, and the bytes that a
dispatch must read. Attention is that of a token, or of a prompt's rows, at the end of a full cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from vkmoe.bench.clock import EMPTIEST
from vkmoe.bench.shapes import TINY, ModelShapes
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.link_speed import GROUP_BYTES
from vkmoe.gpu.runner import Runner
from vkmoe.ops.attention_shapes import AttentionShape, AttentionSplit, LatentShape, choose_split
from vkmoe.ops.candidates import list_words
from vkmoe.ops.matvec import BLOCK_WEIGHTS
from vkmoe.ops.tuning import Tuning, choose_tuning
from vkmoe.quants import device_row_bytes
from vkmoe.selftest.attention import AttentionCase, LatentCase
from vkmoe.selftest.comparison import Checks
from vkmoe.selftest.experts import DownCase, GateUpCase, Use
from vkmoe.selftest.families import FAMILIES
from vkmoe.selftest.logits import CandidatesCase, RouterCase
from vkmoe.selftest.matvec import EmbedCase, HeadsCase, MatvecCase, ResidualCase, RmsNormCase
from vkmoe.selftest.memory import GatherCase, ReadCase
from vkmoe.selftest.prompt_attention import prompts
from vkmoe.selftest.suite import Variant

__all__ = ["WORKS", "Setting", "Work", "tuning_for"]

EMBED_ROWS = 64  # a dispatch reads one row, whatever the vocabulary
GATHERED_TYPE = "Q8_0"
PROMPT_ROWS = 128
READ_MIB, TINY_READ_MIB = 64, 1


@dataclass(frozen=True)
class Setting:
    """Pairs one variant with one model's shapes."""

    variant: Variant
    tuning: Tuning
    shapes: ModelShapes


@dataclass(frozen=True)
class Work:
    """Holds one dispatch to check and time; `n_bytes` are what it must read, 0: next to nothing."""

    what: str
    n_bytes: int
    check: Callable[[Runner], Checks]
    blocks: tuple[tuple[str, int], ...] = ()  # (type, columns) that must be whole blocks

    @property
    def misfit(self) -> str:
        """Say why no model has this type here, or nothing."""
        for kind, columns in self.blocks:
            if columns % BLOCK_WEIGHTS[kind]:
                return f"rows of {columns} are not whole blocks"
        return ""


def tuning_for(variant: Variant, info: DeviceInfo) -> Tuning:
    """Return the device's own tuning; of a mapping it would not choose, that of those that do."""
    own, chosen_by = choose_tuning(info), FAMILIES[variant.family].chosen_by
    if chosen_by == "nothing" or variant.suffix == getattr(own, chosen_by):
        return own
    if chosen_by == "reduce_suffix":
        return replace(own, subgroup=variant.suffix == "+subgroup")
    if variant.suffix.startswith("+blocks"):
        blocks = choose_tuning(replace(info, type="cpu"))
        return replace(blocks, load_64bit=variant.suffix == "+blocks64")
    lanes = choose_tuning(replace(info, type="discrete" if info.is_cpu else info.type))
    return replace(lanes, subgroup=variant.suffix == "+subgroup")


# ----- kernels that read weights -----


def _matvec(setting: Setting) -> Iterator[Work]:
    shapes, kind, tuning = setting.shapes, setting.variant.axis, setting.tuning
    n_partials = -(-shapes.width // tuning.rows)
    stacks = {"q/k/v": shapes.qkv, "head": (shapes.n_vocab,)}
    if kind == "F32":
        stacks["router"] = (shapes.router.n_experts,)
    for what, rows in stacks.items():
        biased = shapes.biased and what != "head"
        segments = tuple((kind, n) for n in rows)
        case = MatvecCase(tuning, segments, shapes.width, n_partials, biased=biased)
        text = f"{what} {'+'.join(map(str, rows))} x {shapes.width}"
        yield _weights(text, case.run, kind, sum(rows), shapes.width)
    if shapes.latent is not None:
        latent, n_heads = shapes.latent, shapes.n_heads
        heads = {"k": (latent.kv_rank, latent.nope_dim), "v": (latent.value_dim, latent.kv_rank)}
        for what, (n_rows, n_columns) in heads.items():
            stack = HeadsCase(tuning, kind, n_heads, n_rows, n_columns)
            text = f"heads of {what} {n_heads} x {n_rows} x {n_columns}"
            yield _weights(text, stack.run, kind, n_heads * n_rows, n_columns)


def _matvec_residual(setting: Setting) -> Iterator[Work]:
    shapes, kind = setting.shapes, setting.variant.axis
    case = ResidualCase(setting.tuning, kind, shapes.width, shapes.o_columns, biased=shapes.biased)
    what = f"o {shapes.width} x {shapes.o_columns}"
    yield _weights(what, case.run, kind, shapes.width, shapes.o_columns)


def _embed(setting: Setting) -> Iterator[Work]:
    width, kind = setting.shapes.width, setting.variant.axis
    case = EmbedCase(setting.tuning, kind, EMBED_ROWS, width, (EMBED_ROWS - 1,))
    yield _weights(f"embed 1 x {width}", case.run, kind, 1, width)


def _gate_up(setting: Setting) -> Iterator[Work]:
    shapes, kind, tuning = setting.shapes, setting.variant.axis, setting.tuning
    for what, use, inner in _uses(setting):
        case = GateUpCase(
            tuning, (kind, kind), use, inner, shapes.width, activation=shapes.activation
        )
        text = f"{what}gate/up {use.n_slots} x 2 x {inner} x {shapes.width}"
        yield _weights(text, case.run, kind, use.n_slots * 2 * inner, shapes.width)


def _down(setting: Setting) -> Iterator[Work]:
    shapes, kind, tuning = setting.shapes, setting.variant.axis, setting.tuning
    for what, use, inner in _uses(setting):
        case = DownCase(tuning, kind, use, shapes.width, inner)
        text = f"{what}down {use.n_slots} x {shapes.width} x {inner}"
        yield _weights(text, case.run, kind, use.n_slots * shapes.width, inner)


def _uses(setting: Setting) -> Iterator[tuple[str, Use, int]]:
    """Yield name, slots and inner width of the experts a family gets: routed, kept, shared."""
    shapes = setting.shapes
    n_used = shapes.router.n_used
    keeps = setting.variant.family.endswith("_keep")
    kept = tuple(range(n_used)) if keeps else None
    yield "", Use(n_used, n_used, kept=kept, biased=shapes.biased), shapes.inner
    if shapes.shared_inner and not keeps:
        slot = n_used if shapes.router.shared_gate else None
        yield "shared ", Use(1, 1, routed=False, weight_slot=slot), shapes.shared_inner


def _weights(
    what: str, check: Callable[[Runner], Checks], kind: str, n_rows: int, n_columns: int
) -> Work:
    """Describe what reads [n_rows, n_columns] of a weight type, once."""
    fits = n_columns % BLOCK_WEIGHTS[kind] == 0
    row_bytes = device_row_bytes(kind, n_columns) if fits else 0
    return Work(what, n_rows * row_bytes, check, ((kind, n_columns),))


# ----- attention -----


def _attention(setting: Setting) -> Iterator[Work]:
    """Read all of the cache, or the last positions of a window."""
    if setting.shapes.latent is None or setting.shapes is TINY:
        for shape in _grouped(setting):
            n_seen = min(shape.context, shape.window or shape.context)
            n_bytes = 2 * shape.cache_bytes // shape.context * n_seen
            yield Work(_attention_text(shape), n_bytes, _attended(shape, _split(setting, shape)))


def _latent_attention(setting: Setting) -> Iterator[Work]:
    """Read keys and values that are the same bytes once."""
    for shape in _latent(setting):
        yield Work(
            _attention_text(shape), shape.cache_bytes, _attended(shape, _split(setting, shape))
        )


def _prompts(setting: Setting) -> Iterator[Work]:
    """Take the last rows of a full cache as a prompt; keys and values are read once for all."""
    if setting.shapes.latent is None or setting.shapes is TINY:
        for shape in _grouped(setting):
            n_words = 2 * PROMPT_ROWS * shape.n_heads * shape.head_dim
            n_seen = min(
                shape.context, shape.window + PROMPT_ROWS if shape.window else shape.context
            )
            n_bytes = 2 * shape.cache_bytes // shape.context * n_seen
            if setting.variant.family == "append_rows":
                n_words, n_bytes = 2 * PROMPT_ROWS * shape.qkv_width, 0
            yield _prompt_work(setting, shape, 4 * n_words + n_bytes)


def _latent_prompts(setting: Setting) -> Iterator[Work]:
    for shape in _latent(setting):
        n_words = PROMPT_ROWS * shape.n_heads * (2 * shape.kv_rank + shape.rope_dim)
        n_bytes = shape.cache_bytes
        if setting.variant.family == "append_latent_rows":
            rotary = 2 * shape.n_heads * shape.rope_dim
            n_words, n_bytes = PROMPT_ROWS * (rotary + 2 * shape.row_dim), 0
        yield _prompt_work(setting, shape, 4 * n_words + n_bytes)


def _prompt_attention(setting: Setting) -> Iterator[Work]:
    yield from _prompts(setting)
    yield from _latent_prompts(setting)


def _prompt_work(setting: Setting, shape: AttentionShape | LatentShape, n_bytes: int) -> Work:
    def check(runner: Runner) -> Checks:
        first, checks = shape.context - PROMPT_ROWS, Checks()
        case = prompts(runner, shape, setting.tuning, PROMPT_ROWS, slice(first))
        case.step(case.draw(range(first, shape.context)), checks)
        return checks

    return Work(f"{PROMPT_ROWS} rows, {_attention_text(shape)}", n_bytes, check)


def _combine(setting: Setting) -> Iterator[Work]:
    """Join what the splits of either kind left."""
    shapes: list[AttentionShape | LatentShape] = [*_latent(setting)] or [*_grouped(setting)]
    for shape in shapes:
        split = _split(setting, shape)
        yield Work(
            f"join of {_attention_text(shape)}",
            4 * split.partials_words(shape),
            _attended(shape, split),
        )


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
    latent = model.latent
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


def _attention_text(shape: AttentionShape | LatentShape) -> str:
    if isinstance(shape, LatentShape):
        return f"attention at {shape.context}, {shape.n_heads} heads over rows of {shape.row_dim}"
    seen = f" (last {shape.window})" if shape.window else ""
    heads = f"{shape.n_heads}/{shape.n_kv_heads} heads of {shape.head_dim}"
    return f"attention at {shape.context}{seen}, {heads}"


def _attended(
    shape: AttentionShape | LatentShape, split: AttentionSplit
) -> Callable[[Runner], Checks]:
    last = shape.context - 1

    def check(runner: Runner) -> Checks:
        if isinstance(shape, LatentShape):
            return LatentCase(runner, shape, split, last).run((last,))
        return AttentionCase(runner, shape, split, last).run((last,))

    return check


# ----- the others -----


def _router_topk(setting: Setting) -> Iterator[Work]:
    router = setting.shapes.router
    case = RouterCase(setting.tuning, router)

    yield Work(f"router top {router.n_used} of {router.n_experts}", 4 * router.n_logits, case.run)


def _rms_norm(setting: Setting) -> Iterator[Work]:
    width = setting.shapes.width
    yield Work(f"norm of {width}", 8 * width, RmsNormCase(setting.tuning, width).run)


def _candidates(setting: Setting) -> Iterator[Work]:
    n_vocab, tuning = setting.shapes.n_vocab, setting.tuning

    merges = setting.variant.family == "candidates_merge"
    n_words = list_words(tuning, n_vocab) if merges else n_vocab
    yield Work(f"candidates of {n_vocab}", 4 * n_words, CandidatesCase(tuning, n_vocab).run)


def _gather(setting: Setting) -> Iterator[Work]:
    """Copy all used experts, as if they were missed; their three matrices are of one type."""
    shapes, n_used = setting.shapes, setting.shapes.router.n_used
    row_bytes = (device_row_bytes(GATHERED_TYPE, n) for n in (shapes.width, shapes.inner))
    span = 2 * shapes.inner * next(row_bytes) + shapes.width * next(row_bytes)

    case = GatherCase(span, n_used, tuple(range(n_used)))
    yield Work(f"gather {n_used} x {span} bytes", n_used * span, case.run)


def _read_words(setting: Setting) -> Iterator[Work]:
    mib = TINY_READ_MIB if setting.shapes is TINY else READ_MIB

    yield Work(f"read {mib} MiB", mib << 20, ReadCase((mib << 20) // GROUP_BYTES).run)


def _finish(setting: Setting) -> Iterator[Work]:
    yield Work("one word", 0, EMPTIEST.run)


WORKS: dict[str, Callable[[Setting], Iterator[Work]]] = {
    "matvec": _matvec,
    "matvec_residual": _matvec_residual,
    "expert_gate_up": _gate_up,
    "expert_gate_up_keep": _gate_up,
    "expert_down": _down,
    "expert_down_keep": _down,
    "embed": _embed,
    "attention": _attention,
    "latent_attention": _latent_attention,
    "attention_combine": _combine,
    "append_rows": _prompts,
    "append_latent_rows": _latent_prompts,
    "prompt_attention": _prompt_attention,
    "router_topk": _router_topk,
    "rms_norm": _rms_norm,
    "candidates_partial": _candidates,
    "candidates_merge": _candidates,
    "gather": _gather,
    "read_words": _read_words,
    "finish": _finish,
}
