"""What tells how many hits a layer has, and what splitting slots by that is worth.

python -m bench.slot_curves --record

Records the demo model's routing on six texts (bench/prompts/): each as a text of which only the
next token is known, and as a reply that is drawn after the text's first tokens. The hits of each
layer, replayed with the defaults, are predicted from what is known of other texts: nothing (the
mean curve), the trace of one, or of all others, and the uses counted in one, in its last tokens,
and in all others. Then slots are split by each prediction, and all is replayed once more. No clock
takes part.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.command import command_line, finish, run_main
from bench.routing import OTHERS, PROMPTS, prompt_text, record_trace
from vkmoe.bench.environment import describe, print_card
from vkmoe.experts.decide.keys import DecayedCounts
from vkmoe.experts.decide.settings import MOST_LANDING, CacheSettings, make_pools
from vkmoe.experts.records.report import table
from vkmoe.experts.records.trace import Trace, joined
from vkmoe.experts.study.replay import Transfers, simulate
from vkmoe.experts.study.slot_curves import (
    LayerCurves,
    curves_of_counts,
    curves_of_trace,
    split_by_gain,
)
from vkmoe.llm import LLM

TEXTS, CONTEXT = (*PROMPTS, *OTHERS), 1024
SLOTS = (8, 12, 16, 20)  # of a layer, on average
BEGIN, REPLY, FILLING = 500, 500, 50  # tokens; those of the reply that fill the cache do not count
DEFAULT, BESIDE = CacheSettings("forecast", lag=2), Transfers(True, MOST_LANDING)
HALF_LIFE = 64.0  # tokens, of the counts of a profile


class Held(NamedTuple):
    """A trace that is predicted, and the text it is of."""

    name: str
    trace: Trace


def main() -> None:
    """Record, predict, split, replay."""
    options = command_line(__doc__).parse_args()
    with LLM(device=options.device, ctx_size=CONTEXT) as llm, tempfile.TemporaryDirectory() as kept:
        card, path = describe(llm.device_info), Path(kept) / "trace.jsonl"
        print_card(card)
        texts, held = {}, []
        for name in TEXTS:
            tokens = llm.tokenizer.encode(prompt_text(name))[: CONTEXT - 1]
            whole = record_trace(llm, tokens, 1, path)
            texts[name] = replace(whole, is_prompt=np.zeros(whole.n_tokens, np.bool_))
            reply = record_trace(llm, tokens[:BEGIN], REPLY, path)
            held += [Held(name, texts[name]), Held(name, reply)]
            print(f"recorded {name}: {len(tokens)} tokens, and a reply", flush=True)
    known, rates = _known(texts), Rates(held)
    results: dict[str, Any] = {
        "even_percent": {
            n: 100 * float(np.mean([rates.even(index, n) for index in range(len(held))]))
            for n in SLOTS
        },
        "error_points": {
            source: {n: _error(by_text, rates, n) for n in SLOTS}
            for source, by_text in known.items()
        },
        "gained_points": {
            source: {n: _gained(by_text, rates, n) for n in SLOTS}
            for source, by_text in known.items()
        },
    }
    _show(results)
    finish("slot_curves", card, results, options.record)


def _known(texts: Mapping[str, Trace]) -> dict[str, dict[str, list[LayerCurves]]]:
    """What is predicted of each text: by what is known of one other, or of all others."""
    header = texts[TEXTS[0]].header
    mean = curves_of_counts(np.ones((header.n_layers, header.n_experts)), inf)
    replayed = {name: curves_of_trace(trace) for name, trace in texts.items()}
    uses = {name: curves_of_counts(*counts_of(trace)) for name, trace in texts.items()}
    late = {name: curves_of_counts(*counts_of(trace, HALF_LIFE)) for name, trace in texts.items()}
    found: dict[str, dict[str, list[LayerCurves]]] = {}
    for name in TEXTS:
        others = [other for other in TEXTS if other != name]
        together = joined([texts[other] for other in others])
        by_source: dict[str, list[LayerCurves | None]] = {
            "nothing": [mean],
            "trace of one": [replayed[other] for other in others],
            "trace of all": [curves_of_trace(together)],
            "last uses of one": [late[other] for other in others],
            "uses of one": [uses[other] for other in others],
            "uses of all": [curves_of_counts(*counts_of(together))],
        }
        for source, curves in by_source.items():
            found.setdefault(source, {})[name] = [each for each in curves if each is not None]
    return found


def counts_of(trace: Trace, half_life: float = inf) -> tuple[NDArray[np.float64], float]:
    """Uses [n_layers, n_experts], decayed or not, and of how many tokens they are."""
    space, used = trace.space, trace.space.keys_of(trace.routing)
    counts = DecayedCounts(space.n_keys, half_life)
    for keys in used:
        counts.advance()
        counts.use(keys.reshape(-1))
    found = counts.values().reshape(space.n_layers, space.n_experts)
    return found, float(found[0].sum()) / trace.header.n_used


class Rates:
    """The hit rates of the layers of each trace that is held out, replayed once for each split."""

    def __init__(self, held: Sequence[Held]) -> None:
        self.held = held
        self._found: dict[tuple[int, tuple[int, ...]], NDArray[np.float64]] = {}

    def of(self, index: int, slots: tuple[int, ...]) -> NDArray[np.float64]:
        """The rates [n_layers] with these slots, but for the first tokens, which fill the cache."""
        if (index, slots) not in self._found:
            trace = self.held[index].trace
            pools = make_pools(slots, trace.header.span_bytes, trace.header.n_used, "layer")
            hits = simulate(trace, DEFAULT, pools, transfers=BESIDE).hits[~trace.is_prompt]
            self._found[index, slots] = hits[FILLING:].mean(axis=0) / trace.header.n_used
        return self._found[index, slots]

    def even(self, index: int, n: int) -> NDArray[np.float64]:
        """The rates where each layer has `n` slots."""
        return self.of(index, (n,) * self.held[index].trace.header.n_layers)


def _error(by_text: Mapping[str, Sequence[LayerCurves]], rates: Rates, n: int) -> float:
    """The mean absolute error of a layer's predicted hit rate, in points."""
    errors = [
        np.abs(curves.rates_of[:, n] - rates.even(index, n)).mean()
        for index, (name, _) in enumerate(rates.held)
        for curves in by_text[name]
    ]
    return 100 * float(np.mean(errors))


