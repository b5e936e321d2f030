"""This module is `vkmoe plan`: what would go where, why, how fast that is, and what else there is.

It owns the words. What is decided, for a device that is here or one of a profile, is decided as for
a run (placement/decide.py), by the times that placement/forecast/cost.py predicts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from vkmoe.choices import ModeName
from vkmoe.cli.notes import guess_line, idle_notes, mode_line
from vkmoe.cli.options import ModelChoice, Output, config_options, is_typed
from vkmoe.config import EngineConfig
from vkmoe.errors import UsageError
from vkmoe.option_fields import option

if TYPE_CHECKING:
    from vkmoe.facts import Allocation, DeviceInfo, MemoryPlan, ModelSpec
    from vkmoe.models import ModelFile
    from vkmoe.placement.decide import Candidate, Choosing, Decision
    from vkmoe.placement.forecast.cost import Prediction
    from vkmoe.placement.forecast.device_profiles import DeviceProfile

_MIB = 1 << 20


@dataclass(frozen=True)
class _Where:
    device_profile: str | None = option(
        None,
        "Plan for a device that is not here: the name of a profile that comes with vkmoe "
        "(navi31, rtx3060-12gb, 8gb-nobar, uma-32gb), or a JSON file like theirs.",
        metavar="NAME",
    )


@config_options
def plan(
    context: typer.Context,
    *,
    which: ModelChoice,
    where: _Where,
    output: Annotated[Output, ("as_json",)],
    engine: EngineConfig,
) -> None:
    """Explain every byte that a model would take on a device, how fast it is, and what else fits.

    Loads no weights. With --device-profile the device need not be here. Without it, the memory of
    the device that is chosen is measured, which takes a second or two. Each line says what changes
    it. The plan is the one that is predicted to be fastest; the next ones follow with what they
    cost, and one line says what would gain most.
    """
    from vkmoe.models import open_model
    from vkmoe.models.ahead_file import with_ahead

    device_profile = where.device_profile
    if device_profile is not None and is_typed(context, "device"):
        if is_typed(context, "device_profile"):
            raise UsageError(
                f"--device-profile {device_profile} contradicts --device {engine.device}",
                "leave one of them out",
            )
        device_profile = None
    with open_model(which.file(context)) as own, with_ahead(own, engine) as opened:
        machine = _machine(device_profile, engine, Path(opened.file.path))
        found = _decided(opened, machine, engine)
        notes = idle_notes(engine, found.decision.plan)
        if output.as_json:
            document = _document(opened.spec, machine.profile, found) | {"notes": notes}
            typer.echo(json.dumps(document, indent=2))
            return
        typer.echo("\n".join([*_lines(opened.spec, machine.profile, found), *notes]))


class _Machine(NamedTuple):
    """Holds a device, how kernels are launched on it, and how far predictions of it erred."""

    profile: DeviceProfile
    tuning: Any = None  # of kernels, as `decide` takes it; None: by default
    corrections: Mapping[ModeName, float] = MappingProxyType({})


def _machine(name: str | None, engine: EngineConfig, model: Path) -> _Machine:
    """Read a profile, or describe the device that is chosen here, and measure it.

    The disk is that of the `model`.
    """
    from vkmoe.cpu.host_memory import available_bytes
    from vkmoe.devices import open_device
    from vkmoe.placement.forecast.device_profiles import DeviceProfile, read_profile
    from vkmoe.placement.forecast.measured import measure_speeds, recall_speeds
    from vkmoe.placement.remembered import tuning_for

    if name is not None:
        return _Machine(read_profile(name))
    with open_device(engine.device, engine.validation, engine.threads) as device:
        info, speeds = device.info, measure_speeds(device, model, engine.threads)
    known = recall_speeds(info, model, engine.tuning)
    profile = DeviceProfile(info, available_bytes(), speeds, {"speeds": "measured now"})
    return _Machine(profile, tuning_for(info, engine.tuning), known.corrections)


class _Decided(NamedTuple):
    """Holds a decision, what was predicted of it, what else there is, and what would be faster."""

    decision: Decision
    best: Candidate
    others: list[Candidate]
    advice: str
    context_rates: dict[int, float]  # tokens per second, by the tokens before

    @property
    def prediction(self) -> Prediction:
        return self.best.prediction


def _decided(model: ModelFile, machine: _Machine, engine: EngineConfig) -> _Decided:
    """Decide as a run would that has nothing to measure, and compare the plan with others."""
    from vkmoe.placement.decide import Choosing
    from vkmoe.placement.forecast.advice import advice, alternatives
    from vkmoe.placement.forecast.context import context_rates

    profile = machine.profile
    choosing = Choosing(lambda: profile.speeds, known=True, corrections=machine.corrections)

    def decided(asked: EngineConfig, more: int = 0) -> tuple[Decision, tuple[Candidate, ...]]:
        free = profile.available_host_bytes + more
        return decide_here(
            asked, model, _with_more(profile.info, more), machine.tuning, choosing, free
        )

    made, candidates = decided(engine)
    best = replace(made.candidates[0], plan=made.plan)
    others = alternatives(candidates, made.candidates[0].plan)
    rates = context_rates(
        made.plan, model.spec, profile.info, best.prediction.bytes, made.machine, choosing.curve
    )
    return _Decided(
        made,
        best,
        others,
        advice(engine, made, lambda *at: decided(*at)[0]),
        {n_positions: expected.rate for n_positions, expected in rates},
    )


def decide_here(
    config: EngineConfig,
    model: ModelFile,
    device: DeviceInfo,
    tuning: Any,  # of kernels, as `decide` takes it; None: by default
    choosing: Choosing,
    free: int | None = None,
) -> tuple[Decision, tuple[Candidate, ...]]:
    """Decide as a run would that measures no modes; return what was compared too.

    `free` are the bytes of host memory; None: those that are free now. The device is not opened:
    those with memory of their own have engines for copies.
    """
    from vkmoe.experts.decide.settings import copies_overlap
    from vkmoe.placement.decide import decide
    from vkmoe.placement.mode_choice import decide_with, known_choice, mode_question

    overlaps = copies_overlap(config, has_queue=not device.is_uma)
    question = mode_question(config, model, device, tuning, choosing, free)
    made = decide_with(
        known_choice(question, config),
        config,
        lambda asked: decide(asked, model, device, tuning, choosing, overlaps, free),
    )
    return made, (question.decided if question is not None else made).candidates


def _with_more(info: DeviceInfo, n_bytes: int) -> DeviceInfo:
    """Return a device that reaches so much more of the host's memory, if it has its own."""
    if info.is_uma:
        return info
    heaps = (
        heap if heap.device_local else replace(heap, size=heap.size + n_bytes, budget=None)
        for heap in info.heaps
    )
    return replace(info, heaps=tuple(heaps))


