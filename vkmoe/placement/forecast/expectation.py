"""Says how fast a plan can be at best, from the bytes a token reads and how fast memory is read.

A bound, not a forecast: kernels that keep up with memory everywhere, no waits, an empty context.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkmoe.facts import MemoryPlan, ModelSpec, WeightBytes
from vkmoe.placement.forecast.device_profiles import Speeds
from vkmoe.placement.forecast.hit_curve import MEAN_CURVE, HitCurve

__all__ = [
    "Expectation",
    "TokenBytes",
    "expect",
    "file_share_of",
    "hit_rate_of",
    "token_bytes",
]


@dataclass(frozen=True)
class TokenBytes:
    """Counts what a token that is decoded reads: the trunk, and experts of all layers."""

    trunk: int
    experts: int  # as the device has them
    others: int  # the same experts where they are read otherwise: in host memory, or by the CPU
    trunk_in_host: int = 0  # a part of the trunk, read over the link


@dataclass(frozen=True)
class Expectation:
    """Says what to expect of a plan. Rates are tokens per second; None: not known."""

    bytes: TokenBytes
    hit_rate: float | None  # of experts on the device; None where nothing can miss
    file_share: float  # of experts' uses, that are read from the file
    hit_rate_reason: str
    rate: float | None  # at these
    without_hits: float | None  # of a cache: where no expert that a token uses is in a slot
    with_hits_alone: float | None  # where all are
    bound: str  # what it is bound by, in words


def token_bytes(
    spec: ModelSpec, weights: WeightBytes, embedding_bytes: int, host_layers: int = 0
) -> TokenBytes:
    """Count the bytes; of the embedding, of `embedding_bytes`, a token reads a row.

    The trunk of the last `host_layers` is in host memory.
    """
    trunk = weights.trunk
    n_used, n_experts = (spec.experts.n_used, spec.experts.n_experts) if spec.experts else (0, 1)
    experts = others = n_used * sum(weights.spans)
    if weights.mapped:  # by the CPU, which has addresses in place of spans
        trunk = weights.mapped - weights.mapped_experts
        experts = others = weights.mapped_experts * n_used // n_experts
    if weights.file_spans:
        others = sum(map(sum, weights.file_spans)) * n_used // n_experts
    in_host = sum(weights.trunk_pieces(host_layers)[1])
    trunk -= 0 if spec.tied_embeddings else embedding_bytes
    return TokenBytes(trunk, experts, others, in_host)


def hit_rate_of(plan: MemoryPlan, spec: ModelSpec, curve: HitCurve) -> tuple[float, str]:
    """Estimate the share of experts' uses that are found on the device, and say why so."""
    if spec.experts is None or plan.mode.on_device:
        return 1.0, "all experts are on the device"
    n_layers, n_experts = len(spec.moe_layers), spec.experts.n_experts
    if plan.mode.on_cpu:
        share = 1.0 - plan.cpu_layers / n_layers
        return share, f"the CPU computes those of {plan.cpu_layers} of {n_layers} layers"
    if not plan.expert_slots:
        return 0.0, "no expert has a slot"
    if min(plan.expert_slots) >= n_experts:
        return 1.0, "every expert has a slot"
    rates = [curve.rate(n / n_experts) for n in plan.expert_slots]
    return sum(rates) / n_layers, f"by {curve.reason}"


def file_share_of(plan: MemoryPlan, spec: ModelSpec, curve: HitCurve) -> float:
    """Estimate the share of experts' uses that are read from the file: in no memory when needed."""
    if not plan.host_slots or spec.experts is None:
        return 0.0
    n_held = sum(plan.host_slots) + sum(plan.expert_slots)
    n_all = len(spec.moe_layers) * spec.experts.n_experts
    return 1.0 - curve.rate(min(1.0, n_held / n_all))


def expect(
    plan: MemoryPlan,
    spec: ModelSpec,
    read: TokenBytes,
    speeds: Speeds,
    curve: HitCurve = MEAN_CURVE,
    *,
    shares_memory: bool = False,
) -> Expectation:
    """Bound the tokens per second by the memory they wait for, at the hit rates of `curve`.

    `shares_memory`: the device and the CPU read the same memory, and take turns at it.
    """
    hit_rate, reason = hit_rate_of(plan, spec, curve)
    in_file = file_share_of(plan, spec, curve)
    known: float | None = hit_rate
    if shares_memory and not (plan.mode.on_device or plan.cpu_layers):
        known, reason = None, "the device reads the host's memory in place"
    by_cpu = plan.cpu_layers > 0
    other, name = (speeds.host, "the CPU's memory") if by_cpu else (speeds.link, "the link")
    link = speeds.device if shares_memory else speeds.link
    lacks_other = not other and hit_rate != 1.0
    if not speeds.device or lacks_other or (read.trunk_in_host and not link):
        return Expectation(read, known, in_file, reason, None, None, None, "speeds are not known")
    if in_file and not speeds.file:
        bound = "the file, whose speed is not known"
        return Expectation(read, known, in_file, reason, None, None, None, bound)

    def rate(share: float) -> float:
        experts = share * read.experts / speeds.device
        trunk = (read.trunk - read.trunk_in_host) / speeds.device
        trunk += read.trunk_in_host / link if read.trunk_in_host else 0.0
        missed = (1 - share) * read.others / other if share < 1 else 0.0
        # Within a layer a GPU and the CPU compute at the same time; all else takes turns.
        together = plan.mode.is_hybrid and not shares_memory
        seconds = trunk + (max(experts, missed) if together else experts + missed)
        if in_file:  # into host memory first
            seconds += min(in_file, 1 - share) * read.others / speeds.file
        return 1 / seconds if seconds else 0.0

    read_over = [name] if hit_rate != 1.0 and not (shares_memory and not by_cpu) else []
    read_over += ["the link"] if read.trunk_in_host and "the link" not in read_over else []
    read_over += ["the file"] if in_file else []
    bound = " and ".join(["device memory", *read_over])
    worst, best = (rate(0.0), rate(1.0)) if plan.mode.in_cache else (None, None)
    return Expectation(read, known, in_file, reason, rate(hit_rate), worst, best, bound)
