"""What `bench.kernels` runs of each kernel family: a case of the self-test in a real model's shape.

Owns which shapes a family gets and how many bytes one dispatch of it reads. The cases themselves,
their twins and their limits are those of `vkmoe selftest`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bench.parts.kernel_shapes import ModelShapes
from bench.parts.kernel_times import finish_checks
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.link_speed import GROUP_BYTES
from vkmoe.gpu.runner import Runner
from vkmoe.ops.attention import choose_split
from vkmoe.ops.candidates import list_words
from vkmoe.ops.matvec import BLOCK_WEIGHTS
from vkmoe.ops.tuning import Tuning, choose_tuning
from vkmoe.quants import device_row_bytes
from vkmoe.selftest.attention import AttentionCase, qwen3_shape
from vkmoe.selftest.comparison import Checks
from vkmoe.selftest.embed import EmbedCase
from vkmoe.selftest.experts import DownCase, GateUpCase
from vkmoe.selftest.gather import GatherCase
from vkmoe.selftest.link import ReadCase
from vkmoe.selftest.matvec import MatvecCase, ResidualCase
from vkmoe.selftest.router import RouterCase
from vkmoe.selftest.spans import Use
from vkmoe.selftest.suite import Variant
from vkmoe.selftest.vocabulary import CandidatesCase

__all__ = ["WORKS", "Setting", "Work", "tuning_for"]

EMBED_ROWS = 64  # a dispatch reads one row, whatever the vocabulary
GATHERED_TYPE = "Q8_0"
READ_MIB, QUICK_READ_MIB = 64, 1


@dataclass(frozen=True)
class Setting:
    """One variant with one model's shapes."""

    variant: Variant
    tuning: Tuning
    shapes: ModelShapes


@dataclass(frozen=True)
class Work:
    """One dispatch to check and time; `n_bytes` are what it must read, 0: next to nothing."""

    what: str
    n_bytes: int
    check: Callable[[Runner], Checks]
    blocks: tuple[tuple[str, int], ...] = ()  # (type, columns) that must be whole blocks

    @property
    def misfit(self) -> str:
        """Why no model has this type here, or nothing."""
        for kind, columns in self.blocks:
            if columns % BLOCK_WEIGHTS[kind]:
                return f"rows of {columns} are not whole blocks"
        return ""


def tuning_for(suffix: str, info: DeviceInfo) -> Tuning:
    """The tuning that a device of the kind that a mapping is made for would have."""
    kind = "cpu" if suffix.startswith("+blocks") else info.type
    kind = "discrete" if not suffix.startswith("+blocks") and info.is_cpu else kind
    own = choose_tuning(replace(info, type=kind))
    if own.mapping == "blocks":
        return replace(own, load_64bit=suffix == "+blocks64")
    return replace(own, subgroup=suffix == "+subgroup")