# ----- in words -----


def _lines(spec: ModelSpec, profile: DeviceProfile, found: _Decided) -> list[str]:
    decided, info = found.decision, profile.info
    made = decided.plan
    lines = [
        f"model         {spec.name} ({spec.architecture}), context {made.ctx_size} tokens",
        f"device        {info.name} ({info.type}, {info.driver})",
        f"experts       {mode_line(made)}",
        *([f"guesses       {line}"] if (line := guess_line(made)) else ()),
        "",
        f"{'MiB':>12} place    what (why; what changes it)",
    ]
    lines += [_line(line) for line in made.lines]
    lines += ["", *_totals(profile, decided), "", *_speed(profile, found)]
    lines += _compared(found)
    return [*lines, f"advice        {found.advice}"] if found.advice else lines


def _compared(found: _Decided) -> list[str]:
    """List the plan and others with the speeds that are predicted, and what those lack."""
    from vkmoe.placement.forecast.advice import describe, drawback

    if not found.others:
        return []
    lines = ["", f"{'tok/s':>12} {'prompt':>8}  plans that were compared"]
    for each in (found.best, *found.others):
        rates = f"{each.prediction.rate:12,.1f} {each.prediction.prompt_rate:8,.0f}"
        lacks = "the plan" if each is found.best else drawback(each, found.best)
        lines.append(f"{rates}  {each.plan.mode.name}: {describe(each.plan)} ({lacks})")
    return lines


def _line(line: Allocation) -> str:
    from vkmoe.placement.memory import option_of

    option = option_of(line)
    change = f"; {option} changes it" if option and option not in line.reason else ""
    return f"{line.n_bytes / _MIB:12,.1f} {line.place:8} {line.item} ({line.reason}{change})"


def _totals(profile: DeviceProfile, decided: Decision) -> list[str]:
    """Compare what each heap gives with what there is, and what the host does."""
    info, made = profile.info, decided.plan
    totals = made.heap_totals()
    if info.is_uma:  # what one heap has no room for comes from another
        size = sum(heap.size for heap in info.heaps)
        lines = [f"heaps         {_of(sum(totals.values()), size)} (shared memory)"]
    else:
        lines = [
            f"heap {heap}        {_of(n_bytes, info.heaps[heap].size)} "
            f"({'device' if info.heaps[heap].device_local else 'host'} memory)"
            for heap, n_bytes in sorted(totals.items())
        ]
    needed, free = made.total("host"), profile.available_host_bytes
    needed += made.total("device") * info.is_uma
    spare = f"; prompts may take {made.kept_bytes / _MIB:,.1f} more" if made.kept_bytes else ""
    lines.append(f"host memory   {_of(needed, free)} that are free{spare}")
    in_slots = sum(made.expert_slots) / max(1, made.sizing.n_total) if made.sizing else 0.0
    if in_file := round(made.total("file") * (1.0 - in_slots * made.mode.by_cpu)):
        left = max(0, free - needed)
        slow = "; what does not fit there is read from the disk again and again"
        lines.append(
            f"file          {_of(in_file, left)} that are left to keep it in memory"
            + slow * (in_file > left)
        )
    return lines


