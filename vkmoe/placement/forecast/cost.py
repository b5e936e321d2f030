"""Predicts how fast a plan is: the time of a token and of a prompt, from bytes and speeds.

One function serves the choice between plans and what `vkmoe plan` prints. It counts the bytes that
are read, from which memory, and the stops of the device. It leaves out what kernels lose against
memory, waits between tokens, and the context. Pure.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from math import comb

import numpy as np

from vkmoe.choices import MissWay
from vkmoe.experts.study.hit_curve import MEAN_CURVE, HitCurve
from vkmoe.facts import MemoryPlan, ModelSpec, WeightBytes
from vkmoe.modes import Cache, Hybrid, Resident
from vkmoe.placement.forecast.speeds import CPU_ROWS, Machine, Speeds

# A plan is judged by the time of such a prompt and such a reply.
PROMPT_TOKENS, REPLY_TOKENS = 512, 512
STOP_SECONDS = 75e-6  # in which the device waits for the host, or for the CPU's experts
GATHER_SECONDS = 15e-6  # of one more dispatch in a layer
ADMITTED = 0.5  # of the experts that miss, which get a slot
# The two directions of a link hardly slow each other: what leaves costs a part of what comes.
WRITE_BACK = 0.25
TILE_ROWS = 32  # of a prompt, for which an expert is read once where it is read in place
# What exchanging experts gain over those that stay goes by the places to spare in a layer, which
# layers share: the least of all replays in bench/results/2026-11-25-exchange-llvmpipe.json.
SPARES = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)
MOVING = (0.0, 0.59, 0.63, 0.79, 0.91, 0.92, 0.98, 1.0)
# Where some experts are in the file alone, one that leaves the device is so too, until it is used
# again: a share of the uses that the device misses and host memory would have. Replays of invented
# routing gave 0 to 0.57: least where nothing comes and goes, 0.25 in the middle.
LOST = 0.25
# Of the tokens that a layer guesses ahead, the share that is right where all before them are: an
# assumption. Of Qwen3.6's, people measure 0.7 to 0.85 for the first.
ACCEPTED = 0.7
# Neighbouring tokens share experts: n use n ** SPREAD times as many as one. In texts that the demo
# model reads, two use 1.75 to 1.79 times as many, four 2.9 to 3.1 times.
SPREAD = 0.8


@dataclass(frozen=True)
class TokenBytes:
    """Counts what a token that is decoded reads: the trunk, and experts of all layers."""

    trunk: int
    experts: int  # as the device has them
    others: int  # the same experts where they are read otherwise: in host memory, or by the CPU
    trunk_in_host: int = 0  # a part of the trunk, read over the link
    head: int = 0  # a part of the trunk, which only a token reads that wants logits
    guess: int = 0  # that are read to guess a token ahead, besides

    def of_rows(self, n_rows: int) -> TokenBytes:
        """Return what so many tokens read that are decoded together."""
        more = n_rows**SPREAD
        return replace(self, experts=round(more * self.experts), others=round(more * self.others))


@dataclass(frozen=True)
class Prediction:
    """Says what to expect of a plan. Rates are tokens per second."""

    bytes: TokenBytes
    hit_rate: float | None  # of experts on the device; None where nothing can miss
    hit_rate_reason: str
    file_share: float  # of experts' uses, that are read from the file
    rate: float  # of a reply, at these
    prompt_rate: float  # of a prompt of PROMPT_TOKENS
    without_hits: float | None  # of a cache: where no expert that a token uses is in a slot
    with_hits_alone: float | None  # where all are
    layer_seconds: float  # of a token that wants no logits, as bytes and speeds alone have it
    bound: str  # what it waits for, in words

    @property
    def seconds(self) -> float:
        """Return the time of a prompt and a reply, by which plans are compared."""
        return PROMPT_TOKENS / self.prompt_rate + REPLY_TOKENS / self.rate


def token_bytes(
    spec: ModelSpec, weights: WeightBytes, embedding_bytes: int, host_layers: int = 0
) -> TokenBytes:
    """Count the bytes; of the embedding, of `embedding_bytes`, and of a table a token reads a row.

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
    in_host = sum(weights.trunk_pieces(host_layers)[1][weights.table_pieces :])
    trunk -= weights.ahead + weights.table + (0 if spec.tied_embeddings else embedding_bytes)
    unused = weights.ahead_experts * (n_experts - n_used) // n_experts
    guess = weights.ahead - unused if weights.ahead else 0
    if guess and spec.drafter is None:  # which has an output matrix of its own
        guess += embedding_bytes
    if weights.mapped:
        return TokenBytes(trunk, experts, others, in_host, guess=guess)
    head = embedding_bytes if spec.tied_embeddings else weights.pieces[-1 - weights.ahead_pieces]
    return TokenBytes(trunk, experts, others, in_host, min(head, trunk), guess)


