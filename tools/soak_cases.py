"""Random ways to run a model, for tools/soak_placement.py: what is drawn, and what goes wrong.

A case is a pure function of its seed and the model. Owns no engine and compares nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from vkmoe.config import EngineConfig
from vkmoe.errors import GpuError
from vkmoe.experts.store.copies import Copy, Upload, Uploader
from vkmoe.gpu.link_speed import LinkSpeed
from vkmoe.placement import expert_memory

__all__ = ["RESIDENTS", "Case", "ModelFacts", "Step", "disturbed", "draw", "script"]

RESIDENTS: dict[str, dict[str, Any]] = {
    "none": {"moe_warmpin": 0},
    "warmpin": {"moe_warmpin": 2, "moe_warmpin_after": 8},
    "first_n": {"expert_resident_selection": "first_n", "expert_num_resident": 1},
    "frequency": {"expert_resident_selection": "frequency", "expert_warmup_tokens": 12},
    "manual": {"expert_resident_ids": "1"},
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
        "expert_predictor": rng.choice(["token", "correlation", "previous", "frequency", "none"]),
        "miss": rng.choice(["read", "gather", "auto"]),
        "expert_policy": rng.choice(["lru", "slru", "lfru"]),
        "expert_allocation": rng.choice(["layer", "layer", "global"]),
        "expert_half_life": rng.choice([1.0, 8.0, 64.0]),
        "expert_admission": rng.random() < 0.5,
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

    def drain(self) -> bool:
        return self._real.drain()


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
