"""What `bench.kernels` runs of the kernels that read weights: matrices, embeddings, experts.

Owns which shapes of a model each gets. The cases are those of `vkmoe selftest`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bench.parts.kernel_work import Setting, Work
from vkmoe.gpu.runner import Runner
from vkmoe.ops.matvec import BLOCK_WEIGHTS
from vkmoe.quants import device_row_bytes
from vkmoe.selftest.comparison import Checks
from vkmoe.selftest.experts import DownCase, GateUpCase, Use
from vkmoe.selftest.matvec import EmbedCase, HeadsCase, MatvecCase, ResidualCase

__all__ = ["down", "embed", "gate_up", "matvec", "matvec_residual"]

EMBED_ROWS = 64  # a dispatch reads one row, whatever the vocabulary


def matvec(setting: Setting) -> Iterator[Work]:
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


def matvec_residual(setting: Setting) -> Iterator[Work]:
    shapes, kind = setting.shapes, setting.variant.axis
    case = ResidualCase(setting.tuning, kind, shapes.width, shapes.o_columns, biased=shapes.biased)
    what = f"o {shapes.width} x {shapes.o_columns}"
    yield _weights(what, case.run, kind, shapes.width, shapes.o_columns)


def embed(setting: Setting) -> Iterator[Work]:
    width, kind = setting.shapes.width, setting.variant.axis
    case = EmbedCase(setting.tuning, kind, EMBED_ROWS, width, (EMBED_ROWS - 1,))
    yield _weights(f"embed 1 x {width}", case.run, kind, 1, width)


def gate_up(setting: Setting) -> Iterator[Work]:
    shapes, kind, tuning = setting.shapes, setting.variant.axis, setting.tuning
    for what, use, inner in _uses(setting):
        case = GateUpCase(
            tuning, (kind, kind), use, inner, shapes.width, activation=shapes.activation
        )
        text = f"{what}gate/up {use.n_slots} x 2 x {inner} x {shapes.width}"
        yield _weights(text, case.run, kind, use.n_slots * 2 * inner, shapes.width)


def down(setting: Setting) -> Iterator[Work]:
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
    kept = tuple(range(n_used)) if keeps else None
    yield "", Use(n_used, n_used, kept=kept, biased=shapes.biased), shapes.inner
    if shapes.shared_inner and not keeps:
        slot = n_used if shapes.router.shared_gate else None
        yield "shared ", Use(1, 1, routed=False, weight_slot=slot), shapes.shared_inner


def _weights(
    what: str, check: Callable[[Runner], Checks], kind: str, n_rows: int, n_columns: int
) -> Work:
    """Reads [n_rows, n_columns] of a weight type, once."""
    fits = n_columns % BLOCK_WEIGHTS[kind] == 0
    row_bytes = device_row_bytes(kind, n_columns) if fits else 0
    return Work(what, n_rows * row_bytes, check, ((kind, n_columns),))
