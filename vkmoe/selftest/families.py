"""The cases of each kernel family: small shapes for the comparison, larger ones for the speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from vkmoe.gpu.link_speed import GROUP_BYTES
from vkmoe.gpu.runner import Runner
from vkmoe.ops.attention_shapes import AttentionShape, AttentionSplit, LatentShape, choose_split
from vkmoe.ops.gather import GROUP_BYTES as COPIED_BYTES
from vkmoe.ops.router import RouterShape
from vkmoe.reference.attention import first_seen
from vkmoe.selftest.attention import AttentionCase, gpt_oss_shape, qwen3_shape
from vkmoe.selftest.comparison import Checks
from vkmoe.selftest.dot_families import (
    KEEPING,
    N_SLOTS,
    PLAIN,
    down_cases,
    embed_cases,
    gate_up_cases,
    matvec_cases,
    matvec_residual_cases,
)
from vkmoe.selftest.gather import GatherCase
from vkmoe.selftest.latent_attention import LatentCase, deepseek2_shape
from vkmoe.selftest.link import ReadCase
from vkmoe.selftest.rms_norm import RmsNormCase
from vkmoe.selftest.router import RouterCase, random_bias
from vkmoe.selftest.setting import (
    CPU_BYTES,
    GPU_BYTES,
    Compare,
    Family,
    Measured,
    Setting,
    compared,
    timed,
)
from vkmoe.selftest.vocabulary import CandidatesCase, FinishCase

__all__ = ["FAMILIES", "Family", "Measured", "Setting"]

ROUTERS = (  # and places for misses: for each to be gathered to, for some to be stored to
    (RouterShape(128, 8), 2),
    (RouterShape(60, 4, renormalise=False, shared_gate=True), 4),
    (RouterShape(257, 7, gating="sigmoid", scale=0.5), 0),
    (RouterShape(160, 6, renormalise=False, scale=16.0, n_groups=8, n_groups_used=3), 0),
    (RouterShape(256, 8, gating="sigmoid", scale=2.5, n_groups=8, n_groups_used=4), 0, True),
    (RouterShape(33, 5), 0, True),
)
POSITIONS, POSITIONS_IN_WINDOWS = (0, 31, 32, 150), (120, 150)


def _split(setting: Setting, shape: AttentionShape | LatentShape) -> AttentionSplit:
    """Three splits, in the setting's variant."""
    split = choose_split(shape, setting.tuning, n_splits=3)
    return replace(split, subgroup=setting.tuning.subgroup)


def _attention(setting: Setting) -> Iterator[Measured]:
    """Everything is seen; then with a window and sinks, what lies outside never written."""
    kv_type = setting.axis or "F32"

    def compare(runner: Runner, shape: AttentionShape, positions: Sequence[int]) -> Checks:
        unseen = first_seen(positions[0], shape.window)
        split = _split(setting, shape)
        return AttentionCase(runner, shape, split, positions[-1], n_unseen=unseen).run(positions)

    yield compared(
        setting,
        "",
        partial(compare, shape=qwen3_shape(kv_type=kv_type), positions=POSITIONS),
        partial(compare, shape=gpt_oss_shape(kv_type=kv_type), positions=POSITIONS_IN_WINDOWS),
    )


def _latent_attention(setting: Setting) -> Iterator[Measured]:
    shape = deepseek2_shape(kv_type=setting.axis)

    def compare(runner: Runner) -> Checks:
        return LatentCase(runner, shape, _split(setting, shape), POSITIONS[-1]).run(POSITIONS)

    yield compared(setting, "", compare)


def _router_topk(setting: Setting) -> Iterator[Measured]:
    def compare(shape: RouterShape, n_landing: int, biased: bool = False) -> Compare:
        def run(runner: Runner) -> Checks:
            gather = n_landing == shape.n_used
            bias = random_bias(shape.n_experts) if biased else None
            case = RouterCase(runner, setting.tuning, shape, n_landing, gather, bias)
            checks = Checks()
            case.run(case.random_logits(1), checks)
            case.run(case.random_logits(2).round(), checks)  # ties
            return checks

        return run

    yield compared(setting, "", *(compare(*router) for router in ROUTERS))


def _rms_norm(setting: Setting) -> Iterator[Measured]:
    yield compared(setting, "", RmsNormCase(setting.tuning, 1531, x_offset=5).run)


def _gather(setting: Setting) -> Iterator[Measured]:
    def compare(runner: Runner) -> Checks:
        checks = Checks()
        GatherCase(runner, 2 * COPIED_BYTES + 16 * 67, 5, (0, 3)).run(checks)
        return checks

    def time(runner: Runner) -> float | None:
        n_bytes = CPU_BYTES if setting.device.info.is_cpu else GPU_BYTES // 4
        return GatherCase(runner, n_bytes // N_SLOTS, N_SLOTS, tuple(range(N_SLOTS))).time()

    yield timed(setting, compared(setting, "", compare), time)


def _candidates(setting: Setting) -> Iterator[Measured]:
    def compare(runner: Runner) -> Checks:
        case, checks = CandidatesCase(runner, setting.tuning, 5003), Checks()
        case.run(case.random_logits(), checks)
        case.run((case.random_logits() * 0.5).round(), checks)  # ties
        return checks

    yield compared(setting, "", compare)


def _finish(setting: Setting) -> Iterator[Measured]:
    def compare(runner: Runner) -> Checks:
        case, checks = FinishCase(runner), Checks()
        case.run(0xFFFFFFFF, checks)
        return checks

    yield compared(setting, "", compare)


def _read_words(setting: Setting) -> Iterator[Measured]:
    def compare(runner: Runner) -> Checks:
        checks = Checks()
        ReadCase(runner, 5).run(checks)
        return checks

    def time(runner: Runner) -> float | None:
        n_bytes = CPU_BYTES if setting.device.info.is_cpu else GPU_BYTES
        return ReadCase(runner, n_bytes // GROUP_BYTES).time()

    yield timed(setting, compared(setting, "", compare), time)


FAMILIES = {
    "matvec": Family(matvec_cases, "dot_suffix"),
    "matvec_residual": Family(matvec_residual_cases, "dot_suffix"),
    "expert_gate_up": Family(partial(gate_up_cases, uses=PLAIN), "dot_suffix"),
    "expert_down": Family(partial(down_cases, n_columns=512, uses=PLAIN), "dot_suffix"),
    "expert_gate_up_keep": Family(partial(gate_up_cases, uses=KEEPING), "dot_suffix"),
    "expert_down_keep": Family(partial(down_cases, n_columns=768, uses=KEEPING), "dot_suffix"),
    "embed": Family(embed_cases, "nothing"),
    "rms_norm": Family(_rms_norm, "reduce_suffix"),
    "attention": Family(_attention, "reduce_suffix"),
    "latent_attention": Family(_latent_attention, "reduce_suffix"),
    "attention_combine": Family(_attention, "nothing"),
    "router_topk": Family(_router_topk, "reduce_suffix"),
    "candidates_partial": Family(_candidates, "nothing"),
    "candidates_merge": Family(_candidates, "nothing"),
    "finish": Family(_finish, "nothing"),
    "gather": Family(_gather, "nothing"),
    "read_words": Family(_read_words, "nothing"),
}
