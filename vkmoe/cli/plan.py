"""This module is `vkmoe plan`: what would go where, why, and how fast that can be at best.

It owns the words. What is decided, for a device that is here or one of a profile, is decided as for
a run (placement/plan.py); the bound on speed is in placement/forecast/expectation.py.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from vkmoe.cli.notes import idle_notes, mode_line
from vkmoe.cli.options import (
    Json,
    Model,
    Positional,
    chosen_model,
    config_options,
    is_typed,
    option,
)
from vkmoe.config import EngineConfig
from vkmoe.errors import UsageError

if TYPE_CHECKING:
    from vkmoe.facts import Allocation, DeviceInfo, ModelSpec
    from vkmoe.gpu.link_speed import LinkSpeed
    from vkmoe.models import ModelFile
    from vkmoe.placement.forecast.device_profiles import DeviceProfile
    from vkmoe.placement.forecast.expectation import Expectation
    from vkmoe.placement.plan import Decision

__all__ = ["plan"]

_MIB = 1 << 20


@config_options
def plan(
    context: typer.Context,
    *,
    positional: Positional = None,
    model: Model = None,
    device_profile: Annotated[
        str | None,
        option(
            "--device-profile",
            help="Plan for a device that is not here: the name of a profile that comes with vkmoe "
            "(navi31, rtx3060-12gb, 8gb-nobar, uma-32gb), or a JSON file like theirs.",
            metavar="NAME",
        ),
    ] = None,
    as_json: Json = False,
    engine: EngineConfig,
) -> None:
    """Explain every byte that a model would take on a device, and how fast it can be at best.

    Loads no weights. With --device-profile the device need not be here. Without it, the memory of
    the device that is chosen is measured, which takes a second or two. Each line says what changes
    it.
    """
    from vkmoe.llm import demo_model_path
    from vkmoe.models import open_model

    if device_profile is not None and is_typed(context, "device"):
        if is_typed(context, "device_profile"):
            raise UsageError(
                f"--device-profile {device_profile} contradicts --device {engine.device}",
                "leave one of them out",
            )
        device_profile = None
    path = chosen_model(context, positional, model)
    with open_model(path if path is not None else demo_model_path()) as opened:
        machine = _machine(device_profile, engine, Path(opened.file.path))
        profile, decided = machine.profile, _decided(opened, machine, engine)
        found = _expectation(opened, profile, engine, decided)
        notes = idle_notes(engine, decided.plan)
        if as_json:
            document = _document(opened.spec, profile, decided, found) | {"notes": notes}
            typer.echo(json.dumps(document, indent=2))
            return
        typer.echo("\n".join([*_lines(opened.spec, profile, decided, found), *notes]))


class _Machine(NamedTuple):
    """Holds a device, how kernels are launched on it, and how fast misses reach it."""

    profile: DeviceProfile
    tuning: Any  # of kernels, as `decide` takes it; None: by default
    link: LinkSpeed | None


def _machine(name: str | None, engine: EngineConfig, model: Path) -> _Machine:
    """Read a profile, or describe the device that is chosen here, and measure it.

    The disk is that of the `model`.
    """
    from vkmoe.bench.clock import Clock, Memory, host_bytes_per_second
    from vkmoe.bench.measure import MIN_REPEATS
    from vkmoe.cpu.device import n_cores
    from vkmoe.devices import open_device
    from vkmoe.gguf_file.disk import read_speed
    from vkmoe.gpu.link_speed import LinkSpeed
    from vkmoe.placement.forecast.device_profiles import DeviceProfile, Speeds, read_profile
    from vkmoe.placement.link import link_of_misses
    from vkmoe.placement.memory import available_bytes
    from vkmoe.placement.remembered import tuning_for

    if name is not None:
        profile = read_profile(name)
        speed = 0.0 if profile.info.is_uma else profile.speeds.link
        return _Machine(profile, None, LinkSpeed(speed, speed, speed) if speed else None)
    host, link = host_bytes_per_second(engine.threads or n_cores()), None
    disk = read_speed(model)
    with open_device(engine.device, engine.validation, engine.threads) as device:
        info, speeds = device.info, Speeds(host, 0.0, host, disk)
        tuning = tuning_for(info, engine.tuning)
        if info.is_vulkan:
            link = link_of_misses(device)
            with Clock(device, MIN_REPEATS, Memory.of(info)) as clock:
                found = clock.roofline()
            assert found.link is not None, "every Vulkan device has one"
            reads = 1e9 * found.link.reads.value.median
            speeds = Speeds(1e9 * found.gb_per_s, reads, host, disk)
    profile = DeviceProfile(info, available_bytes(), speeds, {"speeds": "measured now"})
    return _Machine(profile, tuning, link)


def _decided(model: ModelFile, machine: _Machine, engine: EngineConfig) -> Decision:
    """Decide as a run would that has nothing to measure."""
    from vkmoe.placement.cache_choice import copies_overlap
    from vkmoe.placement.mode_choice import decide_with, known_choice, mode_question
    from vkmoe.placement.plan import decide

    info, free = machine.profile.info, machine.profile.available_host_bytes
    choice = known_choice(mode_question(engine, model, info, machine.tuning, free), engine)
    overlaps = copies_overlap(engine, has_queue=not info.is_uma)
    tuning, link = machine.tuning, machine.link
    return decide_with(
        choice,
        engine,
        lambda asked: decide(asked, model, info, tuning, lambda: link, overlaps, free),
    )


def _expectation(
    model: ModelFile, profile: DeviceProfile, engine: EngineConfig, decided: Decision
) -> Expectation:
    """Bound the speed; hits go by the expert profile, if there is one that has counted uses."""
    from vkmoe.experts.records.profile import load_profile, profiled_model
    from vkmoe.placement.forecast.expectation import expect, token_bytes
    from vkmoe.placement.forecast.hit_curve import MEAN_CURVE, HitCurve

    spec, curve = model.spec, MEAN_CURVE
    if engine.expert_profile is not None and spec.experts is not None:
        tensors = [tensor for layer in model.expert_tensors for tensor in layer]
        described = profiled_model(spec, len(model.expert_tensors), tensors)
        history = load_profile(Path(engine.expert_profile), described, spec.n_vocab)
        if history is not None and history.counts.any():
            counts = history.counts.reshape(-1, spec.experts.n_experts)
            curve = HitCurve.of_counts(counts, "--expert-profile, if the most used have the slots")
    weights, embedding, info = decided.weights, model.tensors.embeddings, profile.info
    n_bytes = weights.pieces[0] if info.is_vulkan else embedding.tensor.n_bytes
    read, shared = token_bytes(spec, weights, n_bytes, decided.plan.host_layers), info.is_uma
    return expect(decided.plan, spec, read, profile.speeds, curve, shares_memory=shared)


# ----- in words -----


def _lines(
    spec: ModelSpec, profile: DeviceProfile, decided: Decision, found: Expectation
) -> list[str]:
    made, info = decided.plan, profile.info
    lines = [
        f"model         {spec.name} ({spec.architecture}), context {made.ctx_size} tokens",
        f"device        {info.name} ({info.type}, {info.driver})",
        f"experts       {mode_line(made)}",
        "",
        f"{'MiB':>12} place    what (why; what changes it)",
    ]
    lines += [_line(line) for line in made.lines]
    lines += ["", *_totals(profile, decided), "", *_speed(profile, found)]
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
    lines.append(f"host memory   {_of(needed, free)} that are free")
    if in_file := made.total("file"):
        left = max(0, free - needed)
        slow = "; what does not fit there is read from the disk again and again"
        lines.append(
            f"file          {_of(in_file, left)} that are left to keep it in memory"
            + slow * (in_file > left)
        )
    return lines


def _of(n_bytes: int, n_all: int) -> str:
    return f"{n_bytes / _MIB:,.1f} of {n_all / _MIB:,.1f} MiB"


def _speed(profile: DeviceProfile, found: Expectation) -> list[str]:
    """Say how fast a token can be at best, and what that goes by."""
    read, reason = found.bytes, found.hit_rate_reason
    hits = f"{100 * found.hit_rate:.1f} % ({reason})" if found.hit_rate is not None else reason
    of_token = f"{read.trunk / _MIB:,.1f} MiB of the trunk, {read.experts / _MIB:,.1f} of experts"
    lines = [f"hit rate      {hits}", f"a token reads {of_token}"]
    if found.file_share:
        in_file = found.file_share * read.others / _MIB
        lines.append(f"from the file {in_file:,.1f} MiB of these: no memory holds them then")
    rates = [f"{found.rate:,.1f} tok/s at most"] if found.rate is not None else []
    if found.without_hits and found.with_hits_alone and found.hit_rate != 1.0:
        ends = f"{found.without_hits:,.1f} without a hit", f"{found.with_hits_alone:,.1f}"
        rates += [ends[0], f"{ends[1]} with hits alone"]
    if not rates:
        return [*lines, f"decode        unknown: {found.bound}"]
    lines.append(f"decode        {', '.join(rates)} (bound by {found.bound})")
    names = {"device": "device memory", "link": "link", "host": "the CPU's memory", "file": "file"}
    given = [f"{names[key]} {x / 1e9:,.1f} GB/s" for key, x in asdict(profile.speeds).items() if x]
    lines.append(f"speeds        {', '.join(given)}")
    return lines + [f"  {key:11} {text}" for key, text in profile.sources.items()]


def _document(
    spec: ModelSpec, profile: DeviceProfile, decided: Decision, found: Expectation
) -> dict[str, Any]:
    from vkmoe.placement.memory import option_of

    made = decided.plan
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
        "expert_slots": list(made.expert_slots),
        "host_layers": made.host_layers,
        "cpu_layers": made.cpu_layers,
        "lines": [
            {
                "item": line.item,
                "place": line.place,
                "bytes": line.n_bytes,
                "heap": line.heap if line.name is not None else None,
                "reason": line.reason,
                "option": option_of(line),
            }
            for line in made.lines
        ],
        "heaps": {str(heap): n_bytes for heap, n_bytes in made.heap_totals().items()},
        "host_memory_bytes": profile.available_host_bytes,
        "expected": asdict(found),
        "bytes_per_second": asdict(profile.speeds),
        "sources": dict(profile.sources),
    }


def _device(info: DeviceInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "type": info.type,
        "driver": info.driver,
        "heaps": [asdict(heap) for heap in info.heaps],
    }
