"""`vkmoe simulate`: what an expert cache would do on recorded routing."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vkmoe.cli.notes import note
from vkmoe.cli.options import Json, config_options, option
from vkmoe.cli.progress import counting
from vkmoe.config import EngineConfig, parse_ids
from vkmoe.errors import UsageError, VkmoeError

if TYPE_CHECKING:
    from vkmoe.experts.settings import CacheSettings, PolicyName
    from vkmoe.experts.sweep import Sweep
    from vkmoe.experts.trace import Trace, TraceHeader
    from vkmoe.facts import ModelSpec

__all__ = ["simulate"]

POLICIES = "lru,slru,lfru"


def _same(name: str) -> Any:
    """The engine's option of that name, default and help included."""
    (known,) = (item for item in fields(EngineConfig) if item.name == name)
    return field(default=known.default, metadata=known.metadata)


@dataclass(frozen=True)
class CacheOptions:
    """Those of the engine's options that decide which experts are in the slots."""

    expert_half_life: float = _same("expert_half_life")
    moe_warmpin: int | None = _same("moe_warmpin")
    moe_warmpin_after: int = _same("moe_warmpin_after")
    expert_resident_selection: Literal["first_n", "frequency", "manual"] | None = _same(
        "expert_resident_selection"
    )
    expert_num_resident: int | None = _same("expert_num_resident")
    expert_warmup_tokens: int = _same("expert_warmup_tokens")
    expert_resident_ids: str | None = _same("expert_resident_ids")


