"""What knowing the next tokens' ids is worth to the expert cache, on texts of six kinds.

python -m bench.residency --record

Records which experts the demo model uses on six texts (bench/prompts/: code, prose, structured
text, a letter, orders as JSON, German prose), token by token: as a prompt, whose tokens are known,
as a text of which only the next token is, and as a reply that the model draws itself after the
text's first tokens. Replays that with the engine's own decisions, with a table that begins empty
and with one that has seen other text before (vkmoe's own sources), for several numbers of slots:
hits, bytes read in place and copied, the host's time to decide and to learn, bytes of the table,
and how many of a token's experts the table names, layer by layer. The rivals: slru as it was before
newcomers were weighed, the other predictors, decisions that are published a token late (what
deciding while the GPU runs would come to), a cache that knows exactly what the next token uses, and
Belady's optimum. Times apart, no clock takes part.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.command import command_line, finish, run_main
from bench.routing import OTHERS, PROMPTS, prompt_text, record_trace
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import Row, summarise
from vkmoe.experts.decide.residency import Residency
from vkmoe.experts.decide.settings import MOST_LANDING, CacheSettings, make_pools
from vkmoe.experts.decide.token_table import TokenRows, TokenTable, Upcoming, row_bytes
from vkmoe.experts.decide.worth import Table
from vkmoe.experts.records.report import table
from vkmoe.experts.records.trace import Trace, joined
from vkmoe.experts.study.replay import KnowsNext, Transfers, ceiling, simulate
from vkmoe.llm import LLM

CONTEXT = 1024
TEXTS = (*PROMPTS, *OTHERS)
KINDS = ("prompt", "text", "reply")
BASE, EXACT, BEST = "slru", "exact", "belady"
WAITING, BESIDE = Transfers(), Transfers(late=True, n_landing=MOST_LANDING)
WEIGHED = CacheSettings(admission=True)


class Arm(NamedTuple):
    """One way to decide, and how experts get into slots."""

    settings: CacheSettings
    transfers: Transfers = WAITING


ARMS: dict[str, Arm] = {
    BASE: Arm(CacheSettings()),
    "none": Arm(WEIGHED),
    "frequency": Arm(replace(WEIGHED, predictor="frequency")),
    "previous": Arm(replace(WEIGHED, predictor="previous")),
    "correlation": Arm(replace(WEIGHED, predictor="correlation")),
    "token": Arm(replace(WEIGHED, predictor="token")),
    "token, copies beside tokens": Arm(replace(WEIGHED, predictor="token", lag=2), BESIDE),
    "token, published late": Arm(
        replace(WEIGHED, predictor="token", lag=2),
        Transfers(n_landing=MOST_LANDING, is_published_late=True),
    ),
    EXACT: Arm(replace(WEIGHED, predictor="token")),
}


def main() -> None:
    """Record, replay, compare."""
    parser = command_line(__doc__)
    parser.add_argument("--slots", type=_numbers, default=(4, 8, 16), help="default: 4,8,16")
    parser.add_argument("--tokens", type=int, default=CONTEXT, help="of each text, at most")
    parser.add_argument("--reply", type=int, default=512, help="tokens drawn (default: 512)")
    parser.add_argument("--begin", type=int, default=128, help="tokens before them (default: 128)")
    parser.add_argument("--warm", type=int, default=20_000, help="tokens seen before, other text")
    options = parser.parse_args()
    with LLM(device=options.device, ctx_size=CONTEXT) as llm, tempfile.TemporaryDirectory() as kept:
        card = describe(llm.device_info)
        print_card(card)
        traces = _record(llm, Path(kept) / "trace.jsonl", options)
        warm = _warm(_sources(llm, Path(kept) / "trace.jsonl", options.warm))
    results: dict[str, Any] = {"warm_tokens": options.warm, "rates": {}}
    for begins, rows in (("empty", None), ("warm", warm)):
        print(f"\n===== a table that begins {begins} =====")
        results["rates"][begins] = _measure(traces, options.slots, rows)
        results[f"recall, {begins}"] = _recall(traces, rows)
    results["verdict"] = _verdict(results["rates"])
    results["host"] = _host_times(traces["text"][TEXTS[0]])
    used = n_bytes_used(warm)
    print(f"the warm table: {len(warm.ids)} ids, {used / 2**20:.2f} MiB in use")
    results |= {"table_ids": len(warm.ids), "table_bytes": used}
    results["rows"] = list(_rows(results["rates"]))
    finish("residency", card, results, options.record)


def _rows(rates: Mapping[str, Any]) -> Iterator[Row]:
    for begins, kinds in rates.items():
        for kind, by_slots in kinds.items():
            for n_slots, arms in by_slots.items():
                for arm, by_text in arms.items():
                    hits = summarise([values["hits"] for values in by_text.values()])
                    what = f"hits of {arm}, {kind}, {n_slots} slots, a table that begins {begins}"
                    yield Row(what, hits, "%", "count")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(piece) for piece in text.split(",")}))


def n_bytes_used(rows: TokenRows) -> int:
    """The bytes of a table's rows that hold something."""
    return len(rows.ids) * row_bytes(rows.experts.shape[1], rows.experts.shape[2] // 2)


# ----- routing -----


def _record(llm: LLM, path: Path, options: argparse.Namespace) -> dict[str, dict[str, Trace]]:
    """The routing of each text, by kind."""
    found: dict[str, dict[str, Trace]] = {kind: {} for kind in KINDS}
    for name in TEXTS:
        tokens = llm.tokenizer.encode(prompt_text(name))[: min(options.tokens, CONTEXT - 1)]
        whole = record_trace(llm, tokens, 1, path)
        found["prompt"][name] = whole
        found["text"][name] = replace(whole, is_prompt=np.zeros(whole.n_tokens, np.bool_))
        found["reply"][name] = record_trace(llm, tokens[: options.begin], options.reply, path)
        print(f"recorded {name}: {whole.n_tokens} tokens, and a reply", flush=True)
    return found


def _sources(llm: LLM, path: Path, n_tokens: int) -> Trace | None:
    """The routing of vkmoe's own sources, in pieces that fit in the context."""
    files = sorted((Path(__file__).resolve().parent.parent / "vkmoe").rglob("*.py"))
    text = "\n".join(file.read_text() for file in files[:: len(files) // 40])
    tokens = llm.tokenizer.encode(text)[:n_tokens]
    pieces = [tokens[first : first + CONTEXT - 1] for first in range(0, len(tokens), CONTEXT - 1)]
    traces = [record_trace(llm, piece, 1, path) for piece in pieces]
    return joined(traces) if traces else None


def _warm(seen: Trace | None) -> TokenRows:
    assert seen is not None and seen.ids is not None, "give --warm more tokens"
    known = TokenTable(seen.space, seen.header.n_used)
    for token, ids in zip(seen.ids.tolist(), seen.routing, strict=True):
        known.learn(token, ids)
    return known.rows()


# ----- replays -----


def _measure(
    traces: Mapping[str, Mapping[str, Trace]], slots: Sequence[int], warm: TokenRows | None
) -> dict[str, Any]:
    """Hits in % and MiB per token by kind, slots, arm and text; prints the means."""
    found: dict[str, Any] = {}
    for kind, by_text in traces.items():
        found[kind] = {}
        for n_slots in slots:
            arms = {
                name: {text: _replay(trace, n_slots, name, warm) for text, trace in by_text.items()}
                for name in ARMS
            }
            arms[BEST] = {text: _best(trace, n_slots) for text, trace in by_text.items()}
            found[kind][n_slots] = arms
            print(f"\n{kind}, {n_slots} slots: hits in % by text, their mean; MiB per token")
            rows = [["", *TEXTS, "mean", "read", "copied"]]
            for name, values in arms.items():
                hits = [values[text]["hits"] for text in TEXTS]
                moved = [np.mean([values[text][what] for text in TEXTS]) for what in MOVED]
                cells = [*(f"{hit:.1f}" for hit in (*hits, np.mean(hits)))]
                rows.append([name, *cells, *(f"{amount:.3f}" for amount in moved)])
            print("\n".join(table(rows)), flush=True)
    return found


MOVED = ("read", "copied")


def _replay(trace: Trace, n_slots: int, name: str, warm: TokenRows | None) -> dict[str, float]:
    arm = ARMS[name]
    known: Table | None = None
    if name == EXACT:
        known = KnowsNext(trace)
    elif arm.settings.predictor == "token" and warm is not None:
        known = TokenTable.of(trace.space, warm)
    pools = _pools(trace, n_slots)
    result = simulate(trace, arm.settings, pools, transfers=arm.transfers, table=known)
    read, copied = result.read_bytes / 2**20, result.copied_bytes / 2**20
    return {"hits": 100 * result.hit_rate, "read": read, "copied": copied}


def _best(trace: Trace, n_slots: int) -> dict[str, float]:
    hits = ceiling(trace, _pools(trace, n_slots)).sum() / trace.routing.size
    return {"hits": 100 * float(hits), "read": float("nan"), "copied": float("nan")}


def _pools(trace: Trace, n_slots: int) -> Any:
    header = trace.header
    return make_pools([n_slots] * header.n_layers, header.span_bytes, header.n_used, "layer")


def _verdict(rates: Mapping[str, Any], n_slots: int = 8) -> dict[str, Any]:
    """Points over slru at 8 slots: mean and least of the texts; and bytes moved beside its own."""
    found: dict[str, Any] = {}
    for begins, kinds in rates.items():
        for kind, by_slots in kinds.items():
            for name in ("token", "token, copies beside tokens"):
                arms = by_slots.get(n_slots, next(iter(by_slots.values())))
                gains = [arms[name][text]["hits"] - arms[BASE][text]["hits"] for text in TEXTS]
                moved = [
                    sum(arms[name][text][what] for what in MOVED)
                    / sum(arms[BASE][text][what] for what in MOVED)
                    for text in TEXTS
                ]
                found[f"{name}, {kind}, {begins}"] = {
                    "points": float(np.mean(gains)), "least": min(gains), "bytes": max(moved)
                }  # fmt: skip
    print(f"\nover {BASE} at {n_slots} slots: points, the least of the texts; bytes, at most")
    for what, values in found.items():
        print(f"  {what}: {values['points']:+.1f}, {values['least']:+.1f}; {values['bytes']:.2f}")
    return found


def _recall(traces: Mapping[str, Mapping[str, Trace]], warm: TokenRows | None) -> list[float]:
    """Which part of a token's experts the table names, had it to name as many, by layer, in %."""
    n_layers = next(iter(traces["text"].values())).header.n_layers
    right, n_tokens = np.zeros(n_layers, np.int64), 0
    for trace in traces["text"].values():
        space, n_used = trace.space, trace.header.n_used
        known = TokenTable(space, n_used) if warm is None else TokenTable.of(space, warm)
        counts = np.zeros(space.n_keys)
        assert trace.ids is not None
        for token, ids in zip(trace.ids.tolist(), trace.routing, strict=True):
            expected = known.expect([token], counts / max(1.0, counts.sum() / space.n_layers))
            named = np.argsort(-expected.reshape(space.n_layers, -1), axis=1)[:, :n_used]
            right += np.array([np.isin(a, b).sum() for a, b in zip(named, ids, strict=True)])
            counts[space.keys_of(ids)] += 1
            known.learn(token, ids)
        n_tokens += trace.n_tokens * n_used
    found: list[float] = (100 * right / n_tokens).tolist()
    print("\nof a token's experts the table names, layer by layer, %: "
          + ", ".join(f"{share:.0f}" for share in found))  # fmt: skip
    return found


def _host_times(trace: Trace) -> dict[str, float]:
    """Microseconds per token that decisions and learning take, here: 6 layers of 32 experts."""
    residency = Residency(trace.space, _pools(trace, 8), ARMS["token"].settings)
    assert trace.ids is not None
    ids, taken = trace.ids.tolist(), np.zeros(2)
    for routing, token, following in zip(trace.routing, ids, ids[1:], strict=False):
        residency.observe(routing[None], [token])
        began = time.perf_counter()
        moves = residency.decide(upcoming=Upcoming((following,)))
        decided = time.perf_counter()
        residency.learn()
        taken += decided - began, time.perf_counter() - decided
        residency.arrived(moves)
    decide, learn = 1e6 * taken / (trace.n_tokens - 1)
    print(f"host time: {decide:.0f} us to decide, {learn:.0f} us to learn, per token of this model")
    return {"decide_us": decide, "learn_us": learn}


if __name__ == "__main__":
    run_main(main)
