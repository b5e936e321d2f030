"""This module is `vkmoe simulate`: what an expert cache would do on recorded routing.

It owns what is asked and the order of the work; simulate_report.py has what comes out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from vkmoe.choices import PolicyName
from vkmoe.cli.notes import counting, dependent_notes, note
from vkmoe.cli.options import Output, check_plot, config_options
from vkmoe.config import EngineConfig
from vkmoe.errors import UsageError
from vkmoe.modes import Cache, Resident
from vkmoe.option_fields import option

if TYPE_CHECKING:
    from vkmoe.experts.decide.settings import CacheSettings
    from vkmoe.experts.records.trace import Trace, TraceHeader
    from vkmoe.experts.study.replay import Sweep

_POLICIES = ",".join(get_args(PolicyName))
# Options of the engine that decide which experts are in the slots, and when.
_DECIDING = (
    "expert_policy", "moe_warmpin", "moe_warmpin_after", "expert_resident_ids",
    "executor", "promote_on_read", "moe_predict_prefetch", "expert_copies", "draft", "draft_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class _Tried:
    slots: str | None = option(
        None,
        "Slots per layer to try, such as 4,8,16. "
        "Default: from the experts a token uses, doubled, to all.",
        metavar="NUMBERS",
    )
    policy: str = option(
        _POLICIES,
        "Policies to compare. Figures of one policy are of --expert-policy if it is "
        "among these, else of the first.",
        metavar="POLICIES",
    )


@dataclass(frozen=True)
class _Picture:
    plot: str | None = option(None, "Draw the hit rates too, as PNG, SVG or PDF.", metavar="FILE")


@config_options
def simulate(
    *,
    traces: Annotated[list[str], typer.Argument(metavar="TRACE...", hidden=True)],
    tried: _Tried,
    config: Annotated[EngineConfig, _DECIDING],
    picture: _Picture,
    output: Annotated[Output, ("as_json", "quiet")],
) -> None:
    """Replay traces of `vkmoe trace` through the expert cache, without a model or a GPU.

    Shows hit rates by slots and policy beside the best any cache could do (Belady's optimum), what
    sharing slots among layers changes, the bytes that are read and copied, and how many slots to
    give; --plot and --json also tell what misses come from. Several traces of one model count as
    one run after another. What --expert-policy forecast is worth, traces tell that were made with
    --with-ids; without, it goes by how often experts were used.

    Decisions and hits are those of an engine with the same options and as many slots in every
    layer that runs the same tokens, beginning with an empty cache. A trace knows neither of a
    profile (--expert-profile) nor of layers that have different numbers of slots, as
    --expert-cache and a profile may give them. Both ways of --expert-allocation are shown, and
    --slots stands for --expert-slots. By default copies are in place before the next token, and
    nothing lands while it is read. --expert-copies overlap stands for copies that take a token
    longer. Every token runs alone; with --draft mtp those of replies are verified together with
    guesses, of which 70 % are taken to be right.
    """
    from vkmoe.cli.cache.simulate_report import as_document, as_text, draw

    policies = _listed("--policy", tried.policy, _POLICIES.split(","), f"known are {_POLICIES}")
    if picture.plot is not None:
        check_plot(picture.plot, traces)
    trace = _guessing(_read(traces, output.quiet), config)
    counts = _slots(tried.slots, trace, config)
    for line in () if output.quiet else _idle(config, policies):
        note(line)
    sweep = _replay(trace, counts, policies, config, output.quiet)
    found = json.dumps(as_document(sweep), indent=2) + "\n" if output.as_json else as_text(sweep)
    typer.echo(found, nl=False)
    if picture.plot is not None:
        draw(sweep, Path(picture.plot))
        _note(f"the plot is in {picture.plot}", output)


def _note(text: str, output: Output) -> None:
    if not output.quiet:
        note(text)


# ----- what was asked -----


def _listed(flag: str, text: str, known: Sequence[str], hint: str) -> list[Any]:
    """Read words between commas, in the order of `known`. Raises UsageError for any other."""
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in known:
            raise UsageError(f"{flag} is {text!r}: {word!r} is not possible", hint)
    if not words:
        raise UsageError(f"{flag} is {text!r}: it names none", hint)
    return [word for word in known if word in words]


def _slots(text: str | None, trace: Trace, config: EngineConfig) -> list[int]:
    """Read the numbers of slots to try; None: those that are worth a look."""
    if text is None:
        return _ladder(trace, config)
    n_experts = trace.header.n_experts
    known = [str(n + 1) for n in range(n_experts)]
    hint = f"write numbers of experts from 1 to {n_experts}, such as 4,8,16"
    return [int(word) for word in _listed("--slots", text, known, hint)]


def _idle(config: EngineConfig, policies: list[PolicyName]) -> Iterator[str]:
    yield from dependent_notes(config)
    chosen = config.expert_policy
    if chosen not in policies and chosen != EngineConfig.expert_policy:
        yield f"--expert-policy {chosen} has no effect: it is not one of --policy"


def _ladder(trace: Trace, config: EngineConfig) -> list[int]:
    """Choose the numbers of slots worth a look that have room for residents and pins."""
    from vkmoe.experts.study.replay import ladder

    header, fitting = trace.header, []
    for count in ladder(header.n_experts, header.n_used):
        try:
            _settings_of(header, config, count)
        except UsageError:
            if count == header.n_experts:  # it is not for want of room
                raise
        else:
            fitting.append(count)
    return fitting


# ----- the work -----


def _read(paths: list[str], quiet: bool) -> Trace:
    from vkmoe.experts.records.trace import joined, read_trace

    trace = joined([read_trace(Path(path)) for path in paths])
    for text in () if quiet else trace.notes:
        note(text)
    return trace


def _guessing(trace: Trace, config: EngineConfig) -> Trace:
    """Return the trace as guesses make it, where they are asked for."""
    from vkmoe.experts.study.guesses import with_guesses
    from vkmoe.placement.forecast.cost import ACCEPTED

    if config.draft == "lookup":
        raise UsageError("a trace does not tell what --draft lookup finds", "try --draft mtp")
    if config.draft != "mtp":
        return trace
    if config.executor == "stepped":
        raise UsageError(
            "--draft mtp verifies several tokens at once, which --executor stepped cannot replay",
            "leave one of them out",
        )
    return with_guesses(trace, config.draft_tokens, ACCEPTED)


def _replay(
    trace: Trace,
    counts: list[int],
    policies: list[PolicyName],
    config: EngineConfig,
    quiet: bool,
) -> Sweep:
    from vkmoe.experts.decide.settings import MOST_LANDING, copies_overlap
    from vkmoe.experts.study.replay import Transfers, Wanted, run_sweep

    def settings(policy: PolicyName, n_slots: int) -> CacheSettings:
        prefetches = config.moe_predict_prefetch if policy == "forecast" else None
        asked = replace(config, expert_policy=policy, moe_predict_prefetch=prefetches)
        return _settings_of(trace.header, asked, n_slots)

    late = copies_overlap(config, has_queue=False)  # only where that is asked for
    wanted = Wanted(
        counts,
        policies,
        settings,
        main=config.expert_policy,
        curve=_ladder(trace, config),
        transfers=Transfers(late, MOST_LANDING if config.promote_on_read else 0),
    )
    with counting("replaying", shown=not quiet) as progress:
        return run_sweep(trace, wanted, progress)


def _settings_of(header: TraceHeader, config: EngineConfig, n_slots: int) -> CacheSettings:
    """Choose the settings of the engine's cache, by the engine's own rule."""
    from vkmoe.experts.decide.settings import cache_settings, copies_overlap
    from vkmoe.facts import ExpertSpec, MemoryPlan
    from vkmoe.kv_types import both

    plan = MemoryPlan(
        ctx_size=0,
        kv_types=both("f16"),
        mode=Resident() if n_slots >= header.n_experts else Cache(),
        lines=(),
        expert_slots=(n_slots,) * header.n_layers,
        executor=config.executor or "fused",
    )
    experts = ExpertSpec(header.n_experts, header.n_used, width=0)
    late = copies_overlap(config, has_queue=False)
    return cache_settings(config, header.model, experts, plan, late)
