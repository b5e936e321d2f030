"""This module says what `vkmoe bench kernels` runs: self-test cases in the shapes of real models.

It owns the table of kernel families, which shapes of a model each gets, and the bytes that a
dispatch must read. Attention is that of a token, or of a prompt's rows, at the end of a full cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from vkmoe.bench.clock import EMPTIEST
from vkmoe.bench.shapes import TINY, KernelShapes
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.link_speed import GROUP_BYTES
from vkmoe.gpu.runner import Runner
from vkmoe.kv_types import both
from vkmoe.ops.attention_shapes import AttentionShape, AttentionSplit, LatentShape, choose_split
from vkmoe.ops.candidates import list_words
from vkmoe.ops.matvec import BLOCK_WEIGHTS
from vkmoe.ops.prompt_experts import places_of_round
from vkmoe.ops.tuning import Tuning, choose_tuning
from vkmoe.quants import device_row_bytes
from vkmoe.selftest.attention import AttentionCase, LatentCase
from vkmoe.selftest.comparison import Checks
from vkmoe.selftest.experts import DownCase, GateUpCase, Use
from vkmoe.selftest.families import FAMILIES
from vkmoe.selftest.handover import FindCase, JoinCase
from vkmoe.selftest.logits import CandidatesCase, PickCase, RouterCase
from vkmoe.selftest.matmul import Batch, ExpertMatmulCase, MatmulCase
from vkmoe.selftest.matvec import EmbedCase, HeadsCase, MatvecCase, ResidualCase, RmsNormCase
from vkmoe.selftest.memory import GatherCase, ReadCase
from vkmoe.selftest.prompt_attention import prompts
from vkmoe.selftest.prompt_experts import BringCase, CombineCase, RowsInUse, TilesCase
from vkmoe.selftest.suite import Variant

__all__ = ["WORKS", "Setup", "Work", "selecting"]

EMBED_ROWS = 64  # a dispatch reads one row, whatever the vocabulary
MATMUL_ROWS = 32
GATHERED_TYPE = "Q8_0"
ROUTER_TYPES = ("F32", "F16", "BF16")  # which converters leave routers in
ATTENTION_ROWS = 128
CACHES = (both("f16"), both("f32"), both("q8_0"))  # the usual ones first
READ_MIB, TINY_READ_MIB = 64, 1
PROMPT_ROWS, TILE_COLUMNS = (128, 512), 32


@dataclass(frozen=True)
class Setup:
    """Pairs one variant with one model's shapes."""

    variant: Variant
    tuning: Tuning
    shapes: KernelShapes


@dataclass(frozen=True)
class Work:
    """Holds one dispatch to check and time; `n_bytes` are what it must read, 0: next to nothing."""

    what: str
    n_bytes: int
    check: Callable[[Runner], Checks]
    n_weights: int = 0  # among what it reads, each counted once
    role: str = ""  # of the matrix: of each role a model file has types of its own
    blocks: tuple[tuple[str, int], ...] = ()  # (type, columns) that must be whole blocks
    is_usual: bool = True  # whether it is measured where only some types are wanted

    @property
    def misfit(self) -> str:
        """Say why no model has this type here, or nothing."""
        for kind, columns in self.blocks:
            if columns % BLOCK_WEIGHTS[kind]:
                return f"rows of {columns} are not whole blocks"
        return ""


def selecting(variant: Variant, own: Tuning, info: DeviceInfo) -> Tuning:
    """Return the device's `own` tuning; of a mapping it has not chosen, that of those that do."""
    chosen_by = FAMILIES[variant.family].chosen_by
    if chosen_by == "nothing" or variant.suffix == getattr(own, chosen_by):
        return own
    if chosen_by == "reduce_suffix":
        return replace(own, subgroup=variant.suffix == "+subgroup")
    if variant.suffix.startswith("+blocks"):
        blocks = choose_tuning(replace(info, type="cpu"))
        return replace(blocks, load_64bit=variant.suffix == "+blocks64")
    lanes = choose_tuning(replace(info, type="discrete" if info.is_cpu else info.type))
    suffix = variant.suffix
    return replace(lanes, subgroup=suffix == "+subgroup", half_tiles=suffix == "+half")


