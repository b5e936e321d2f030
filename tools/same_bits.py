"""Prints what a change of structure must leave as it is: programs and logits of all fixture models.

Runs each tiny model of tests/fixtures in every way of serving its experts, and prints a hash of the
logits and routing of some tokens, and every command of its programs. Addresses differ from run to
run, so they are printed as numbers in the order of their first use. To compare two checkouts:

    python -m tools.same_bits > before.txt     in the one
    python -m tools.same_bits > after.txt      in the other; then: cmp before.txt after.txt

A word chooses lines: `python -m tools.same_bits 'deepseek2_v3 stepped'`.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import UsageError, VkmoeError
from vkmoe.gpu.hazards import plan_barriers
from vkmoe.gpu.kernels import KERNELS
from vkmoe.gpu.program import MEMORY, Command, Dispatch, Program, Range

MODELS = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "models"
N_TOKENS, SEED = 12, 5
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "slots, kept as they are read": {"expert_slots": 2, "miss": "read", "promote_on_read": True},
    "slots, read in place": {"expert_slots": 2, "promote_on_read": False},
    "slots, gathered": {"expert_slots": 2, "miss": "gather"},
    "slots, stepped": {"expert_slots": 2, "executor": "stepped"},
}


def ways(path: Path) -> Iterator[tuple[str, EngineConfig]]:
    """Yield the ways to serve a model's experts, by name; last the smallest host pool."""
    for name, options in WAYS.items():
        yield name, EngineConfig(**options)
    try:
        Engine(path, EngineConfig(host_pool="1")).close()
    except UsageError as error:  # which says how much is needed
        least = re.search(r"--host-pool (\S+) or more", error.hint)
        if least is not None:
            yield "smallest host pool", EngineConfig(host_pool=least[1])


def logits_hash(engine: Engine) -> str:
    """Hash the logits and the routing of some random tokens."""
    tokens = np.random.default_rng(SEED).integers(0, engine.n_vocab, N_TOKENS).tolist()
    found = hashlib.sha256()
    for position, token in enumerate(tokens):
        engine.run_token(token, position)
        found.update(engine.full_logits().tobytes())
        found.update(engine.routing().tobytes())
    return found.hexdigest()


def described(program: Program, known: dict[int, str]) -> Iterator[str]:
    """Yield a line for each command; `known` gives addresses their numbers, and grows."""
    for command, barrier in zip(program.commands, plan_barriers(program.commands), strict=True):
        yield f"{'|' if barrier else ' '} {command} {_details(command, known)}".rstrip()


def _details(command: Command, known: dict[int, str]) -> str:
    """Write what `str(command)` leaves out of a dispatch."""
    if not isinstance(command, Dispatch):
        return ""
    kernel = KERNELS[command.kernel]
    values = kernel._format.unpack(command.push)  # the format is no user's business
    push = " ".join(
        f"{field.name}={_number(value, known) if field.kind == 'address' else value}"
        for field, value in zip(kernel.push, values, strict=True)
    )
    reads, writes = (sorted(map(_bytes, ranges)) for ranges in (command.reads, command.writes))
    words = [tensor.n_words for tensor in command.tensors]
    return (
        f"constants {command.constants} subgroup {command.subgroup_size} push [{push}] "
        f"words {words} reads {reads} writes {writes}"
    )


def _number(address: int, known: dict[int, str]) -> str:
    return known.setdefault(address, f"@{len(known) + 1}") if address else "none"


def _bytes(item: Range) -> str:
    if item.resource == MEMORY:
        return f"memory of {item.end - item.start}"
    return f"{item.resource} {item.start}-{item.end}"


def lines(wanted: str) -> Iterator[str]:
    """Yield all lines of models and ways whose names hold `wanted`."""
    for path in sorted(MODELS.glob("*.gguf")):
        for way, config in ways(path):
            name = f"{path.stem} {way}"
            if wanted not in name:
                continue
            try:
                with Engine(path, config) as engine:
                    yield f"{name}: logits {logits_hash(engine)}"
                    known: dict[int, str] = {}
                    for with_logits in (True, False):
                        for line in described(engine.program(with_logits), known):
                            yield f"{name}: {line}"
            except VkmoeError as error:
                yield f"{name}: {type(error).__name__}: {error}"


if __name__ == "__main__":
    for text in lines(" ".join(sys.argv[1:])):
        print(text, flush=True)