def _gained(by_text: Mapping[str, Sequence[LayerCurves]], rates: Rates, n: int) -> dict[str, float]:
    """Points of hits more than the even split has: on average, and at the least."""
    points = []
    for index, (name, trace) in enumerate(rates.held):
        n_layers, n_used = trace.header.n_layers, trace.header.n_used
        for curves in by_text[name]:
            slots = split_by_gain(n * n_layers, [1] * n_layers, curves, [n_used] * n_layers)
            more = rates.of(index, slots).mean() - rates.even(index, n).mean()
            points.append(100 * float(more))
    return {"mean": float(np.mean(points)), "least": min(points)}


def _show(results: Mapping[str, Any]) -> None:
    print("\nmean absolute error of a layer's predicted hit rate, points, by slots")
    head = ["known", *map(str, SLOTS)]
    rows = [
        [name, *(f"{x:.1f}" for x in by.values())] for name, by in results["error_points"].items()
    ]
    print("\n".join(table([head, *rows])))
    print("\nhits more than the even split has, points: mean (least)")
    rows = [["even, %", *(f"{x:.1f}" for x in results["even_percent"].values())]]
    for name, by in results["gained_points"].items():
        rows.append([name, *(f"{x['mean']:+.2f} ({x['least']:+.2f})" for x in by.values())])
    print("\n".join(table([head, *rows])))


if __name__ == "__main__":
    run_main(main)
