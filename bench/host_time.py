"""Host time per token: what Python and the driver's front end cost the calling thread.

python -m bench.host_time

A qwen3moe model with 48 layers of 128 experts, 8 used, whose matrices are as small as its kernels
allow (hidden 32), so that the program has its full number of commands and next to no arithmetic.
With `--experts 512` it is as the largest models are; half of the experts have slots either way.
`time.thread_time()` around `Engine.run_token` and the sampler counts the CPU time of this thread
only: on a CPU device the driver's own threads do not count. What is done while the GPU runs (the
engine's `meanwhile`) is taken off: the rest is on the critical path, under 0.3 ms if all is well.
Once with all experts in place, and twice with the expert cache at work and everything on, as by
default: on a device with one queue (the next token waits for copies that are recorded for it) and
on a GPU with a queue for copies (experts stay where they land, and copies are handed to a thread).
How much moves is measured too: tokens are drawn by Zipf's law, as in text, and routed by random
weights.

On a CPU device the kernels run on the host's own cores and leave nothing of the host's data in
their caches. So the same tokens are run twice: with their kernels, and then, as a GPU leaves the
host, with programs that are empty but for their copies and the serial number. Those follow the
routing that the kernels reported, so that the same experts move. With `--parts` they are run once
more, to say what that time is spent on; looking costs some of it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.command import command_line, finish, run_main
from bench.models import custom_model, default_cache, shape_of
from vkmoe.batch import BatchKind, TopLogits
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import MIN_REPEATS, Row, percentile, summarise
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.engine import Engine
from vkmoe.execute.recorder import Recorded
from vkmoe.experts.records.profiler import Tally
from vkmoe.generate.sampler import Sampler
from vkmoe.gpu.program import Program

IN_PLACE = "in place"
CACHED, BESIDE = "with one queue", "with copies beside tokens"
WITH_KERNELS, EMPTY = "with its kernels", "with empty programs"
TARGET_MS = 0.3  # on the critical path
# The defaults of a device with one queue, and of a GPU with a queue for copies.
ONE_QUEUE: dict[str, Any] = {"expert_copies": "wait", "promote_on_read": False}
OWN_QUEUE: dict[str, Any] = {"expert_copies": "overlap", "promote_on_read": True}
CONTEXT = 256
# Largest logits to sample by where programs are empty, and leave none.
NUMBERS = TopLogits(
    np.arange(64, dtype=np.int32), np.linspace(9, 1, 64, dtype=np.float32), 320, 12.0
)
N_TOKENS = 320  # vocabulary
N_WARM = 5
SMALLEST = {
    "hidden": 32,
    "n_heads": 1,
    "n_kv_heads": 1,
    "head_size": 32,
    "n_experts": 128,
    "n_experts_used": 8,
    "expert_size": 32,
    "n_tokens": N_TOKENS,
    "context": CONTEXT,
}


class _Times(NamedTuple):
    """Of one token, in milliseconds; and the experts that were uploaded for it."""

    critical: float  # of the thread, but for what is done while the GPU runs
    thread: float
    wall: float
    n_uploads: int


class _Run(NamedTuple):
    """What one pair of engines did."""

    repeats: dict[str, list[list[_Times]]]  # by engine
    routing: list[NDArray[np.uint32]]  # of each token
    hits: Tally  # of the cache, in the repeats


def main() -> None:
    """Make the model, warm up, measure."""
    parser = command_line(__doc__, repeats=2 * MIN_REPEATS)
    parser.add_argument("--layers", type=int, default=48, help="default: 48")
    parser.add_argument("--tokens", type=int, default=20, help="per repeat (default: 20)")
    parser.add_argument("--experts", type=int, default=128, help="of a layer (default: 128)")
    parser.add_argument("--expert-slots", type=int, help="of a layer (default: half the experts)")
    parser.add_argument(
        "--warm", type=int, default=200, help="tokens before the cache is measured (default: 200)"
    )
    parser.add_argument("--parts", action="store_true", help="say what the time is spent on, too")
    parser.add_argument("--cache", type=Path, default=default_cache())
    options = parser.parse_args()
    if not 1 <= options.tokens <= CONTEXT:
        parser.error(f"--tokens must be between 1 and {CONTEXT}")
    if options.expert_slots is None:
        options.expert_slots = options.experts // 2
    if not 1 <= options.expert_slots < options.experts:
        parser.error(f"--expert-slots must be between 1 and {options.experts - 1}")
    with ExitStack() as stack:
        engines = {name: stack.enter_context(engine) for name, engine in _engines(options).items()}
        first = next(iter(engines.values()))
        card = describe(first.device.info)
        print_card(card)
        program = first.program()
        print(
            f"program: {len(program.commands)} commands, {len(program.dispatches())} dispatches, "
            f"{options.layers} layers of {options.experts} experts\n",
            flush=True,
        )
        runs = {WITH_KERNELS: _measure(engines, _texts(options))}
    hits = runs[WITH_KERNELS].hits
    with ExitStack() as stack:
        engines = {name: stack.enter_context(engine) for name, engine in _engines(options).items()}
        for engine in engines.values():
            empty(engine)
        runs[EMPTY] = _measure(engines, _texts(options), runs[WITH_KERNELS].routing)
        if options.parts:
            _print_parts(engines, _texts(options)[1:], runs[WITH_KERNELS].routing)
    assert runs[EMPTY].hits == hits, "not the same experts moved"
    results = _results(runs)
    uploads, hit_rate = results["uploads_per_token"], hits.hit_rate
    print(f"the cache: {100 * (hit_rate or 0):.1f} % hits, {uploads:.1f} uploads per token\n")
    results |= {"hit_rate": hit_rate, "dispatches": len(program.dispatches())}
    finish("host_time", card, results, options.record)


def _engines(options: argparse.Namespace) -> dict[str, Engine]:
    """The same model in each way."""
    size: dict[str, Any] = {"n_layers": options.layers, "n_experts": options.experts}
    shape, name = shape_of("tiny", **{**SMALLEST, **size}), "-".join(map(str, size.values()))
    model = custom_model(f"smallest-{name}", shape, "q8_0", options.cache)
    cached: dict[str, Any] = {"expert_slots": options.expert_slots}
    asked: dict[str, dict[str, Any]] = {
        IN_PLACE: {},
        CACHED: cached | ONE_QUEUE,
        BESIDE: cached | OWN_QUEUE,
    }
    return {
        name: Engine(model, EngineConfig(options.device, CONTEXT, **choices))
        for name, choices in asked.items()
    }


def empty(engine: Engine) -> None:
    """Leave of the program with logits its copies and the serial number that the host checks."""
    programs = engine._programs
    program = Program("empty")
    programs.io.copy_in(program)
    programs._recorder.decoder.close_program(program)
    kind = BatchKind("decode", 1, 1)
    programs.io.copy_out(program, programs._recorder.outputs(kind))
    segments = (programs._recorder.segment(program),)
    programs.recorded[kind] = Recorded(lambda: program, segments)


def _texts(options: argparse.Namespace) -> list[list[int]]:
    """The tokens before the measurement, then those of each repeat."""
    random = np.random.default_rng(0)
    lengths = [max(N_WARM, options.warm), *[options.tokens] * options.repeats]
    return [zipf_text(random, n_tokens).tolist() for n_tokens in lengths]


def _measure(
    engines: Mapping[str, Engine],
    texts: Sequence[Sequence[int]],
    routing: Sequence[NDArray[np.uint32]] = (),
) -> _Run:
    """Engines in turns; `routing` is what to believe of each token, where no kernel reports it."""
    cached, profiler = engines[CACHED], engines[CACHED].profiler
    sampler = Sampler(SamplingConfig(), seed=0)
    assert profiler is not None
    repeats: dict[str, list[list[_Times]]] = {name: [] for name in engines}
    used: list[NDArray[np.uint32]] = []
    before = profiler.served().total
    for number, text in enumerate(texts):
        first = len(used)
        for name, engine in engines.items():
            times = []
            for position, token in enumerate(text):
                if routing:
                    believe(engine, routing[first + position])
                times.append(_token(engine, sampler, token, position % CONTEXT, bool(routing)))
                if engine is cached:
                    used.append(engine.routing())
            if number:
                repeats[name].append(times)
        if not number:
            before = profiler.served().total
    after = profiler.served().total
    hits = Tally(after.n_uses - before.n_uses, after.n_hits - before.n_hits)
    return _Run(repeats, used, hits)


def believe(engine: Engine, routing: NDArray[np.uint32]) -> None:
    """Let the token's report say this, and that all could land; costs the measurement a call."""
    engine._programs.routing = routing[None].copy  # type: ignore[method-assign]
    stored = np.stack([routing[None] + 1] * 2, axis=-1)
    engine._programs.filled = stored.copy  # type: ignore[method-assign]


