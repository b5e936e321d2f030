"""Hit rates of the expert cache by policy and slots, beside the best that is possible.

python -m bench.expert_cache --record

Records which experts the demo model uses on three prompts (bench/prompts/: code, prose, structured
text), and replays that with the engine's own decisions: hit rates of each policy beside Belady's
optimum, with the default warm-pinning and without, slots of each layer's own and shared ones. Then
invented, skewed routing, on which slru is compared with itself without frequencies. Last the engine
runs with a slot for every expert: nothing may be copied and no table written. No clock takes part.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.command import command_line, finish, run_main
from bench.hit_rates import (
    DEFAULT,
    POLICIES,
    Curve,
    Point,
    Setting,
    frequency_pays,
    mean_curve,
    measure_curve,
)
from bench.routing import PROMPTS, prompt_text, record_trace, skewed_trace
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import Row, summarise
from vkmoe.errors import VkmoeError
from vkmoe.experts.records.trace import Trace, joined
from vkmoe.llm import LLM

SLOTS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 31)
JOINED = "one after another"
# The first is what the engine does by default, but for admission and guesses: see bench.prefetch.
SETTINGS = tuple(Setting(own, pins) for own in ("layer", "global") for pins in (True, False))
CONTEXT = 1024
SKEWED = {"n_tokens": 1500, "n_layers": 4, "n_experts": 64, "n_used": 8}
SKEWED_SLOTS = (12, 16, 24, 32, 48)


def main() -> None:
    """Record, replay, compare."""
    parser = command_line(__doc__)
    parser.add_argument("--prompt", type=int, default=540, help="tokens of each (default: 540)")
    parser.add_argument("--reply", type=int, default=61, help="tokens after each (default: 61)")
    parser.add_argument("--slots", type=_numbers, default=SLOTS, help="such as 1,4,16")
    parser.add_argument("--full", type=int, default=64, help="tokens with all slots (default: 64)")
    options = parser.parse_args()
    if options.prompt < 2 or options.reply < 2 or options.prompt + options.reply > CONTEXT:
        parser.error(f"--prompt and --reply: at least 2 each, at most {CONTEXT} together")
    with LLM(device=options.device, ctx_size=CONTEXT) as llm:
        card = describe(llm.device_info)
        print_card(card)
        traces = _record(llm, options)
    curves = _replay(traces, options.slots)
    results: dict[str, Any] = {"traces": {name: trace.n_tokens for name, trace in traces.items()}}
    results |= _report(curves)
    results["skewed"] = _skewed(options.repeats)
    results["all_slots"] = _all_slots(options, traces[JOINED].header.n_experts)
    results["rows"] = [*results["rows"], *results["skewed"].pop("rows")]
    finish("expert_cache", card, results, options.record)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(piece) for piece in text.split(",")}))


# ----- the demo model -----


def _record(llm: LLM, options: argparse.Namespace) -> dict[str, Trace]:
    """Routing of each prompt, and of all as one run."""
    traces = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in PROMPTS:
            tokens = llm.tokenizer.encode(prompt_text(name))[: options.prompt]
            path = Path(folder) / f"{name}.jsonl"
            traces[name] = record_trace(llm, tokens, options.reply, path)
            print(f"recorded {name}: {traces[name].n_tokens} tokens", flush=True)
    traces[JOINED] = joined(list(traces.values()))
    header = traces[JOINED].header
    print(
        f"{header.n_layers} MoE layers, {header.n_used} of {header.n_experts} experts per token\n"
    )
    return traces


def _replay(traces: Mapping[str, Trace], slots: tuple[int, ...]) -> dict[Setting, dict[str, Curve]]:
    return {
        setting: {name: measure_curve(trace, slots, setting) for name, trace in traces.items()}
        for setting in SETTINGS
    }


def _report(curves: Mapping[Setting, Mapping[str, Curve]]) -> dict[str, Any]:
    """Tables of the mean over the prompts; JSON of every replay."""
    documents: dict[str, dict[str, Any]] = {}
    for setting, by_workload in curves.items():
        mean = mean_curve([by_workload[name] for name in PROMPTS])
        print(f"{setting}: hit rate in %, mean of the prompts, in brackets the worst layer")
        print("\n".join(_table(mean)), "\n", flush=True)
        named = {**by_workload, "mean of the prompts": mean}
        documents[str(setting)] = {
            name: curve.document() | {"best_policy": curve.winners()}
            for name, curve in named.items()
        }
    return {"rows": _rows(curves), **_beside_lru(curves), "curves": documents}


def _beside_lru(curves: Mapping[Setting, Mapping[str, Curve]]) -> dict[str, Any]:
    """Where the default policy has fewer hits than lru: with the default setting, and at all."""
    below: list[dict[str, Any]] = [
        {"setting": str(setting), "workload": name, "slots": n, "by": less}
        for setting, by_workload in curves.items()
        for name, curve in by_workload.items()
        for n, less in curve.below_lru()
    ]
    for setting, by_workload in curves.items():
        n_all = sum(len(curve.slots) for curve in by_workload.values())
        found = [item for item in below if item["setting"] == str(setting)]
        most = f", at most {100 * max(item['by'] for item in found):.2f} points" if found else ""
        print(f"{setting}: {DEFAULT} is below lru in {len(found)} of {n_all} replays{most}")
    met = not any(item["setting"] == str(SETTINGS[0]) for item in below)
    print(f"by default it is at or above lru at every size: {'yes' if met else 'NO'}\n")
    return {"default_at_or_above_lru": met, "below_lru": below}


def _table(curve: Curve) -> Iterable[str]:
    heads = [*POLICIES, "Belady", "best policy", f"{DEFAULT}'s misses: first use, size, policy"]
    yield f"{'slots':>5}" + "".join(f"{head:>15}" for head in heads[:-1]) + f"   {heads[-1]}"
    for index, n_slots in enumerate(curve.slots):
        points = [*(curve.policies[name][index] for name in POLICIES), curve.best[index]]
        split = "".join(f"{100 * s:8.1f}" for s in curve.policies[DEFAULT][index].misses)
        cells = "".join(f"{_rate(point):>15}" for point in points)
        yield f"{n_slots:>5}{cells}{curve.winners()[index]:>15}{split}"


def _rate(point: Point) -> str:
    return f"{100 * point.rate:.1f} ({100 * point.worst:.1f})"


def _rows(curves: Mapping[Setting, Mapping[str, Curve]]) -> list[Row]:
    """One line for each size: the default as it is, over the prompts."""
    by_workload = curves[SETTINGS[0]]
    found = [by_workload[name] for name in PROMPTS]
    return [
        Row(
            f"{DEFAULT} with {n} slots",
            summarise([100 * curve.policies[DEFAULT][index].rate for curve in found]),
            "%",
            "count",
        )
        for index, n in enumerate(found[0].slots)
    ]


# ----- invented routing -----


def _skewed(repeats: int) -> dict[str, Any]:
    """slru with and without frequencies on the same skewed routing, a new one each repeat."""
    print(
        "skewed routing (Zipf, every fourth token passes through; "
        f"{SKEWED['n_used']} of {SKEWED['n_experts']} experts): hit rate in %"
    )
    traces = [skewed_trace(**SKEWED, seed=seed) for seed in range(repeats)]
    rows, wins = [], True
    for n_slots in SKEWED_SLOTS:
        pairs = [frequency_pays(trace, n_slots) for trace in traces]
        wins &= all(by_frequency > by_recency for by_frequency, by_recency in pairs)
        for what, index in (("slru", 0), ("slru by recency alone", 1)):
            rates = summarise([100 * pair[index] for pair in pairs])
            rows.append(Row(f"{what}, {n_slots} slots", rates, "%", "count"))
            print(rows[-1])
    print(f"frequencies win at every size and in every repeat: {'yes' if wins else 'NO'}\n")
    return {"rows": rows, "frequency_wins": wins, **SKEWED}


# ----- a slot for every expert -----


def _all_slots(options: argparse.Namespace, n_experts: int) -> dict[str, Any]:
    """What is copied and written while the engine runs with a slot for every expert."""
    with LLM(device=options.device, ctx_size=CONTEXT, expert_slots=n_experts) as llm:
        tokens = llm.tokenizer.encode(prompt_text(PROMPTS[0]))[: options.full]
        n_writes = llm.engine._table.n_writes
        for position, token in enumerate(tokens):
            llm.engine.run_token(token, position)
        cache = llm.engine.cache
        found: dict[str, Any] = {
            "tokens": len(tokens),
            "hit_rate": llm.expert_statistics.served.total.hit_rate,
            "uploads": cache.counters.n_uploads if cache is not None else 0,
            "table_writes": llm.engine._table.n_writes - n_writes,
        }
    print(
        f"a slot for each of the {n_experts} experts, {found['tokens']} tokens: hit rate "
        f"{100 * found['hit_rate']:.1f} %, {found['uploads']} uploads, {found['table_writes']} "
        "table writes after the start\n"
    )
    if found["uploads"] or found["table_writes"]:
        raise VkmoeError("experts were moved although all have a slot", "report this as a bug")
    return found


if __name__ == "__main__":
    run_main(main)
