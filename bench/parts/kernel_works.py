"""What `bench.kernels` runs of each kernel family: a case of the self-test in a real model's shape.

Owns the table of families, and those that read no weights; the others are in kernel_weights.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bench.parts import kernel_attention, kernel_weights
from bench.parts.kernel_times import EMPTIEST
from bench.parts.kernel_work import Setting, Work
from vkmoe.gpu.link_speed import GROUP_BYTES
from vkmoe.ops.candidates import list_words
from vkmoe.quants import device_row_bytes
from vkmoe.selftest.logits import CandidatesCase, RouterCase
from vkmoe.selftest.matvec import RmsNormCase
from vkmoe.selftest.memory import GatherCase, ReadCase

__all__ = ["WORKS"]

GATHERED_TYPE = "Q8_0"
READ_MIB, QUICK_READ_MIB = 64, 1


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
    """All used experts missed; their three matrices of one type."""
    shapes, n_used = setting.shapes, setting.shapes.router.n_used
    row_bytes = (device_row_bytes(GATHERED_TYPE, n) for n in (shapes.width, shapes.inner))
    span = 2 * shapes.inner * next(row_bytes) + shapes.width * next(row_bytes)

    case = GatherCase(span, n_used, tuple(range(n_used)))
    yield Work(f"gather {n_used} x {span} bytes", n_used * span, case.run)


def _read_words(setting: Setting) -> Iterator[Work]:
    mib = QUICK_READ_MIB if setting.shapes.name == "tiny" else READ_MIB

    yield Work(f"read {mib} MiB", mib << 20, ReadCase((mib << 20) // GROUP_BYTES).run)


def _finish(setting: Setting) -> Iterator[Work]:
    yield Work("one word", 0, EMPTIEST.run)


WORKS: dict[str, Callable[[Setting], Iterator[Work]]] = {
    "matvec": kernel_weights.matvec,
    "matvec_residual": kernel_weights.matvec_residual,
    "expert_gate_up": kernel_weights.gate_up,
    "expert_gate_up_keep": kernel_weights.gate_up,
    "expert_down": kernel_weights.down,
    "expert_down_keep": kernel_weights.down,
    "embed": kernel_weights.embed,
    "attention": kernel_attention.attention,
    "latent_attention": kernel_attention.latent_attention,
    "attention_combine": kernel_attention.combine,
    "router_topk": _router_topk,
    "rms_norm": _rms_norm,
    "candidates_partial": _candidates,
    "candidates_merge": _candidates,
    "gather": _gather,
    "read_words": _read_words,
    "finish": _finish,
}
