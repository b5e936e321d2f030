"""How soon after a long prompt the expert cache serves a reply as well as it ever does.

python -m bench.after_prompt --record
python -m bench.after_prompt --length 8192 --invented 128,512 --stretches 1

Replays prompts of --length tokens, in chunks as on a GPU, and the 512 tokens after each as if they
were decoded, with the engine's own decisions and default settings: routing of the demo model on
stretches of vkmoe's sources, tests and documents, and invented routing with 128 and 512 experts
(bench/routing.py), five draws of each. The demo model's context is 1,024 tokens, so a stretch is
recorded piece by piece, each from position 0 on. There are slots for 12.5, 25 and 50 % of the
experts; copies are waited for, as on a device with one queue, or made beside tokens with landing
slots and --budget experts of each layer for a token, as on a GPU. Said are the hits of tokens 1-8,
9-32, 33-64 and those from 401 on. As tokens differ, each is compared with the same token behind a
prompt that was decoded token by token itself: that difference is the answer, and may be 1 point
from the 33rd token on. At last the engine itself runs such a prompt of the demo model and decodes.
No clock.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.command import command_line, finish, run_main
from bench.routing import drifting_trace, record_trace
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import Row, summarise
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import VkmoeError
from vkmoe.experts.decide.settings import MOST_LANDING, CacheSettings, make_pools
from vkmoe.experts.records.trace import Trace, joined
from vkmoe.experts.study.replay import Transfers, simulate
from vkmoe.llm import LLM, demo_model_path
from vkmoe.models.program_sizes import GPU_UBATCH

ROOT = Path(__file__).resolve().parent.parent
CONTEXT = 1024
SHARES = (0.125, 0.25, 0.5)
WINDOWS = {"1-8": (0, 8), "9-32": (8, 32), "33-64": (32, 64), "from 401": (400, None)}
SOURCES = (("vkmoe", "*.py"), ("tests", "*.py"), ("docs", "*.md"))
DEMO = "demo model"
STEADY_AFTER = 2048  # tokens that are decoded before those a prompt is compared with
LAYERS, N_DRAWS = 3, 5  # of invented routing

Rates = NDArray[np.float64]  # % of hits, by window


class Way(NamedTuple):
    """How experts get into slots."""

    name: str
    lag: int
    late: bool


WAYS = (Way("waited for", 1, False), Way("beside tokens", 2, True))


class Found(NamedTuple):
    """Hits after one prompt, and of the same tokens where it was decoded."""

    after: Rates
    steady: Rates


def main() -> None:
    """Record, invent, replay, run."""
    parser = command_line(__doc__, repeats=1)
    parser.add_argument("--length", type=int, default=8192, help="of a prompt (default: 8192)")
    parser.add_argument("--decoded", type=int, default=512, help="behind it (default: 512)")
    parser.add_argument("--ubatch-size", type=int, default=GPU_UBATCH, help="rows of a chunk")
    parser.add_argument("--stretches", type=int, default=1, help="of each kind (default: 1)")
    parser.add_argument("--invented", type=_numbers, default=(128, 512), help="default: 128,512")
    parser.add_argument(
        "--budget", type=float, default=0.5, help="experts of a layer (default: 0.5)"
    )
    options = parser.parse_args()
    if min(options.length, options.stretches) < 1 or not 64 < options.decoded < CONTEXT:
        parser.error(f"--length, --stretches: at least 1; --decoded: from 65 to {CONTEXT - 1}")
    with LLM(device=options.device, ctx_size=CONTEXT) as llm:
        card = describe(llm.device_info)
        print_card(card)
        texts = _texts(llm, options)
        kinds = {DEMO: _recorded(llm, texts)}
    for n_experts in options.invented:
        n_used = 8 if n_experts < 256 else 10
        sizes = options.length + options.decoded, LAYERS, n_experts, n_used
        draws = [drifting_trace(*sizes, seed) for seed in range(N_DRAWS)]
        kinds[f"invented, {n_experts} experts, {n_used} used"] = draws
    rows = [row for kind, traces in kinds.items() for row in _compared(kind, traces, options)]
    rows += _measured(texts[0], kinds[DEMO][0].header.n_experts, options)
    results = {"length": options.length, "chunk": options.ubatch_size, "budget": options.budget}
    finish("after_prompt", card, results | {"rows": rows}, options.record)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(piece) for piece in text.split(",") if piece)


# ----- routing -----


def _texts(llm: LLM, options: argparse.Namespace) -> list[Sequence[int]]:
    """The tokens of stretches of vkmoe's own texts, each a prompt and what follows it."""
    found: list[Sequence[int]] = []
    n_tokens = options.length + options.decoded
    for folder, pattern in SOURCES:
        files = sorted((ROOT / folder).rglob(pattern))
        tokens = llm.tokenizer.encode("\n".join(file.read_text("utf-8") for file in files))
        if len(tokens) < n_tokens:
            raise VkmoeError(f"{folder}/ has {len(tokens)} tokens only", "lower --length")
        firsts = np.linspace(0, len(tokens) - n_tokens, options.stretches).astype(int)
        found += [tokens[first : first + n_tokens] for first in firsts]
    return found


