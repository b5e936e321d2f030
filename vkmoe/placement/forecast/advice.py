"""Compares the plans of a model: what others would cost, and what would make the best faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from vkmoe.config import EngineConfig
from vkmoe.errors import VkmoeError
from vkmoe.facts import MemoryPlan
from vkmoe.option_fields import in_mib
from vkmoe.placement.decide import Candidate, Decision

LEAST_GAIN = 0.05  # of the speed of a reply, that is worth a line
MORE_RAM = 8 << 30
SHORTEST_CONTEXT = 1024  # that is advised


def alternatives(candidates: Sequence[Candidate], best: MemoryPlan, n: int = 3) -> list[Candidate]:
    """List the fastest candidates besides the plan: those that differ most from it come first.

    Of each mode that is the best; others of the same mode follow.
    """
    kinds, others = dict[object, Candidate](), list[Candidate]()
    seen = {_kind(best), _figures(best)}
    for candidate in candidates:
        kind, figures = _kind(candidate.plan), _figures(candidate.plan)
        if figures in seen:
            continue
        if kind in seen or kind in kinds:
            others.append(candidate)
        else:
            kinds[kind] = candidate
        seen.add(figures)
    return [*kinds.values(), *others][:n]


def _kind(plan: MemoryPlan) -> tuple[object, ...]:
    return plan.mode.name, plan.splits_layers


def _figures(plan: MemoryPlan) -> tuple[object, ...]:
    mode = plan.mode
    ways = (mode.name, mode.miss, plan.landing_slots, plan.brought_places, plan.chunk_rows)
    return (*ways, plan.expert_slots, plan.cpu_layers)


def describe(plan: MemoryPlan) -> str:
    """Say in a few words how much of a model is where."""
    parts = []
    if plan.expert_slots and plan.sizing is not None:
        parts.append(f"{plan.sizing.slots_text} slots a layer")
    if plan.landing_slots:
        parts.append(f"{plan.landing_slots} to land in")
    if plan.mode.gathers:
        parts.append("misses are gathered")
    if words := plan.mode.words(plan.cpu_layers):
        parts.append(words)
    if plan.host_slots:
        n, others = sum(plan.host_slots), "on the device" if plan.exchanges else "in the file"
        parts.append(f"{n:,} in host memory, the others {others}")
    return ", ".join([*parts, f"chunks of {plan.chunk_rows}"])


def drawback(candidate: Candidate, best: Candidate) -> str:
    """Say what a candidate lacks beside the best one, or costs."""
    found, other, plan = candidate.prediction, best.prediction, candidate.plan
    if found.file_share > other.file_share:
        n_bytes = round(found.file_share * found.bytes.others)
        return f"a token reads {in_mib(n_bytes)} from the file"
    slower = other.rate / found.rate, other.prompt_rate / found.prompt_rate
    if max(slower) > 1.005:
        what = "a token" if slower[0] >= slower[1] else "a prompt"
        return f"{what} takes {max(slower):.2f} times as long"
    if min(slower) < 0.995 and found.seconds < other.seconds:  # else it would be the plan
        return "predicted to be faster; the trial measured otherwise"
    more = plan.total("host") - best.plan.total("host")
    return f"needs {in_mib(more)} more of host memory" if more > 0 else "as fast"


def advice(
    config: EngineConfig, decided: Decision, decide_at: Callable[[EngineConfig, int], Decision]
) -> str:
    """Say what one change would gain most; empty where none gains much.

    `decide_at` decides for a config, with so many bytes more of host memory.
    """
    rate = decided.candidates[0].prediction.rate
    gains = []
    for text, asked, more in _changes(config, decided.plan):
        try:
            found = decide_at(asked, more).candidates[0].prediction.rate
        except VkmoeError:
            continue
        gains.append((found / rate, f"{text}: {rate:.3g} -> {found:.3g} tok/s"))
    gain, line = max(gains, default=(0.0, ""))
    return line if gain >= 1 + LEAST_GAIN else ""


def _changes(config: EngineConfig, plan: MemoryPlan) -> Iterator[tuple[str, EngineConfig, int]]:
    yield f"{MORE_RAM >> 30} GiB more RAM", config, MORE_RAM
    if (half := plan.ctx_size // 2) >= SHORTEST_CONTEXT:
        yield f"-c {half} instead of {plan.ctx_size}", replace(config, ctx_size=half), 0
