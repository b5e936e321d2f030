"""Registers, instructions and weight loads of each family of kernels, as one GPU of each maker has
them: what they were when this was last renewed, and what is worse now.

python -m tests.gpu_drivers.limits  # renews the stored file
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tools.kernel_statistics import Compiled, column, compiled_for

from .conftest import OF_EACH_MAKER

STORED = Path(__file__).with_name("limits.json")
MARGIN = 0.05  # a compiler's own release may cost this; a tenth more is a regression


class Figures(NamedTuple):
    """The worst of a family, over the constants it is compiled with."""

    registers: int
    instructions: int
    loads: int | None  # of weights in flight at once; None: not counted


def figures(rows: Iterable[Compiled]) -> dict[str, Figures]:
    """The figures of every family."""
    families: dict[str, list[Compiled]] = {}
    for row in rows:
        families.setdefault(row.family, []).append(row)
    return {name: _worst(members) for name, members in sorted(families.items())}


def _worst(rows: Iterable[Compiled]) -> Figures:
    numbers = {
        name: [found for row in rows if (found := column(row.statistics, name)) is not None]
        for name in ("registers", "instructions", "loads")
    }
    return Figures(
        max(numbers["registers"]), max(numbers["instructions"]), min(numbers["loads"], default=None)
    )


def worse(found: Mapping[str, Figures], stored: Mapping[str, Figures]) -> Iterator[str]:
    """Every figure that is beyond what is stored, and every family that is in one of both only."""
    for name in sorted(found.keys() ^ stored.keys()):
        yield f"{name}: {'not stored' if name in found else 'stored, but gone'}"
    for name in sorted(found.keys() & stored.keys()):
        now, then = found[name], stored[name]
        for which in ("registers", "instructions"):
            before, after = getattr(then, which), getattr(now, which)
            if after > before * (1 + MARGIN):
                yield f"{name}: {after} {which}, {before} stored"
        if (now.loads or 0) < (then.loads or 0) * (1 - MARGIN):
            yield f"{name}: {now.loads} loads of weights in flight, {then.loads} stored"


def stored(gpu: str) -> dict[str, Figures]:
    """What is stored for a GPU."""
    of_gpu = json.loads(STORED.read_text(encoding="utf-8"))[gpu]
    return {name: Figures(*numbers) for name, numbers in of_gpu.items()}


def store(every: Mapping[str, Mapping[str, Figures]]) -> None:
    """Store the figures of GPUs, a line for each family."""
    parts = []
    for gpu, found in every.items():
        lines = [f"  {json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in found.items()]
        parts.append(f' "{gpu}": {{\n' + ",\n".join(lines) + "\n }")
    STORED.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    store({gpu: figures(compiled_for(gpu)) for gpu in OF_EACH_MAKER})