def _pieces(tokens: Sequence[int]) -> list[Sequence[int]]:
    firsts = range(0, len(tokens), CONTEXT - 1)
    return [tokens[first : first + CONTEXT - 1] for first in firsts]


def _recorded(llm: LLM, texts: Sequence[Sequence[int]]) -> list[Trace]:
    """Record which experts the demo model uses, each text as one sequence."""
    found = []
    with tempfile.TemporaryDirectory() as kept:
        path = Path(kept) / "trace.jsonl"
        for tokens in texts:
            whole = joined([record_trace(llm, piece, 1, path) for piece in _pieces(tokens)])
            found.append(replace(whole, starts=(0,)))
            print(f"recorded {len(tokens)} tokens", flush=True)
    return found


# ----- replays -----


def _compared(kind: str, traces: Sequence[Trace], options: argparse.Namespace) -> Iterator[Row]:
    for share in SHARES:
        for way in WAYS:
            found = [_replayed(trace, share, way, options) for trace in traces]
            what = f"{kind}, {100 * share:g} % in slots, copies {way.name}"
            yield from _rows(what, found)


def _replayed(trace: Trace, share: float, way: Way, options: argparse.Namespace) -> Found:
    length, n = options.length, options.length + options.decoded
    is_prompt = np.arange(n) < length
    runs = (*range(0, length, options.ubatch_size), *range(length, n))
    prompt = replace(trace, is_prompt=is_prompt, runs=runs)
    first = max(0, length - STEADY_AFTER)
    ids = trace.ids[first:] if trace.ids is not None else None
    decoded = replace(
        trace, routing=trace.routing[first:], ids=ids, is_prompt=np.zeros(n - first, np.bool_)
    )
    return Found(
        _windows(_hits(prompt, share, way, options)), _windows(_hits(decoded, share, way, options))
    )


def _hits(trace: Trace, share: float, way: Way, options: argparse.Namespace) -> Rates:
    """The share of each decoded token's uses that were hits, in %."""
    header, config = trace.header, EngineConfig()
    slots = [max(1, round(share * header.n_experts))] * header.n_layers
    pools = make_pools(slots, header.span_bytes, header.n_used, config.expert_allocation)
    settings = CacheSettings(config.expert_policy, lag=way.lag)
    transfers = Transfers()
    if way.late:
        n_bytes = options.budget * sum(header.span_bytes)
        transfers = Transfers(late=True, n_landing=MOST_LANDING, token_bytes=n_bytes)
    hits = simulate(trace, settings, pools, transfers=transfers).hits[-options.decoded :]
    return np.asarray(100 * hits.mean(axis=1) / header.n_used, np.float64)


def _windows(rates: Rates) -> Rates:
    found = (rates[slice(*window)] for window in WINDOWS.values())
    return np.array([part.mean() if part.size else np.nan for part in found])


def _rows(what: str, found: Sequence[Found]) -> Iterator[Row]:
    known = [
        (index, name) for index, name in enumerate(WINDOWS) if np.isfinite(found[0].after[index])
    ]
    for index, window in known:
        after = [one.after[index] for one in found]
        less = [one.after[index] - one.steady[index] for one in found]
        yield _shown(Row(f"hits of tokens {window}: {what}", summarise(after), "%", "count"))
        note = f"mean {np.mean(less):+.2f}"
        yield _shown(
            Row(
                f"... less the same where decoded: {window}, {what}",
                summarise(less),
                "points",
                "count",
                note,
            )
        )


def _shown(row: Row) -> Row:
    print(row, flush=True)
    return row


# ----- the engine -----


def _measured(tokens: Sequence[int], n_experts: int, options: argparse.Namespace) -> Iterator[Row]:
    """Run a prompt of the demo model, or decode its last tokens; then decode what follows."""
    slots = n_experts // 4
    for copies in ("wait", "overlap"):
        config = EngineConfig(options.device, CONTEXT, expert_slots=slots, expert_copies=copies)
        found = []
        for decodes in (False, True):
            with Engine(demo_model_path(), config) as engine:
                found.append(_engine_rates(engine, tokens, options.length, decodes))
        yield from _rows(f"{DEMO}, the engine, {slots} slots, copies {copies}", [Found(*found)])


def _engine_rates(engine: Engine, tokens: Sequence[int], length: int, decodes: bool) -> Rates:
    """Hits after a prompt, or where the end of it `decodes`."""
    first = max(0, length - STEADY_AFTER) if decodes else 0
    for piece in _pieces(tokens[first:length]):
        if decodes:
            engine.run_tokens(piece, 0)
        else:
            engine.run_prompt(piece)
    rates = []
    for position, token in enumerate(tokens[length:]):
        before = engine.experts.tally
        engine.run_token(token, position)
        after = engine.experts.tally
        rates.append(100 * (after.n_hits - before.n_hits) / (after.n_uses - before.n_uses))
    return _windows(np.array(rates))


if __name__ == "__main__":
    run_main(main)
