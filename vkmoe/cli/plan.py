"""This module is `vkmoe plan`: what would go where, why, and how fast that can be at best.

It owns the words. What is decided, for a device that is here or one of a profile, is decided as for
a run (placement/plan.py); the bound on speed is in placement/expectation.py.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkmoe.bench.measure import MIN_REPEATS
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
    from vkmoe.models import ModelFile
    from vkmoe.placement.device_profiles import DeviceProfile
    from vkmoe.placement.expectation import Expectation
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

    Loads no weights. With --device-profile the device need not be here; without, it is measured how
    fast its memory is (a second or two). Each line says what changes it.
    """
    from vkmoe.llm import demo_model_path
    from vkmoe.models import open_model

    if device_profile is not None and engine.device is not None and is_typed(context, "device"):
        raise UsageError(
            f"--device-profile {device_profile} contradicts --device {engine.device}",
            "leave one of them out",
        )
    path = chosen_model(context, positional, model)
    with open_model(path if path is not None else demo_model_path()) as opened:
        profile = _profile_of(device_profile, engine)
        decided = _decided(opened, profile, engine)
        found = _expectation(opened, profile, engine, decided)
        if as_json:
            typer.echo(json.dumps(_document(opened.spec, profile, decided, found), indent=2))
            return
        typer.echo("\n".join(_lines(opened.spec, profile, decided, found)))
        typer.echo("\n".join(idle_notes(engine, decided.plan)), nl=bool(decided.plan.notes))


def _profile_of(name: str | None, engine: EngineConfig) -> DeviceProfile:
    """Read a profile, or describe the device that is chosen here, and measure it."""
    from vkmoe.bench.clock import Clock, Memory, host_bytes_per_second
    from vkmoe.cpu.device import n_cores
    from vkmoe.devices import open_device
    from vkmoe.placement.device_profiles import DeviceProfile, Speeds, read_profile
    from vkmoe.placement.memory import available_bytes

    if name is not None:
        return read_profile(name)
    host = host_bytes_per_second(engine.threads or n_cores())
    with open_device(engine.device, engine.validation, engine.threads) as device:
        info, speeds = device.info, Speeds(host, 0.0, host)
        if info.is_vulkan:
            with Clock(device, MIN_REPEATS, Memory.of(info)) as clock:
                found = clock.roofline()
            link = 1e9 * found.host_reads.value.median
            speeds = Speeds(1e9 * found.copy_gb_per_s, link, host)
    return DeviceProfile(info, available_bytes(), speeds, {"speeds": "measured now"})


def _decided(model: ModelFile, profile: DeviceProfile, engine: EngineConfig) -> Decision:
    """Decide as a run would, with the link's speed as it is given."""
    from vkmoe.gpu.link_speed import LinkSpeed
    from vkmoe.placement.cache_choice import copies_overlap
    from vkmoe.placement.plan import decide

    link, info = profile.speeds.link, profile.info
    speed = LinkSpeed(link, link) if link and not info.is_uma else None
    overlaps = copies_overlap(engine, has_queue=not info.is_uma)
    free = profile.available_host_bytes
    return decide(engine, model, info, None, lambda: speed, overlaps, free)


def _expectation(
    model: ModelFile, profile: DeviceProfile, engine: EngineConfig, decided: Decision
) -> Expectation:
    """Bound the speed; hits go by the expert profile, if there is one."""
    from vkmoe.experts.records.profile import load_profile, profiled_model
    from vkmoe.placement.expectation import expect, token_bytes

    spec, counts = model.spec, None
    if engine.expert_profile is not None and spec.experts is not None:
        tensors = [tensor for layer in model.expert_tensors for tensor in layer]
        described = profiled_model(spec, len(model.expert_tensors), tensors)
        history = load_profile(Path(engine.expert_profile), described, spec.n_vocab)
        counts = history.counts if history is not None else None
    weights = decided.weights
    read = token_bytes(spec, weights, weights.pieces[0] if weights.pieces else 0)
    return expect(decided.plan, spec, read, profile.speeds, counts)


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
    from vkmoe.placement.plan import option_of

    option = option_of(line)
    change = f"; {option} changes it" if option and option not in line.reason else ""
    return f"{line.n_bytes / _MIB:12,.1f} {line.place:8} {line.item} ({line.reason}{change})"


def _totals(profile: DeviceProfile, decided: Decision) -> list[str]:
    """Compare what each heap gives with what there is."""
    lines = []
    for heap, n_bytes in sorted(decided.plan.heap_totals().items()):
        size, local = profile.info.heaps[heap].size, profile.info.heaps[heap].device_local
        kind = "device" if local else "host"
        lines.append(
            f"heap {heap}        {n_bytes / _MIB:,.1f} of {size / _MIB:,.1f} MiB ({kind} memory)"
        )
    free = profile.available_host_bytes
    host = decided.plan.total("host") + decided.plan.total("file")
    lines.append(f"host memory   {host / _MIB:,.1f} of {free / _MIB:,.1f} MiB that are free")
    return lines


def _speed(profile: DeviceProfile, found: Expectation) -> list[str]:
    """Say how fast a token can be at best, and what that goes by."""
    read, reason = found.bytes, found.hit_rate_reason
    hits = f"{100 * found.hit_rate:.1f} % ({reason})" if found.hit_rate is not None else reason
    of_token = f"{read.trunk / _MIB:,.1f} MiB of the trunk, {read.experts / _MIB:,.1f} of experts"
    lines = [f"hit rate      {hits}", f"a token reads {of_token}"]
    if found.fastest is None:
        return [*lines, f"decode        unknown: {found.bound}"]
    rates = [f"{found.rate:,.1f} tok/s at most"] if found.rate is not None else []
    if found.slowest is not None and found.hit_rate != 1.0:
        rates += [f"{found.slowest:,.1f} without a hit", f"{found.fastest:,.1f} with hits alone"]
    lines.append(f"decode        {', '.join(rates)} (bound by {found.bound})")
    names = {"device": "device memory", "link": "link", "host": "the CPU's memory"}
    given = [f"{names[key]} {x / 1e9:,.1f} GB/s" for key, x in asdict(profile.speeds).items() if x]
    lines.append(f"speeds        {', '.join(given)}")
    return lines + [f"  {key:11} {text}" for key, text in profile.sources.items()]


def _document(
    spec: ModelSpec, profile: DeviceProfile, decided: Decision, found: Expectation
) -> dict[str, Any]:
    from vkmoe.placement.plan import option_of

    made = decided.plan
    return {
        "model": spec.name,
        "architecture": spec.architecture,
        "device": _device(profile.info),
        "ctx_size": made.ctx_size,
        "kv_type": made.kv_type,
        "mode": made.mode.name,
        "mode_reason": made.mode.reason,
        "executor": made.executor,
        "expert_slots": list(made.expert_slots),
        "cpu_layers": made.cpu_layers,
        "lines": [
            {
                "item": line.item,
                "place": line.place,
                "bytes": line.n_bytes,
                "heap": line.heap if line.place != "file" else None,
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
        "notes": list(made.notes),
    }


def _device(info: DeviceInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "type": info.type,
        "driver": info.driver,
        "heaps": [asdict(heap) for heap in info.heaps],
    }