def _matvec(setting: Setting) -> Iterator[Work]:
    shapes, kind, tuning = setting.shapes, setting.variant.axis, setting.tuning
    n_partials = -(-shapes.width // tuning.rows)
    stacks = {"q/k/v": shapes.qkv, "head": (shapes.n_vocab,)}
    if kind == "F32":
        stacks["router"] = (shapes.router.n_experts,)
    for what, rows in stacks.items():
        case = MatvecCase(tuning, tuple((kind, n) for n in rows), shapes.width, n_partials)
        yield _weights(f"{what} {'+'.join(map(str, rows))} x {shapes.width}", case.run, kind,
                       sum(rows), shapes.width)  # fmt: skip


def _matvec_residual(setting: Setting) -> Iterator[Work]:
    shapes, kind = setting.shapes, setting.variant.axis
    case = ResidualCase(setting.tuning, kind, shapes.width, shapes.o_columns)
    what = f"o {shapes.width} x {shapes.o_columns}"
    yield _weights(what, case.run, kind, shapes.width, shapes.o_columns)


def _embed(setting: Setting) -> Iterator[Work]:
    width, kind = setting.shapes.width, setting.variant.axis
    case = EmbedCase(setting.tuning, kind, EMBED_ROWS, width, (EMBED_ROWS - 1,))
    yield _weights(f"embed 1 x {width}", case.run, kind, 1, width)


def _gate_up(setting: Setting) -> Iterator[Work]:
    shapes, kind, tuning = setting.shapes, setting.variant.axis, setting.tuning
    for what, use, inner in _uses(setting):
        case = GateUpCase(tuning, (kind, kind), use, inner, shapes.width)
        text = f"{what}gate/up {use.n_slots} x 2 x {inner} x {shapes.width}"
        yield _weights(text, case.run, kind, use.n_slots * 2 * inner, shapes.width)


def _down(setting: Setting) -> Iterator[Work]:
    shapes, kind, tuning = setting.shapes, setting.variant.axis, setting.tuning
    for what, use, inner in _uses(setting):
        case = DownCase(tuning, kind, use, shapes.width, inner)
        text = f"{what}down {use.n_slots} x {shapes.width} x {inner}"
        yield _weights(text, case.run, kind, use.n_slots * shapes.width, inner)


def _uses(setting: Setting) -> Iterator[tuple[str, Use, int]]:
    """Name, slots and inner width of the experts a family gets: routed, kept, shared."""
    shapes = setting.shapes
    n_used = shapes.router.n_used
    keeps = setting.variant.family.endswith("_keep")
    yield "", Use(n_used, n_used, kept=tuple(range(n_used)) if keeps else None), shapes.inner
    if shapes.shared_inner and not keeps:
        yield "shared ", Use(1, 1, routed=False), shapes.shared_inner


def _weights(
    what: str, check: Callable[[Runner], Checks], kind: str, n_rows: int, n_columns: int
) -> Work:
    """Reads [n_rows, n_columns] of a weight type, once."""
    fits = n_columns % BLOCK_WEIGHTS[kind] == 0
    row_bytes = device_row_bytes(kind, n_columns) if fits else 0
    return Work(what, n_rows * row_bytes, check, ((kind, n_columns),))


def _attention(setting: Setting) -> Iterator[Work]:
    """The last position of each context, so that all of the cache is read."""
    shapes, tuning = setting.shapes, setting.tuning
    for context in shapes.contexts:
        shape = qwen3_shape(
            n_heads=shapes.n_heads,
            n_kv_heads=shapes.n_kv_heads,
            head_dim=shapes.head_dim,
            rotary_dim=shapes.head_dim,
            context=context,
            rope_style=shapes.rope_style,
            norm=shapes.norm,
            scale=shapes.head_dim**-0.5,
            kv_type=setting.variant.axis or "F16",
        )
        split = replace(choose_split(shape, tuning), subgroup=tuning.subgroup)

        def check(runner: Runner, shape=shape, split=split) -> Checks:  # type: ignore[no-untyped-def]
            case, checks = AttentionCase(runner, shape, split, shape.context - 1), Checks()
            case.step(shape.context - 1, case.token(), checks)
            return checks

        combine = setting.variant.family == "attention_combine"
        n_bytes = 4 * split.partials_words(shape) if combine else 2 * shape.cache_bytes
        heads = f"{shapes.n_heads}/{shapes.n_kv_heads} heads of {shapes.head_dim}"
        yield Work(f"attention at {context}, {heads}", n_bytes, check)


def _router_topk(setting: Setting) -> Iterator[Work]:
    router = setting.shapes.router

    def check(runner: Runner) -> Checks:
        case, checks = RouterCase(runner, setting.tuning, router), Checks()
        case.run(case.random_logits(1), checks)
        return checks

    yield Work(f"router top {router.n_used} of {router.n_experts}", 4 * router.n_logits, check)


def _candidates(setting: Setting) -> Iterator[Work]:
    n_vocab, tuning = setting.shapes.n_vocab, setting.tuning

    def check(runner: Runner) -> Checks:
        case, checks = CandidatesCase(runner, tuning, n_vocab), Checks()
        case.run(case.random_logits(), checks)
        return checks

    merges = setting.variant.family == "candidates_merge"
    yield Work(
        f"candidates of {n_vocab}", 4 * (list_words(tuning, n_vocab) if merges else n_vocab), check
    )


def _gather(setting: Setting) -> Iterator[Work]:
    """All used experts missed; their three matrices of one type."""
    shapes, n_used = setting.shapes, setting.shapes.router.n_used
    row_bytes = (device_row_bytes(GATHERED_TYPE, n) for n in (shapes.width, shapes.inner))
    span = 2 * shapes.inner * next(row_bytes) + shapes.width * next(row_bytes)

    def check(runner: Runner) -> Checks:
        checks = Checks()
        GatherCase(runner, span, n_used, tuple(range(n_used))).run(checks)
        return checks

    yield Work(f"gather {n_used} x {span} bytes", n_used * span, check)


def _read_words(setting: Setting) -> Iterator[Work]:
    mib = QUICK_READ_MIB if setting.shapes.name == "tiny" else READ_MIB

    def check(runner: Runner) -> Checks:
        checks = Checks()
        ReadCase(runner, (mib << 20) // GROUP_BYTES).run(checks)
        return checks

    yield Work(f"read {mib} MiB", mib << 20, check)


def _finish(setting: Setting) -> Iterator[Work]:
    yield Work("one word", 0, finish_checks)


WORKS: dict[str, Callable[[Setting], Iterator[Work]]] = {
    "matvec": _matvec,
    "matvec_residual": _matvec_residual,
    "expert_gate_up": _gate_up,
    "expert_gate_up_keep": _gate_up,
    "expert_down": _down,
    "expert_down_keep": _down,
    "embed": _embed,
    "attention": _attention,
    "attention_combine": _attention,
    "router_topk": _router_topk,
    "candidates_partial": _candidates,
    "candidates_merge": _candidates,
    "gather": _gather,
    "read_words": _read_words,
    "finish": _finish,
}
