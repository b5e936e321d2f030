"""The law of the project at random, for as long as you like: placement never changes a bit.

    python -m tools.soak_placement [MODEL ...] [--minutes 20 | --runs 50] [--tokens 96]
    python -m tools.soak_placement MODEL --seed 1234 --runs 1        the same case again
    python -m tools.soak_placement [MODEL ...] --residents           who stays, the full product

A case is a random choice of executor, slots, predictor, way of a miss, promotion, host pool,
policy, admission, residents, link, and of what happens to copies and reads (tools/soak_cases.py).
Each runs random sequences in an engine of its own, most with all checks on; logits must be those
with all experts resident, no heap may hold more than planned, and no thread may be left. MODEL is a
file, or "mixed" for one whose experts differ in size; by default the demo model, an odd one and
that. What a case is follows from its seed, when its threads do what does not. Exits with 1 at the
first difference.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import count, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.engine.tiny import mixed_model, model_path
from tools.soak_cases import RESIDENTS, Case, ModelFacts, Step, disturbed, draw, script
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import UsageError
from vkmoe.experts.decide.token_table import History
from vkmoe.llm import demo_model_path
from vkmoe.placement.pools import SlotLayout
from vkmoe.weights.sizes import weight_bytes

N_SCRIPTS = 5  # whose right logits are computed once for all cases
CTX_SIZE = 48
LIMIT_S = 300  # of one case; then all stacks are printed


class Right(NamedTuple):
    """A model, and what each script makes of it with all experts resident."""

    name: str  # as given
    model: Path
    facts: ModelFacts
    scripts: list[list[Step]]
    digests: list[list[str]]


def main() -> None:
    """Run cases and print one line for each."""
    os.environ.setdefault("VKMOE_DEVICE", "vulkan")  # on the CPU no expert moves
    options = _options()
    logging.getLogger("vkmoe").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        mixed = mixed_model(Path(folder) / "mixed.gguf")
        all_right = [_right(name, mixed, options.tokens) for name in options.models]
        if options.residents:
            _run_residents(all_right)
        else:
            _run_random(all_right, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    everything = [str(demo_model_path()), str(model_path("moe_odd")), "mixed"]
    parser.add_argument("models", nargs="*", default=everything)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--runs", type=int, help="how many cases (default: without end)")
    parser.add_argument("--minutes", type=float, help="no case begins later than that")
    parser.add_argument("--residents", action="store_true",
                        help="slots x policy x allocation x residents instead")  # fmt: skip
    return parser.parse_args()


def _run_random(all_right: list[Right], options: argparse.Namespace) -> None:
    started, n_refused, n_runs = time.monotonic(), 0, 0
    for seed in count(options.seed):
        if seed - options.seed == options.runs:
            break
        if options.minutes and time.monotonic() - started > 60 * options.minutes:
            break
        right = all_right[seed % len(all_right)]
        case = draw(seed, right.facts)
        again = f"{right.name} --seed {seed} --runs 1 --tokens {options.tokens}"
        refused = _judge(right, case, seed % N_SCRIPTS, again)
        n_refused += refused
        n_runs += not refused
    print(f"{n_runs} runs of {options.tokens} tokens, the same bits, {n_refused} refused, "
          f"{time.monotonic() - started:.0f} s")  # fmt: skip


def _run_residents(all_right: list[Right]) -> None:
    for right in all_right:
        n, k = right.facts.n_experts, right.facts.n_used
        slots = sorted({1, k, min(2 * k, n), max(1, n // 2), n})
        policies, allocations = ("lru", "slru", "lfru"), ("layer", "global")
        n_runs = 0
        for size, policy, allocation, kind in product(slots, policies, allocations, RESIDENTS):
            chosen: dict[str, Any] = {
                "expert_slots": size, "expert_policy": policy, "expert_allocation": allocation,
            }  # fmt: skip
            case = Case(chosen | RESIDENTS[kind], "wait", None, None, 0)
            n_runs += not _judge(right, case, 0, f"{right.name} --residents")
        print(f"{right.name}: {n_runs} runs, the same bits")


def _judge(right: Right, case: Case, number: int, again: str) -> bool:
    """Run a case; whether its options were refused. Exits at a difference."""
    began, before = time.monotonic(), set(threading.enumerate())
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    print(f"{again}: {case}", flush=True)
    try:
        with disturbed(case):
            rate = _differ(right, case, number)
    except UsageError as error:
        print(f"    refused: {error}", flush=True)
        return True
    finally:
        faulthandler.cancel_dump_traceback_later()
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    if left:
        sys.exit(f"DIFFERENT: threads are left: {left}")
    print(f"    same  {rate}  {time.monotonic() - began:.1f} s", flush=True)
    return False


def _differ(right: Right, case: Case, number: int) -> str:
    """Run a script in a case; what moved. Exits at the first logits that differ."""
    steps, wanted = right.scripts[number], right.digests[number]
    seed = None if case.warm is None else History(case.warm)
    with Engine(right.model, case.config(CTX_SIZE), checks=case.checks, seed=seed) as engine:
        for index, found in enumerate(_digests(engine, steps)):
            if found != wanted[index]:
                sys.exit(f"DIFFERENT at step {index} of script {number}: {steps[index]}")
            _check_memory(engine)
        engine.settle()
        assert engine.profiler is not None
        rate = f"{engine.profiler.served().total.hit_rate or 0:6.1%} hits"
        cache = engine.cache
        if cache is not None:
            done = cache.counters
            rate += f" {done.n_uploads} copied {done.n_landed} landed {done.n_cancelled} cancelled"
            rate += f" {done.n_failed_uploads} failed {done.n_hinted} hinted"
            if cache.pool is not None:
                rate += f"; read {cache.pool.counters.n_reads}, {cache.pool.counters.n_failed} bad"
        return rate


def _check_memory(engine: Engine) -> None:
    planned = engine.plan.heap_totals()
    for heap, n_bytes in enumerate(engine.device.native.memory_peak_bytes()):
        if n_bytes > planned.get(heap, 0):
            sys.exit(f"DIFFERENT: heap {heap} held {n_bytes:,}, planned {planned}")


def _digests(engine: Engine, steps: list[Step]) -> Iterator[str]:
    """Of the logits after each step; empty where none were asked for."""
    for token, position, with_logits in steps:
        engine.run_token(token, position, with_logits)
        if with_logits:
            logits = engine.full_logits()
            assert not np.isnan(logits).any(), f"NaN at {position}"
            yield hashlib.sha256(logits.tobytes()).hexdigest()
        else:
            yield ""


def _right(name: str, mixed: Path, n_tokens: int) -> Right:
    model = mixed if name == "mixed" else Path(name)
    with Engine(model, EngineConfig(ctx_size=CTX_SIZE)) as engine:
        experts, tensors = engine.spec.experts, engine.model.tensors
        if experts is None:
            sys.exit(f"{model} has no experts")
        spans = weight_bytes(tensors).spans
        layout = SlotLayout(engine.device.info, spans, experts.n_experts, experts.n_used)
        facts = ModelFacts(
            engine.n_vocab, len(spans), experts.n_experts, experts.n_used,
            sum(spans) * experts.n_experts, layout.least_host_bytes,
        )  # fmt: skip
        scripts = [script(facts, number, n_tokens, CTX_SIZE) for number in range(N_SCRIPTS)]
        return Right(
            name, model, facts, scripts, [list(_digests(engine, steps)) for steps in scripts]
        )


if __name__ == "__main__":
    main()