def hit_rate_of(plan: MemoryPlan, spec: ModelSpec, curve: HitCurve) -> tuple[float, str]:
    """Estimate the share of experts' uses that are found on the device, and say why so."""
    if spec.experts is None or isinstance(plan.mode, Resident):
        return 1.0, "all experts are on the device"
    n_layers, n_experts = len(spec.moe_layers), spec.experts.n_experts
    if not plan.mode.can_miss:
        share = 1.0 - plan.cpu_layers / n_layers
        return share, f"the CPU computes those of {plan.cpu_layers} of {n_layers} layers"
    if not plan.expert_slots:
        return 0.0, "no expert has a slot"
    if min(plan.expert_slots) >= n_experts:
        return 1.0, "every expert has a slot"
    rate = curve.of_slots(plan.expert_slots, n_experts)
    if plan.exchanges:  # an expert leaves only if it has a home, and only so many have one
        kept = sum(plan.expert_slots) / (n_layers * n_experts)
        rate = kept + (rate - kept) * float(
            np.interp(_spare(plan, spec) / n_layers, SPARES, MOVING)
        )
    return rate, f"by {curve.reason}"


def file_share_of(plan: MemoryPlan, spec: ModelSpec, curve: HitCurve, machine: Machine) -> float:
    """Estimate the share of experts' uses that are read from the file: in no memory when needed.

    Experts of the CPU are in memory as far as the page cache has room for them.
    """
    if spec.experts is None:
        return 0.0
    n_all = len(spec.moe_layers) * spec.experts.n_experts
    if plan.host_slots and not plan.exchanges:
        n_held = sum(plan.host_slots) + sum(plan.expert_slots)
        lacking = 1.0 - curve.rate(min(1.0, n_held / n_all))
        missed = 1.0 - hit_rate_of(plan, spec, curve)[0] if plan.expert_slots else lacking
        return lacking + LOST * max(0.0, missed - lacking)
    if in_file := plan.total("file"):
        taken = plan.total("host") + plan.total("device") * machine.shares_memory
        room = max(0, machine.host_bytes - taken) / in_file
        return 1.0 - curve.rate(min(1.0, room + sum(plan.expert_slots) / n_all))
    return 0.0


def predict(
    plan: MemoryPlan,
    spec: ModelSpec,
    read: TokenBytes,
    machine: Machine,
    curve: HitCurve = MEAN_CURVE,
) -> Prediction:
    """Predict the tokens per second of a plan by the memory they wait for."""
    found = _Times(plan, spec, read, machine, curve)
    known: float | None = found.hits
    reason = found.reason
    if machine.shares_memory and plan.mode.can_miss and not plan.cpu_layers:
        known, reason = None, "the device reads the host's memory in place"
    cached = plan.mode.has_slots
    return Prediction(
        read,
        known,
        reason,
        found.in_file,
        rate=_rate(found.token(found.hits) if not plan.n_guesses else found.with_guesses()),
        prompt_rate=_rate(found.prompt() / PROMPT_TOKENS),
        without_hits=_rate(found.token(0.0)) if cached else None,
        with_hits_alone=_rate(found.token(1.0)) if cached else None,
        layer_seconds=found.plain_token(found.hits) - read.head / machine.speeds.device,
        bound=found.bound,
    )