# ----- kernels that read weights -----


def _matvec(setup: Setup) -> Iterator[Work]:
    shapes, kind, tuning = setup.shapes, setup.variant.axis, setup.tuning
    n_partials = -(-shapes.width // tuning.rows)
    stacks = {"q/k/v": shapes.qkv, "head": (shapes.n_vocab,)}
    if kind in ROUTER_TYPES:
        stacks["router"] = (shapes.router.n_experts,)
    for role, rows in stacks.items():
        biased = shapes.biased and role != "head"
        segments = tuple((kind, n) for n in rows)
        case = MatvecCase(tuning, segments, shapes.width, n_partials, biased=biased)
        text = f"{'+'.join(map(str, rows))} x {shapes.width}"
        yield _weights(setup, role, text, case.run, (sum(rows), shapes.width))
    if shapes.latent is not None:
        latent, n_heads = shapes.latent, shapes.n_heads
        heads = {"k": (latent.kv_rank, latent.nope_dim), "v": (latent.value_dim, latent.kv_rank)}
        for what, (n_rows, n_columns) in heads.items():
            stack = HeadsCase(tuning, kind, n_heads, n_rows, n_columns)
            text = f"{n_heads} x {n_rows} x {n_columns}"
            form = n_heads * n_rows, n_columns
            yield _weights(setup, f"heads of {what}", text, stack.run, form)


def _matvec_residual(setup: Setup) -> Iterator[Work]:
    shapes, kind = setup.shapes, setup.variant.axis
    case = ResidualCase(setup.tuning, kind, shapes.width, shapes.o_columns, biased=shapes.biased)
    text = f"{shapes.width} x {shapes.o_columns}"
    yield _weights(setup, "o", text, case.run, (shapes.width, shapes.o_columns))


def _embed(setup: Setup) -> Iterator[Work]:
    width, kind = setup.shapes.width, setup.variant.axis
    case = EmbedCase(setup.tuning, kind, EMBED_ROWS, width, (EMBED_ROWS - 1,))
    yield _weights(setup, "embed", f"1 x {width}", case.run, (1, width))


def _gate_up(setup: Setup) -> Iterator[Work]:
    shapes, kind, tuning = setup.shapes, setup.variant.axis, setup.tuning
    for what, use, inner in _uses(setup):
        case = GateUpCase(
            tuning, (kind, kind), use, inner, shapes.width, activation=shapes.activation
        )
        text = f"{use.n_slots} x 2 x {inner} x {shapes.width}"
        form = use.n_slots * 2 * inner, shapes.width
        yield _weights(setup, f"{what}gate/up", text, case.run, form)


def _down(setup: Setup) -> Iterator[Work]:
    shapes, kind, tuning = setup.shapes, setup.variant.axis, setup.tuning
    for what, use, inner in _uses(setup):
        case = DownCase(tuning, kind, use, shapes.width, inner)
        text = f"{use.n_slots} x {shapes.width} x {inner}"
        form = use.n_slots * shapes.width, inner
        yield _weights(setup, f"{what}down", text, case.run, form)


def _matmul(setup: Setup) -> Iterator[Work]:
    """Multiply a prompt's rows."""
    shapes, kind, tuning = setup.shapes, setup.variant.axis, setup.tuning
    batch = _prompt(setup)
    segments = tuple((kind, n) for n in shapes.qkv)
    case = MatmulCase(tuning, segments, shapes.width, batch, biased=shapes.biased)
    text = f"{batch.most} rows, {'+'.join(map(str, shapes.qkv))} x {shapes.width}"
    yield _weights(setup, "q/k/v", text, case.run, (sum(shapes.qkv), shapes.width))


def _matmul_residual(setup: Setup) -> Iterator[Work]:
    shapes, kind, batch = setup.shapes, setup.variant.axis, _prompt(setup)
    segments = ((kind, shapes.width),)
    case = MatmulCase(setup.tuning, segments, shapes.o_columns, batch, residual=True)
    text = f"{batch.most} rows, {shapes.width} x {shapes.o_columns}"
    yield _weights(setup, "o", text, case.run, (shapes.width, shapes.o_columns))


def _expert_matmul(setup: Setup) -> Iterator[Work]:
    """Multiply a prompt's rows with their experts, of which few are left unused."""
    shapes, kind, batch = setup.shapes, setup.variant.axis, _prompt(setup)
    router, inner, width = shapes.router, shapes.inner, shapes.width
    gate_up = setup.variant.family == "expert_matmul_gate_up"
    types, n_rows, n_columns = ((kind, kind), inner, width) if gate_up else ((kind,), width, inner)
    case = ExpertMatmulCase(
        setup.tuning, types, n_rows, n_columns, batch, router.n_experts, router.n_used
    )
    name = "gate/up" if gate_up else "down"
    text = f"{batch.most} rows, {router.n_experts} x {n_rows} x {n_columns}"
    n_read = min(router.n_experts, batch.most * router.n_used) * len(types) * n_rows
    yield _weights(setup, name, text, case.run, (n_read, n_columns))


def _prompt(setup: Setup) -> Batch:
    return Batch(tuple(range(4 if setup.shapes is TINY else MATMUL_ROWS)))


def _uses(setup: Setup) -> Iterator[tuple[str, Use, int]]:
    """Yield name, slots and inner width of the experts a family gets: routed, kept, shared."""
    shapes = setup.shapes
    n_used = shapes.router.n_used
    keeps = setup.variant.family.endswith("_keep")
    kept = tuple(range(n_used)) if keeps else None
    yield "", Use(n_used, n_used, kept=kept, biased=shapes.biased), shapes.inner
    if shapes.shared_inner and not keeps:
        slot = n_used if shapes.router.shared_gate else None
        yield "shared ", Use(1, 1, routed=False, weight_slot=slot), shapes.shared_inner


def _weights(
    setup: Setup, role: str, text: str, check: Callable[[Runner], Checks], form: tuple[int, int]
) -> Work:
    """Describe what reads a matrix [n_rows, n_columns] of a weight type once; `text` shows it."""
    kind, (n_rows, n_columns) = setup.variant.axis, form
    fits = n_columns % BLOCK_WEIGHTS[kind] == 0
    row_bytes = device_row_bytes(kind, n_columns, setup.tuning.layout) if fits else 0
    n_weights = n_rows * n_columns
    return Work(f"{role} {text}", n_rows * row_bytes, check, n_weights, role, ((kind, n_columns),))


# ----- attention -----


def _attention(setup: Setup) -> Iterator[Work]:
    """Read all of the cache, or the last positions of a window."""
    if setup.shapes.latent is None or setup.shapes is TINY:
        for shape in _grouped(setup):
            n_seen = min(shape.context, shape.window or shape.context)
            n_bytes = sum(shape.cache_bytes) // shape.context * n_seen
            yield _decoding_work(setup, shape, n_bytes)


def _latent_attention(setup: Setup) -> Iterator[Work]:
    """Read keys and values that are the same bytes once."""
    for shape in _latent(setup):
        yield _decoding_work(setup, shape, sum(shape.cache_bytes))


def _decoding_work(setup: Setup, shape: AttentionShape | LatentShape, n_bytes: int) -> Work:
    check = _attended(shape, _split(setup, shape))
    return Work(_attention_text(shape), n_bytes, check, is_usual=_has_usual_caches(shape))


def _has_usual_caches(shape: AttentionShape | LatentShape) -> bool:
    return shape.kv_types == CACHES[0]


def _grouped_prompts(setup: Setup) -> Iterator[Work]:
    """Take the last rows of a full cache as a prompt; keys and values are read once for all."""
    if setup.shapes.latent is None or setup.shapes is TINY:
        for shape in _grouped(setup):
            n_words = 2 * ATTENTION_ROWS * shape.n_heads * shape.head_dim
            n_seen = min(
                shape.context, shape.window + ATTENTION_ROWS if shape.window else shape.context
            )
            n_bytes = sum(shape.cache_bytes) // shape.context * n_seen
            if setup.variant.family == "append_rows":
                n_words, n_bytes = 2 * ATTENTION_ROWS * shape.qkv_width, 0
            yield _prompt_work(setup, shape, 4 * n_words + n_bytes)


def _latent_prompts(setup: Setup) -> Iterator[Work]:
    for shape in _latent(setup):
        n_words = ATTENTION_ROWS * shape.n_heads * (2 * shape.kv_rank + shape.rope_dim)
        n_bytes = sum(shape.cache_bytes)
        if setup.variant.family == "append_latent_rows":
            rotary = 2 * shape.n_heads * shape.rope_dim
            n_words, n_bytes = ATTENTION_ROWS * (rotary + 2 * shape.row_dim), 0
        yield _prompt_work(setup, shape, 4 * n_words + n_bytes)


def _prompt_attention(setup: Setup) -> Iterator[Work]:
    yield from _grouped_prompts(setup)
    yield from _latent_prompts(setup)


def _prompt_work(setup: Setup, shape: AttentionShape | LatentShape, n_bytes: int) -> Work:
    def check(runner: Runner) -> Checks:
        first, checks = shape.context - ATTENTION_ROWS, Checks()
        case = prompts(runner, shape, setup.tuning, ATTENTION_ROWS, slice(first))
        case.step(case.draw(range(first, shape.context)), checks)
        return checks

    text = f"{ATTENTION_ROWS} rows, {_attention_text(shape)}"
    return Work(text, n_bytes, check, is_usual=_has_usual_caches(shape))


def _combine(setup: Setup) -> Iterator[Work]:
    """Join what the splits of either kind left."""
    shapes: list[AttentionShape | LatentShape] = [*_latent(setup)] or [*_grouped(setup)]
    for shape in filter(_has_usual_caches, shapes):  # whose type has no say
        split = _split(setup, shape)
        yield Work(
            f"join of {_attention_text(shape)}",
            4 * split.partials_words(shape),
            _attended(shape, split),
        )


def _grouped(setup: Setup) -> Iterator[AttentionShape]:
    model = setup.shapes
    windows = (0, model.window) if model.window else (0,)
    for kv_types, context in product(CACHES, model.contexts):
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


def _latent(setup: Setup) -> Iterator[LatentShape]:
    model = setup.shapes
    latent = model.latent
    for kv_types, context in product(CACHES, model.contexts if latent is not None else ()):
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


def _split(setup: Setup, shape: AttentionShape | LatentShape) -> AttentionSplit:
    chosen = choose_split(shape, setup.tuning)
    return replace(chosen, subgroup=setup.tuning.subgroup)


def _attention_text(shape: AttentionShape | LatentShape) -> str:
    cached = "" if _has_usual_caches(shape) else f", cached as {shape.kv_types}"
    if isinstance(shape, LatentShape):
        heads = f"{shape.n_heads} heads over rows of {shape.row_dim}"
        return f"attention at {shape.context}, {heads}{cached}"
    seen = f" (last {shape.window})" if shape.window else ""
    heads = f"{shape.n_heads}/{shape.n_kv_heads} heads of {shape.head_dim}"
    return f"attention at {shape.context}{seen}, {heads}{cached}"


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


def _router_topk(setup: Setup) -> Iterator[Work]:
    router = setup.shapes.router
    case = RouterCase(setup.tuning, router)

    yield Work(f"router top {router.n_used} of {router.n_experts}", 4 * router.n_logits, case.run)


def _rms_norm(setup: Setup) -> Iterator[Work]:
    width = setup.shapes.width
    yield Work(f"norm of {width}", 8 * width, RmsNormCase(setup.tuning, width).run)


def _candidates(setup: Setup) -> Iterator[Work]:
    n_vocab, tuning = setup.shapes.n_vocab, setup.tuning

    merges = setup.variant.family == "candidates_merge"
    n_words = list_words(tuning, n_vocab) if merges else n_vocab
    yield Work(f"candidates of {n_vocab}", 4 * n_words, CandidatesCase(tuning, n_vocab).run)


def _pick_rows(setup: Setup) -> Iterator[Work]:
    width, n_rows = setup.shapes.width, 24  # of which 8 want logits
    case = PickCase(setup.tuning, n_rows, width)
    yield Work(f"8 of {n_rows} rows of {width}", 4 * 8 * width, case.run)


def _span_bytes(setup: Setup) -> int:
    shapes = setup.shapes
    of_width, of_inner = (device_row_bytes(GATHERED_TYPE, n) for n in (shapes.width, shapes.inner))
    return 2 * shapes.inner * of_width + shapes.width * of_inner


def _gather(setup: Setup) -> Iterator[Work]:
    """Copy all used experts, as if they were missed; their three matrices are of one type."""
    span, n_used = _span_bytes(setup), setup.shapes.router.n_used
    case = GatherCase(span, n_used, tuple(range(n_used)))
    yield Work(f"gather {n_used} x {span} bytes", n_used * span, case.run)


def _bring_experts(setup: Setup) -> Iterator[Work]:
    span, n_experts = _span_bytes(setup), setup.shapes.router.n_experts
    n_places = places_of_round(n_experts, span)
    case = BringCase(setup.tuning, span, n_places, n_places)
    yield Work(f"bring {n_places} x {span} bytes", n_places * span, case.run)


def _expert_tiles(setup: Setup) -> Iterator[Work]:
    router = setup.shapes.router
    for rows in _prompts(setup):
        case = TilesCase(setup.tuning, rows, TILE_COLUMNS, absent=0.0)
        n_pairs = rows.routed.n_pairs
        yield Work(f"sort {n_pairs} pairs by {router.n_experts} experts", 8 * n_pairs, case.run)


def _combine_rows(setup: Setup) -> Iterator[Work]:
    width = setup.shapes.width
    for rows in _prompts(setup):
        shared = rows.shape.shared_gate if setup.shapes.shared_inner else None
        case = CombineCase(setup.tuning, rows, width, shared)
        n_read = rows.routed.n_pairs + (1 if shared is None else 2) * rows.n_rows
        what = f"sums of {rows.n_rows} rows, {rows.shape.n_used} experts each"
        yield Work(what, 4 * width * n_read, case.run)


def _find_experts(setup: Setup) -> Iterator[Work]:
    router = setup.shapes.router
    case = FindCase(setup.tuning, router, absent=(0.5,))
    yield Work(f"find {router.n_used} of {router.n_experts}", 8 * router.n_used, case.run)


def _join_rows(setup: Setup) -> Iterator[Work]:
    width = setup.shapes.width
    yield Work(f"join {width}", 4 * 3 * width, JoinCase(setup.tuning, width).run)


def _prompts(setup: Setup) -> Iterator[RowsInUse]:
    for n_rows in (1, 5) if setup.shapes is TINY else PROMPT_ROWS:
        yield RowsInUse(setup.shapes.router, n_rows, n_rows)


def _read_words(setup: Setup) -> Iterator[Work]:
    mib = TINY_READ_MIB if setup.shapes is TINY else READ_MIB

    yield Work(f"read {mib} MiB", mib << 20, ReadCase((mib << 20) // GROUP_BYTES).run)


def _finish(setup: Setup) -> Iterator[Work]:
    yield Work("one word", 0, EMPTIEST.run)


WORKS: dict[str, Callable[[Setup], Iterator[Work]]] = {
    "matvec": _matvec,
    "matvec_residual": _matvec_residual,
    "expert_gate_up": _gate_up,
    "expert_gate_up_keep": _gate_up,
    "expert_down": _down,
    "expert_down_keep": _down,
    "matmul": _matmul,
    "matmul_residual": _matmul_residual,
    "expert_matmul_gate_up": _expert_matmul,
    "expert_matmul_down": _expert_matmul,
    "embed": _embed,
    "attention": _attention,
    "latent_attention": _latent_attention,
    "attention_combine": _combine,
    "append_rows": _grouped_prompts,
    "append_latent_rows": _latent_prompts,
    "prompt_attention": _prompt_attention,
    "router_topk": _router_topk,
    "rms_norm": _rms_norm,
    "candidates_partial": _candidates,
    "candidates_merge": _candidates,
    "pick_rows": _pick_rows,
    "gather": _gather,
    "expert_tiles": _expert_tiles,
    "bring_experts": _bring_experts,
    "combine_rows": _combine_rows,
    "find_experts": _find_experts,
    "join_rows": _join_rows,
    "read_words": _read_words,
    "finish": _finish,
}