def zipf_text(random: np.random.Generator, n_tokens: int) -> NDArray[np.int64]:
    """Tokens drawn by Zipf's law: the second is half as frequent as the first."""
    weights = 1 / np.arange(1, N_TOKENS + 1)
    return random.choice(N_TOKENS, n_tokens, p=weights / weights.sum())


def _token(engine: Engine, sampler: Sampler, token: int, position: int, empty: bool) -> _Times:
    """Runs one token, which must have been computed, but by an `empty` program."""
    before, hidden = _n_uploads(engine), 0.0
    meanwhile = engine._experts.meanwhile

    def timed() -> None:
        nonlocal hidden
        began = time.thread_time()
        meanwhile()
        hidden += time.thread_time() - began

    engine._experts.meanwhile = timed  # type: ignore[method-assign]
    wall, thread = time.perf_counter(), time.thread_time()
    top = engine.run_token(token, position)
    assert top is not None
    sampler.sample(NUMBERS if empty else top, engine.full_logits)
    thread, wall = time.thread_time() - thread, time.perf_counter() - wall
    engine._experts.meanwhile = meanwhile  # type: ignore[method-assign]
    assert empty or not top.has_nan, "the token was not computed"
    return _Times(1e3 * (thread - hidden), 1e3 * thread, 1e3 * wall, _n_uploads(engine) - before)


