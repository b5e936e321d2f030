"""The law of the project over the full product: placement never changes a bit of the logits.

    python -m tools.soak_placement [MODEL ...] [--tokens 64]

Every number of slots x policy x allocation x kind of residents, each in an engine of its own with
all checks on, against the logits with all experts resident. The tests hold every pair of choices.
Exits with 1 at the first difference.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import UsageError
from vkmoe.llm import demo_model_path

RESIDENTS: dict[str, dict[str, Any]] = {
    "none": {"moe_warmpin": 0},
    "warmpin": {"moe_warmpin": 2, "moe_warmpin_after": 8},
    "first_n": {"expert_resident_selection": "first_n", "expert_num_resident": 1},
    "frequency": {"expert_resident_selection": "frequency", "expert_warmup_tokens": 12},
    "manual": {"expert_resident_ids": "1"},
}


def main() -> None:
    """Run every combination and print one line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("models", nargs="*", type=Path, default=[demo_model_path()])
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    for model in options.models:
        n_runs, started = 0, time.perf_counter()
        wanted, _ = _run(model, options.tokens, {})
        for name, choices in _combinations(model):
            try:
                found, hit_rate = _run(model, options.tokens, choices)
            except UsageError as error:
                print(f"refused       {name}: {error}", flush=True)
                continue
            print(f"{'same' if found == wanted else 'DIFFERENT'}  {hit_rate:6.1%}  {name}",
                  flush=True)  # fmt: skip
            if found != wanted:
                sys.exit(1)
            n_runs += 1
        elapsed = time.perf_counter() - started
        print(f"{model.name}: {n_runs} runs of {options.tokens} tokens, the same bits, "
              f"{elapsed:.0f} s")  # fmt: skip


def _combinations(model: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with Engine(model, EngineConfig(ctx_size=16)) as engine:
        experts = engine.spec.experts
    if experts is None:
        sys.exit(f"{model} has no experts")
    n, k = experts.n_experts, experts.n_used
    slots = sorted({1, k, min(2 * k, n), max(1, n // 2), n})
    policies, allocations = ("lru", "slru", "lfru"), ("layer", "global")
    for count, policy, allocation, kind in product(slots, policies, allocations, RESIDENTS):
        yield (
            f"{count:3} slots  {policy:5} {allocation:7} {kind}",
            {"expert_slots": count, "expert_policy": policy, "expert_allocation": allocation,
             **RESIDENTS[kind]},
        )  # fmt: skip


def _run(model: Path, n_tokens: int, choices: dict[str, Any]) -> tuple[str, float]:
    """A digest of all logits, and the hit rate."""
    digest = hashlib.sha256()
    config = EngineConfig(ctx_size=n_tokens, **choices)
    with Engine(model, config, checks=True) as engine:
        for position in range(n_tokens):
            token = (7 * position * position + 3 * (position % 4)) % (engine.n_vocab - 1) + 1
            engine.run_token(token, position)
            logits = engine.full_logits()
            assert not np.isnan(logits).any(), f"NaN at token {position}: {choices}"
            digest.update(logits.tobytes())
        assert engine.profiler is not None
        return digest.hexdigest(), engine.profiler.hit_rate() or 0.0


if __name__ == "__main__":
    main()
