"""What it costs in hits that not all experts have a home, and what exchanging places is worth.

python -m bench.exchange --record

Records which experts the demo model uses on three texts and in replies (bench/prompts/), and
invents routing of 128 and of 512 experts by Zipf's law, whose liking changes every 300 tokens, and
routing of many layers that drifts, for less to spare than a place in each.
Replays it with the engine's own decisions: with homes for all experts; with card and host memory
that hold them together and some places to spare in each layer, where those that are to leave are
written back first; and with the experts that have no home pinned to the device for good, by their
numbers or the most used ones of 64 tokens. No clock takes part.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.command import command_line, finish, run_main
from bench.routing import PROMPTS, drifting_trace, prompt_text, record_trace, skewed_trace
from vkmoe.bench.environment import describe, print_card
from vkmoe.config import Pins
from vkmoe.experts.decide.settings import MOST_LANDING, CacheSettings, PoolSpec, make_pools
from vkmoe.experts.records.report import table
from vkmoe.experts.records.trace import Trace, joined
from vkmoe.experts.study.replay import Transfers, simulate
from vkmoe.llm import LLM

CONTEXT, N_PROMPT, N_REPLY = 1024, 500, 400
N_DRIFT, N_TEXTS, N_LAYERS, N_USED = 300, 3, 4, 8  # of invented routing
SLOT_SHARES = (0.25, 0.5)  # of the experts
SPARES = (0, 1, 2, 4, 8)  # places of a layer that no expert needs
# Layers, experts of each, and how many of them a token uses and have a slot, for places that are
# fewer than the layers that share them.
MANY_LAYERS = {
    "drifting": ((32, 8, 2, 3), (32, 8, 2, 4), (16, 128, 8, 64), (24, 32, 4, 12)),
    "skewed": ((32, 8, 2, 3), (16, 128, 8, 64)),
}
FEW_SPARES = (0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
HOMELESS = (0.1, 0.25)  # of the experts: how many the pinned way keeps on the device
WEIGHED = CacheSettings("forecast", lag=2)
BESIDE = Transfers(late=True, n_landing=MOST_LANDING)


def main() -> None:
    """Record, invent, replay, compare."""
    options = command_line(__doc__).parse_args()
    with LLM(device=options.device, ctx_size=CONTEXT) as llm, tempfile.TemporaryDirectory() as kept:
        card = describe(llm.device_info)
        print_card(card)
        traces = {"demo, 32 experts": _demo(llm, Path(kept) / "trace.jsonl")}
    for n_experts in (128, 512):
        parts = [
            skewed_trace(N_DRIFT, N_LAYERS, n_experts, N_USED, seed) for seed in range(N_TEXTS)
        ]
        traces[f"invented, {n_experts} experts"] = joined(parts)
    results: dict[str, Any] = {}
    for name, trace in traces.items():
        for share in SLOT_SHARES:
            results[f"{name}, {share:.0%} slots"] = _arms(trace, share)
    _print(results)
    few = {
        f"{kind}, {shape[1]} experts, {shape[0]} layers, {shape[3]} slots": _few(kind, *shape)
        for kind, shapes in MANY_LAYERS.items()
        for shape in shapes
    }
    _print(few)
    finish("exchange", card, results | few, options.record)


def _demo(llm: LLM, path: Path) -> Trace:
    found = []
    for name in PROMPTS:
        tokens = llm.tokenizer.encode(prompt_text(name))[:N_PROMPT]
        found.append(record_trace(llm, tokens, N_REPLY, path))
    return joined(found)


def _arms(trace: Trace, share: float) -> dict[str, dict[str, float]]:
    header = trace.header
    n_slots = round(share * header.n_experts)
    found = {"homes for all": _replay(trace, n_slots, WEIGHED)}
    exchanging = replace(WEIGHED, fills=True, exchanges=True)
    for spare in SPARES:
        n_places = (header.n_experts - n_slots + spare) * header.n_layers
        places = _of_sizes(header.span_bytes, n_places // header.n_layers)
        found[f"exchange, {spare} to spare"] = _replay(trace, n_slots, exchanging, places)
    for homeless in HOMELESS:
        n = round(homeless * header.n_experts)
        ways = {"number": Pins("ids", n, tuple(range(n))), "use": Pins("use", n, after=64)}
        for how, pins in ways.items():
            pinned = replace(WEIGHED, fills=True, pins=(pins,))
            found[f"pinned by {how}, {homeless:.0%}"] = _replay(trace, n_slots, pinned)
    return found


def _few(
    kind: str, n_layers: int, n_experts: int, n_used: int, n_slots: int
) -> dict[str, dict[str, float]]:
    """What few places to spare are worth, which all layers share."""
    invented = drifting_trace if kind == "drifting" else skewed_trace
    trace = invented(N_DRIFT, n_layers, n_experts, n_used)
    found = {"homes for all": _replay(trace, n_slots, WEIGHED)}
    exchanging = replace(WEIGHED, fills=True, exchanges=True)
    for spare in FEW_SPARES:
        n_places = (n_experts - n_slots) * n_layers + round(spare * n_layers)
        layers, size = tuple(range(n_layers)), trace.header.span_bytes[0]
        places = [PoolSpec(layers, n_places, 0, size)]
        found[f"exchange, {spare:g} to spare"] = _replay(trace, n_slots, exchanging, places)
    first = found["exchange, 0 to spare"]["hits"]
    gain = found["homes for all"]["hits"] - first
    return {
        name: x | {"share of the gain": (x["hits"] - first) / gain} for name, x in found.items()
    }


def _of_sizes(span_bytes: tuple[int, ...], n_of_layer: int) -> list[PoolSpec]:
    """Host places that layers share whose experts have one size."""
    found = []
    for size in dict.fromkeys(span_bytes):
        layers = tuple(i for i, other in enumerate(span_bytes) if other == size)
        found.append(PoolSpec(layers, n_of_layer * len(layers), 0, size))
    return found


def _replay(
    trace: Trace, n_slots: int, settings: CacheSettings, places: list[PoolSpec] | None = None
) -> dict[str, float]:
    header = trace.header
    slots = [n_slots] * header.n_layers
    pools = make_pools(slots, header.span_bytes, header.n_used, "layer")
    result = simulate(trace, settings, pools, transfers=BESIDE, places=places or ())
    decoded = ~trace.is_prompt
    hits = result.hits[decoded].sum() / (
        header.n_layers * header.n_used * np.count_nonzero(decoded)
    )
    return {"hits": 100 * float(hits), "copied": result.copied_bytes / 2**20}


def _print(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    arms = list(next(iter(results.values())))
    print("\nhits of decoded tokens in %, and MiB copied to the device per token")
    rows = [["", *arms]]
    for name, values in results.items():
        rows.append([name, *(f"{x['hits']:.1f} ({x['copied']:.2f})" for x in values.values())])
    print("\n".join(table([*map(list, zip(*rows, strict=True))])))


if __name__ == "__main__":
    run_main(main)