@config_options
def simulate(
    *,
    traces: Annotated[list[str], typer.Argument(metavar="TRACE...", hidden=True)],
    slots: Annotated[
        str | None,
        option(
            "--slots",
            metavar="NUMBERS",
            help="Slots per layer to try, such as 4,8,16. "
            "Default: from the experts a token uses, doubled, to all.",
        ),
    ] = None,
    policy: Annotated[
        str,
        option(
            "--policy",
            metavar="POLICIES",
            help="Policies to try; slru, or else the first, is looked at closely.",
        ),
    ] = POLICIES,
    cache: CacheOptions,
    plot: Annotated[
        str | None,
        option("--plot", metavar="FILE", help="Draw the hit rates too, as PNG, SVG or PDF."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay traces of `vkmoe trace` through the expert cache, without a model or a GPU.

    Shows hit rates by slots and policy beside the best any cache could do (Belady's optimum), what
    misses come from, what sharing slots among layers changes, how local the routing is, and how
    many slots to give. Decisions and hits are exactly those of the engine with the same options.
    Several traces of one model count as one run after another.
    """
    policies = _policies(policy)
    if plot is not None:
        _check_plotting(plot, traces)
    config = EngineConfig(**asdict(cache))
    trace = _read(traces)
    counts = _slots(slots, trace, config)
    began = time.perf_counter()
    sweep = _replay(trace, counts, policies, config)
    seconds = time.perf_counter() - began
    from vkmoe.cli.simulation import as_document, as_text
    from vkmoe.experts.locality import locality

    local = locality(trace)
    if as_json:
        typer.echo(json.dumps(as_document(sweep, local), indent=2))
    else:
        typer.echo(as_text(sweep, local), nl=False)
    note(f"{len(sweep.rungs) * (len(policies) + 1)} replays took {seconds:.1f} s")
    if plot is not None:
        _draw(sweep, Path(plot))


# ----- what was asked -----


def _policies(text: str) -> list[PolicyName]:
    known = POLICIES.split(",")
    names = list(dict.fromkeys(piece.strip().lower() for piece in text.split(",") if piece.strip()))
    for name in names:
        if name not in known:
            raise UsageError(f"--policy is {text!r}: no policy {name!r}", f"known are {POLICIES}")
    if not names:
        raise UsageError(f"--policy is {text!r}: it names none", f"known are {POLICIES}")
    return [name for name in known if name in names]  # type: ignore[misc]


def _slots(text: str | None, trace: Trace, config: EngineConfig) -> tuple[int, ...]:
    """The numbers of slots to try. Raises UsageError for one that the model cannot have."""
    from vkmoe.experts.sweep import ladder

    header = trace.header
    if text is None:
        ids = config.expert_resident_ids
        least = len(parse_ids(ids)) if ids is not None else config.expert_num_resident or 1
        counts = ladder(header.n_experts, header.n_used)
        return tuple(count for count in counts if count >= min(least, header.n_experts))
    chosen = []
    for piece in (piece.strip() for piece in text.split(",")):
        if not piece:
            continue
        if not (piece.isascii() and piece.isdigit() and len(piece) < 10):
            raise UsageError(
                f"--slots is {text!r}: {piece!r} is not a number", "write it as 4,8,16"
            )
        if not 1 <= int(piece) <= header.n_experts:
            raise UsageError(
                f"--slots is {text!r}: {piece} slots", f"a layer has {header.n_experts} experts"
            )
        chosen.append(int(piece))
    if not chosen:
        raise UsageError(f"--slots is {text!r}: it names no number", "write it as 4,8,16")
    return tuple(chosen)


def _check_plotting(plot: str, traces: list[str]) -> None:
    """Raises VkmoeError before the work where the plot could not be drawn."""
    from importlib.util import find_spec

    from vkmoe.experts.writing import reason_against_writing, refuse_to_replace

    if find_spec("matplotlib") is None:
        raise VkmoeError("--plot needs matplotlib", 'pip install "vkmoe[plot]"')
    if Path(plot).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot is {plot!r}, not a picture", "name it .png, .svg or .pdf")
    refuse_to_replace("--plot", Path(plot), traces)
    if reason := reason_against_writing(Path(plot)):
        raise VkmoeError(f"the plot cannot be written: {reason}", "give another --plot")


def _read(paths: list[str]) -> Trace:
    from vkmoe.experts.trace import joined
    from vkmoe.experts.trace_reader import read_trace

    trace = joined([read_trace(Path(path)) for path in paths])
    for text in trace.notes:
        note(text)
    return trace


# ----- the work -----


def _replay(
    trace: Trace, counts: tuple[int, ...], policies: list[PolicyName], config: EngineConfig
) -> Sweep:
    from vkmoe.experts.sweep import run_sweep

    def settings(policy: PolicyName, n_slots: int) -> CacheSettings:
        return _settings(trace, replace(config, expert_policy=policy), n_slots)

    with counting("replaying") as progress:
        return run_sweep(trace, counts, settings, policies, progress)


def _settings(trace: Trace, config: EngineConfig, n_slots: int) -> CacheSettings:
    """What the engine's cache would be told, by the engine's own rule."""
    from vkmoe.facts import MemoryPlan
    from vkmoe.placement.cache_choice import cache_settings

    header = trace.header
    experts_in: Literal["device", "cache"] = "device" if n_slots >= header.n_experts else "cache"
    plan = MemoryPlan(0, "f16", experts_in, (), (n_slots,) * header.n_layers)
    return cache_settings(config, _spec(header), plan)


def _spec(header: TraceHeader) -> ModelSpec:
    """A model of which only name and experts are true; the rule asks for nothing else."""
    from vkmoe.facts import ExpertSpec, ModelSpec, RopeSpec

    experts = ExpertSpec(header.n_experts, header.n_used, width=0)
    return ModelSpec(
        architecture=header.architecture,
        name=header.model,
        n_layers=header.n_layers,
        width=0,
        n_heads=0,
        n_kv_heads=0,
        head_dim=0,
        n_vocab=0,
        context_length=0,
        norm_eps=0.0,
        rope=RopeSpec(0),
        qk_norm="none",
        feed_forward_width=0,
        experts=experts,
        tied_embeddings=False,
    )


def _draw(sweep: Sweep, path: Path) -> None:
    from vkmoe.cli.simulation_plot import draw

    draw(sweep, path)
    note(f"the plot is in {path}")