def _print_parts(
    engines: Mapping[str, Engine],
    texts: Sequence[Sequence[int]],
    routing: Sequence[NDArray[np.uint32]],
) -> None:
    """Print what a token's time is spent on, by engine: medians, in microseconds."""
    sampler, tokens = Sampler(SamplingConfig(), seed=0), np.concatenate(texts).tolist()
    for name, engine in engines.items():
        now, seen = dict[str, float](), dict[str, list[float]]()
        for label, owner, method in _parts(engine):
            _time_calls(owner, method, label, now)
        pairs = zip(tokens, routing[-len(tokens) :], strict=True)
        for position, (token, used) in enumerate(pairs):
            believe(engine, used)
            now.clear()
            times = _token(engine, sampler, token, position % CONTEXT, True)
            hidden, shares = 1e3 * (times.thread - times.critical), dict(now)
            shares["submit and wait"] -= hidden
            shares["sampler, and all else"] = 1e3 * times.critical - sum(shares.values())
            for label, value in shares.items():
                seen.setdefault(label, []).append(value)
        print(f"{name}, in microseconds:")
        for label, values in seen.items():
            print(f"  {label:36}{np.median(values):7.1f}")


def _parts(engine: Engine) -> list[tuple[str, Any, str]]:
    """List what is timed: a name, and the method of an object. No part is within another."""
    tracker, programs = engine._experts, engine._programs
    found: list[tuple[str, Any, str]] = [
        ("uses are noted, misses found", tracker, "after_run"),
        ("table is published", tracker, "begin"),
        ("submit and wait", programs._backend, "run"),
        ("parameters are written", programs.io, "send"),
        ("results are read", programs, "tops"),
    ]
    if tracker.cache is not None:
        found += [
            ("moves are decided", tracker.residency, "decide"),
            ("moves are carried out", tracker.cache, "_carry_out"),
        ]
    return found


def _time_calls(owner: Any, method: str, label: str, now: dict[str, float]) -> None:
    """Add up in `now` how long the thread is in a method, in microseconds."""
    call = getattr(owner, method)

    def timed(*arguments: Any, **named: Any) -> Any:
        began = time.thread_time_ns()
        result = call(*arguments, **named)
        now[label] = now.get(label, 0.0) + (time.thread_time_ns() - began) / 1e3
        return result

    setattr(owner, method, timed)


def _n_uploads(engine: Engine) -> int:
    cache = engine._experts.cache  # the engine's own would have it settled
    return cache.counters.n_uploads if cache is not None else 0


def _results(runs: Mapping[str, _Run]) -> dict[str, Any]:
    """The targets are those of empty programs: what a GPU leaves to the host."""
    rows, met = [], {}
    for kind, run in runs.items():
        print(f"----- {kind} -----\n")
        for name, found in run.repeats.items():
            rows += _rows(f"{name}, {kind}", found)
            print(*rows[-3:], sep="\n")
            met[name] = rows[-3].value.median < TARGET_MS
            verdict = "met" if met[name] else "MISSED"
            print(f"target: under {TARGET_MS} ms {verdict}\n" if kind == EMPTY else "")
    uploads = [times.n_uploads for tokens in runs[EMPTY].repeats[CACHED] for times in tokens]
    return {"rows": rows, "targets_met": met, "uploads_per_token": float(np.mean(uploads))}


def _rows(name: str, found: Sequence[Sequence[_Times]]) -> list[Row]:
    every = [times.critical for tokens in found for times in tokens]
    per_repeat = [percentile([times.critical for times in tokens], 50) for tokens in found]
    threads = [percentile([times.thread for times in tokens], 50) for tokens in found]
    walls = [percentile([times.wall for times in tokens], 50) for tokens in found]
    tail = f"of single tokens p50 {percentile(every, 50):.3f} p99 {percentile(every, 99):.3f}"
    return [
        Row(f"host time per token {name}", summarise(per_repeat), "ms", "thread_time", tail),
        Row("the same and what is hidden", summarise(threads), "ms", "thread_time"),
        Row("the same tokens by the wall clock", summarise(walls), "ms", "host_wall"),
    ]


if __name__ == "__main__":
    run_main(main)
