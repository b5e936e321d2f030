"""The law of the project at random, for as long as you like: placement never changes a bit.

    python -m tools.soak [MODEL ...] [--minutes 20 | --runs 50] [--tokens 96]
    python -m tools.soak MODEL --seed 1234 --runs 1        the same case again

A case is a random choice of executor, slots, predictor, way of a miss, promotion, host pool,
policy, admission, residents, link, and of what happens to copies and reads. Each runs random
sequences in an engine of its own, most with all checks on; logits must be those with all experts
resident, no heap may hold more than planned, and no thread may be left. MODEL is a file, or "mixed"
for one whose experts differ in size; by default the demo model, an odd one and that. What a case is
follows from its seed, when its threads do what does not. Exits with 1 at the first difference.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import logging
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, get_args
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from tests.engine.tiny import mixed_model, model_path
from vkmoe.choices import PolicyName
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import GpuError, UsageError
from vkmoe.execute import expert_memory
from vkmoe.experts.decide.token_table import History
from vkmoe.experts.store.copies import Copy, Upload, Uploader
from vkmoe.gpu.link_speed import LinkSpeed
from vkmoe.llm import demo_model_path
from vkmoe.placement.pools import SlotLayout
from vkmoe.weights.sizes import weight_bytes

N_SCRIPTS = 5  # whose right logits are computed once for all cases
CTX_SIZE = 48
LIMIT_S = 300  # of one case; then all stacks are printed
RESIDENTS: dict[str, dict[str, Any]] = {
    "none": {"moe_warmpin": 0},
    "warmpin": {"moe_warmpin": 2, "moe_warmpin_after": 8},
    "named": {"expert_resident_ids": "1"},
}
LINKS = ("unknown", "fast", "slow")
COPIES = ("wait", "overlap", "late", "failing", "late and failing", "always failing")
MAX_DELAY_S = 0.04  # a few tokens of the demo model
N_SOUND_READS = 32  # after one that failed: whom a layer needs must succeed at the second attempt


class ModelFacts(NamedTuple):
    """What of a model decides which ways there are."""

    n_vocab: int
    n_layers: int  # with experts
    n_experts: int
    n_used: int
    experts_bytes: int
    least_pool: int  # bytes


class Step(NamedTuple):
    """One token; positions go back where a sequence begins anew."""

    token: int
    position: int
    with_logits: bool


@dataclass(frozen=True)
class Case:
    """One way to run: options, and what happens to copies."""

    options: dict[str, Any]
    copies: str
    link: LinkSpeed | None  # decides how a token is cut, and how much is copied beside it
    warm: NDArray[np.float64] | None  # counts of an earlier run [n_layers * n_experts]
    seed: int
    checks: bool = True  # without them fewer waits keep threads in step

    def __str__(self) -> str:
        words = [f"{name.removeprefix('expert_')}={value}" for name, value in self.options.items()]
        return " ".join([*words, f"copies={self.copies.replace(' ', '-')}",
                         f"link={self.link and int(self.link.read_bytes_per_second)}",
                         *["warm"] * (self.warm is not None),
                         *["unchecked"] * (not self.checks)])  # fmt: skip

    def config(self, ctx_size: int) -> EngineConfig:
        return EngineConfig(ctx_size=ctx_size, **self.options)


def script(facts: ModelFacts, number: int, n_tokens: int, ctx_size: int) -> list[Step]:
    """Tokens of several sequences: some texts repeat themselves, some wander, some go back."""
    rng, steps = random.Random(number), []
    position, vocabulary = 0, [1]
    for i in range(n_tokens):
        if position == ctx_size or position == 0 or rng.random() < 0.04:
            position = 0 if rng.random() < 0.7 else rng.randrange(position + 1) % ctx_size
            n_words = rng.choice([2, 5, 40, facts.n_vocab - 1])
            vocabulary = [rng.randrange(1, facts.n_vocab) for _ in range(n_words)]
        last = i + 1 == n_tokens
        steps.append(Step(rng.choice(vocabulary), position, last or rng.random() < 0.8))
        position += 1
    return steps


def draw(seed: int, facts: ModelFacts) -> Case:
    """The case of a seed; rare ways occur more often than users ask for them."""
    rng = random.Random(seed)
    n, k = facts.n_experts, facts.n_used
    parts = [max(facts.experts_bytes // part, facts.least_pool) for part in (2, 4, n)]
    pool = rng.choice([None, *parts])
    copies = rng.choice(COPIES)
    counts = [1, k, 2 * k, n // 2, n - 1] + [None, n] * (rng.random() < 0.2)
    slots = rng.choice([min(max(count, 1), n) if count else None for count in counts])
    options: dict[str, Any] = {
        "executor": "stepped" if pool else rng.choice(["fused", "stepped"]),
        "host_pool": str(pool) if pool else None,
        "moe_predict_prefetch": rng.choice([None, False]),
        "miss": rng.choice(["read", "gather", "auto"]),
        "expert_policy": rng.choice(["forecast", *get_args(PolicyName)]),
        "expert_allocation": rng.choice(["layer", "layer", "global"]),
    }
    if slots is not None:
        options["expert_slots"] = slots
        options["expert_copies"] = "wait" if copies == "wait" or rng.random() < 0.2 else "overlap"
        options["promote_on_read"] = rng.random() < 0.6
        kinds = [kind for kind in RESIDENTS if slots > 1 or kind != "warmpin"]  # half are pinned
        options |= RESIDENTS[rng.choice(kinds)]
    warm = None
    if rng.random() < 0.25:
        n_keys = facts.n_layers * n
        warm = np.array([rng.choice([0.0, 0.5, 3.0, 40.0]) for _ in range(n_keys)])
    return Case(options, copies, _link(rng.choice(LINKS), facts), warm, seed, rng.random() < 0.7)


def _link(kind: str, facts: ModelFacts) -> LinkSpeed | None:
    """A slow one takes a second for the worst token, which is cut into pieces then."""
    used_bytes = facts.experts_bytes * facts.n_used / facts.n_experts
    speed = {"unknown": 0.0, "fast": 12e9, "slow": used_bytes}[kind]
    return LinkSpeed(speed, 2 * speed, 1.5 * speed) if speed else None


# ----- what goes wrong -----


class _Upload:
    """Copies that arrive late, or not at all."""

    def __init__(self, real: Upload, delay_s: float, fails: bool) -> None:
        self._real, self._delay_s, self._fails = real, delay_s, fails

    def done(self) -> bool:
        return self._real.done()

    def wait(self) -> None:
        time.sleep(self._delay_s)
        self._real.wait()
        if self._fails:
            raise GpuError("injected after the copy", "", "VK_ERROR_OUT_OF_HOST_MEMORY")

    def cancel(self) -> bool:
        return self._real.cancel()

    def interval(self) -> tuple[int, int] | None:
        return self._real.interval()


class _Disturbed:
    """An uploader whose copies begin late, arrive late, or fail, at random.

    `n_sound` copies succeed after each that failed.
    """

    def __init__(self, real: Uploader, case: Case, n_sound: int) -> None:
        self._real, self._rng = real, random.Random(case.seed)
        self._delay_s = MAX_DELAY_S if "late" in case.copies else 0.0
        self._share = {"always failing": 1.0}.get(case.copies, 0.2 * ("failing" in case.copies))
        self._n_sound, self._n_due = n_sound, 0

    def start(self, copies: Sequence[Copy], urgent: bool = False) -> Upload:
        self._n_due -= 1
        fails = self._n_due < 0 and self._rng.random() < self._share
        if fails:
            self._n_due = self._n_sound
        before, after = (self._delay_s * self._rng.random() ** 4 for _ in range(2))
        time.sleep(before)
        if fails and self._rng.random() < 0.5:
            raise GpuError("injected before the copy", "", "VK_ERROR_OUT_OF_HOST_MEMORY")
        return _Upload(self._real.start(copies, urgent), after, fails)


@contextmanager
def disturbed(case: Case) -> Iterator[None]:
    """Engines opened in here are as unlucky as the case says."""

    def unlucky(name: str, n_sound: int) -> Any:
        real = getattr(expert_memory, name)
        return patch.object(
            expert_memory, name, lambda source: _Disturbed(real(source), case, n_sound)
        )

    with (
        unlucky("Uploads", 0),
        unlucky("FileReads", N_SOUND_READS),
        patch("vkmoe.engine.link_of_misses", lambda device: case.link),
    ):
        yield


# ----- runs -----


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
        _run_random(all_right, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    everything = [str(demo_model_path()), str(model_path("moe_odd")), "mixed"]
    parser.add_argument("models", nargs="*", default=everything)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--runs", type=int, help="how many cases (default: without end)")
    parser.add_argument("--minutes", type=float, help="no case begins later than that")
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