def _of(n_bytes: int, n_all: int) -> str:
    return f"{n_bytes / _MIB:,.1f} of {n_all / _MIB:,.1f} MiB"


def _speed(profile: DeviceProfile, decided: _Decided) -> list[str]:
    """Say how fast a token and a prompt are, and what that goes by."""
    from vkmoe.placement.forecast.cost import PROMPT_TOKENS
    from vkmoe.placement.forecast.speeds import TYPICAL

    found, machine = decided.prediction, decided.decision.machine
    read, reason = found.bytes, found.hit_rate_reason
    hits = f"{100 * found.hit_rate:.1f} % ({reason})" if found.hit_rate is not None else reason
    of_token = f"{read.trunk / _MIB:,.1f} MiB of the trunk, {read.experts / _MIB:,.1f} of experts"
    lines = [f"hit rate      {hits}", f"a token reads {of_token}"]
    if found.file_share:
        in_file = found.file_share * read.others / _MIB
        lines.append(f"from the file {in_file:,.1f} MiB of these: no memory holds them then")
    rates = [f"{found.rate:,.1f} tok/s"]
    if found.without_hits and found.with_hits_alone and found.hit_rate not in (None, 1.0):
        ends = f"{found.without_hits:,.1f} without a hit", f"{found.with_hits_alone:,.1f}"
        rates += [ends[0], f"{ends[1]} with hits alone"]
    lines.append(f"decode        {', '.join(rates)} (predicted, for {found.bound})")
    behind = [f"{rate:,.1f} behind {n:,} tokens" for n, rate in decided.context_rates.items() if n]
    slots = ", and fewer experts have slots" if decided.best.plan.gives_slots else ""
    lines.append(f"  {'later':11} {', '.join(behind)}: more is read{slots}")
    lines.append(f"prompt        {found.prompt_rate:,.0f} tok/s, of {PROMPT_TOKENS} tokens")
    names = {"device": "device memory", "link": "link", "host": "the CPU's memory", "file": "file"}
    speeds = {key: x for key, x in asdict(machine.speeds).items() if key in names}
    given = [f"{names[key]} {x / 1e9:,.1f} GB/s" for key, x in speeds.items()]
    lines.append(f"speeds        {', '.join(given)}")
    known = asdict(profile.speeds)
    if missing := [names[key] for key in speeds if not known[key]]:
        source = TYPICAL[profile.info.type].source
        lines.append(f"  {'assumed':11} {', '.join(missing)}: {source}")
    return lines + [f"  {key:11} {text}" for key, text in profile.sources.items()]


def _document(spec: ModelSpec, profile: DeviceProfile, found: _Decided) -> dict[str, Any]:
    from vkmoe.placement.forecast.advice import drawback

    made = found.decision.plan
    return {
        "model": spec.name,
        "architecture": spec.architecture,
        "device": _device(profile.info),
        "ctx_size": made.ctx_size,
        "cache_type_k": made.kv_types.keys,
        "cache_type_v": made.kv_types.values,
        "mode": made.mode.name,
        "mode_reason": made.mode_reason or made.mode.reason,
        "executor": made.executor,
        **_amounts(made),
        "host_layers": made.host_layers,
        "n_guesses": made.n_guesses,
        "lines": [_line_values(line) for line in made.lines],
        "heaps": {str(heap): n_bytes for heap, n_bytes in made.heap_totals().items()},
        "host_memory_bytes": profile.available_host_bytes,
        "expected": asdict(found.prediction),
        "rates_behind": {str(n): rate for n, rate in found.context_rates.items()},
        "others": [
            {
                "mode": each.plan.mode.name,
                **_amounts(each.plan),
                "expected": asdict(each.prediction),
                "lacks": drawback(each, found.best),
            }
            for each in found.others
        ],
        "advice": found.advice,
        "bytes_per_second": asdict(found.decision.machine.speeds),
        "sources": dict(profile.sources),
    }


def _line_values(line: Allocation) -> dict[str, Any]:
    from vkmoe.placement.memory import option_of

    return {
        "item": line.item,
        "place": line.place,
        "bytes": line.n_bytes,
        "heap": line.heap if line.name is not None else None,
        "reason": line.reason,
        "option": option_of(line),
    }


def _amounts(plan: MemoryPlan) -> dict[str, Any]:
    """Write how many experts are where."""
    return {
        "expert_slots": list(plan.expert_slots),
        "landing_slots": plan.landing_slots,
        "host_slots": list(plan.host_slots),
        "exchanges": plan.exchanges,
        "cpu_layers": plan.cpu_layers,
        "chunk_rows": plan.chunk_rows,
    }


def _device(info: DeviceInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "type": info.type,
        "driver": info.driver,
        "heaps": [asdict(heap) for heap in info.heaps],
    }