def miss_seconds(way: MissWay, n_bytes: float, n_layers: int, speeds: Speeds) -> float:
    """Return the seconds in which bytes of experts without a slot are read, in so many layers."""
    if way == "read":
        return n_bytes / speeds.link
    return n_bytes / speeds.gather + 2 * n_bytes / speeds.device + GATHER_SECONDS * n_layers


def _rate(seconds: float) -> float:
    return 1 / max(seconds, 1e-9)


def _spare(plan: MemoryPlan, spec: ModelSpec) -> int:
    """Count the places of slots and host memory beyond the experts."""
    assert spec.experts is not None
    n_all = len(spec.moe_layers) * spec.experts.n_experts
    return sum(plan.host_slots) + sum(plan.expert_slots) - n_all


class _Times:
    """Holds what a plan's times follow from, and adds them up."""

    def __init__(
        self, plan: MemoryPlan, spec: ModelSpec, read: TokenBytes, machine: Machine, curve: HitCurve
    ) -> None:
        self._plan, self._read, self._machine, self._speeds = plan, read, machine, machine.speeds
        self._n_layers, experts = len(spec.moe_layers), spec.experts
        self._n_used, self._n_all = (experts.n_used, experts.n_experts) if experts else (0, 1)
        self.hits, self.reason = hit_rate_of(plan, spec, curve)
        self.in_file = file_share_of(plan, spec, curve, machine)
        self._by_cpu = plan.cpu_layers > 0
        # Within a layer a GPU and the CPU work at the same time; all else takes turns.
        self._together = isinstance(plan.mode, Hybrid) and not machine.shares_memory
        self._crosses = isinstance(plan.mode, Cache) and not machine.shares_memory
        n_slots = sum(plan.expert_slots)
        spare = _spare(plan, spec) if plan.exchanges else n_slots
        self._without_home = 1.0 - min(1.0, spare / max(1, n_slots))

    @property
    def bound(self) -> str:
        """Name the memories that a token waits for."""
        missed, shares = self.hits < 1.0, self._machine.shares_memory
        names = ["device memory"] if self._machine.is_vulkan else ["memory"]
        names += ["the CPU's memory"] if missed and self._by_cpu else []
        over_link = (missed and not self._by_cpu) or self._read.trunk_in_host > 0
        names += ["the link"] if over_link and not shares else []
        names += ["the file"] if self.in_file else []
        return " and ".join(names)

    def _reading(self, read: TokenBytes) -> _Times:
        """Return the times of the same plan where a token reads other bytes."""
        other = copy(self)
        other._read = read
        return other

    def with_guesses(self) -> float:
        """Return the seconds of a token where some are guessed ahead and verified together."""
        n, read = self._plan.n_guesses, self._read
        together = self._reading(read.of_rows(1 + n)).token(self.hits)
        guessing = n * (read.guess / self._speeds.device + STOP_SECONDS)
        return (together + guessing) / sum(ACCEPTED**index for index in range(1 + n))

    def token(self, hits: float) -> float:
        """Return the seconds of a token that is decoded, at a hit rate, as trials corrected it."""
        return self.plain_token(hits) * self._machine.correction(self._plan.mode.name)

    def plain_token(self, hits: float) -> float:
        """Add up the seconds of a token that is decoded, at a hit rate."""
        read, speeds = self._read, self._speeds
        trunk = (read.trunk - read.trunk_in_host) / speeds.device + read.trunk_in_host / speeds.link
        if self._together:
            seconds = trunk + self._beside_cpu(hits)
        else:
            seconds = trunk + hits * read.experts / speeds.device + self._missed(1.0 - hits)
        seconds += min(self.in_file, 1.0 if not self._machine.is_vulkan else 1.0 - hits) * (
            read.others / speeds.file
        )
        return seconds + self._stops()

    def _beside_cpu(self, hits: float) -> float:
        """Add up the seconds of experts that a GPU and the CPU share, by how many miss in a layer.

        The GPU's run side by side: it saves nothing there if one of them is the CPU's.
        """
        n, device = self._n_used, self._read.experts / self._speeds.device
        of_one = self._read.others / self._speeds.host / n
        chances = (comb(n, k) * (1.0 - hits) ** k * hits ** (n - k) for k in range(n + 1))
        return sum(chance * max(device, k * of_one) for k, chance in enumerate(chances))

    def _missed(self, share: float) -> float:
        """Add up the seconds in which a share of the experts' uses is served elsewhere."""
        others, speeds = share * self._read.others, self._speeds
        if self._by_cpu or not share:
            return others / speeds.host
        way: MissWay = "gather" if self._plan.mode.gathers else "read"
        seconds = miss_seconds(way, others, self._n_layers, speeds)
        if self._crosses:
            seconds += self._moved(share) * self._read.others / speeds.copy
        return seconds

    def _moved(self, share: float) -> float:
        """Estimate the share of the experts' uses that cross the link once more, for a slot.

        An expert that lands while it is read needs no copy; one that leaves without a home does.
        """
        newcomers = ADMITTED * share * self._n_used  # of a layer
        landed = min(newcomers, self._plan.landing_slots * self._plan.mode.promotes)
        crossings = newcomers - landed + WRITE_BACK * self._without_home * newcomers
        return crossings / self._n_used

    def _stops(self) -> float:
        n_stops = self._plan.cpu_layers
        if self._plan.executor == "stepped" and not n_stops:
            n_stops = self._n_layers
        return STOP_SECONDS * n_stops

    def prompt(self) -> float:
        """Add up the seconds of a prompt: all weights are read once for each of its chunks."""
        n_rows = min(PROMPT_TOKENS, self._plan.chunk_rows or PROMPT_TOKENS)
        return PROMPT_TOKENS / n_rows * self._chunk(n_rows)

    def _chunk(self, n_rows: int) -> float:
        read, speeds, machine = self._read, self._speeds, self._machine
        work = max(1.0, n_rows / machine.rows)
        trunk = (read.trunk - read.trunk_in_host) / speeds.device * work
        trunk += max(read.trunk_in_host / speeds.link, read.trunk_in_host / speeds.device * work)
        if not self._n_used:
            return trunk
        # A chunk uses most experts, each for some rows, and all that are used come.
        used = 1.0 - (1.0 - self._n_used / self._n_all) ** n_rows
        rows = n_rows * self._n_used / (self._n_all * used)
        whole = replace(
            read,
            experts=round(used * read.experts * self._n_all / self._n_used),
            others=round(used * read.others * self._n_all / self._n_used),
        )
        held = self._held()
        on_device = whole.experts / speeds.device * max(1.0, rows / machine.rows)
        missed = self._brought(whole, rows, 1.0 - held)
        if self._by_cpu:
            missed = (1.0 - held) * whole.others / speeds.host * max(1.0, rows / CPU_ROWS)
            on_device *= 1.0 if self._together else held
        together = self._together or (self._crosses and self._plan.brought_places > 0)
        seconds = trunk + (max(on_device, missed) if together else on_device + missed)
        seconds += self._prompt_file_share() * whole.others / speeds.file
        return seconds + self._stops()

    def _held(self) -> float:
        """Return the share of the experts that are on the device."""
        if not self._plan.expert_slots:
            return self.hits
        return sum(self._plan.expert_slots) / (self._n_layers * self._n_all)

    def _brought(self, whole: TokenBytes, rows: float, share: float) -> float:
        """Return the seconds in which missed experts reach the device, besides their work there."""
        if self._machine.shares_memory or not share:
            copied = 2 * share * whole.others * (self._plan.brought_places > 0)
            return copied / self._speeds.device
        n_reads = max(1.0, rows / TILE_ROWS + 0.5)  # one for each tile of rows
        in_place = n_reads * share * whole.others / self._speeds.link
        if not self._plan.brought_places:
            return in_place
        return min(in_place, share * whole.others / self._speeds.gather)

    def _prompt_file_share(self) -> float:
        """Return the share of the experts that a chunk reads from the file: nearly all are used."""
        plan, n_all = self._plan, self._n_layers * self._n_all
        if plan.host_slots and not plan.exchanges:
            return 1.0 - min(1.0, (sum(plan.host_slots) + sum(plan.expert_slots)) / n_all)
        return self.in_file
