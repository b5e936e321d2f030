"""Write what vkmoe plans for eight models on many machines into docs/expert-cache.md and README.md.

    .venv/bin/python -m tools.make_plan_table

Plans need no weights: the models are headers of full size, made anew. Machines are the profile of
an RTX 3060 with other sizes of memory, and two integrated GPUs that differ in theirs alone, so that
a table shows what memory does.  Of the RAM 2 GiB are in use.  `plan_of` and `MACHINES` serve tests.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tools.make_synthetic_model import make
from vkmoe.config import EngineConfig
from vkmoe.errors import OutOfMemoryError
from vkmoe.facts import DeviceInfo
from vkmoe.models import ModelFile, open_model
from vkmoe.placement.decide import Choosing, Decision, decide
from vkmoe.placement.forecast.device_profiles import read_profile

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- made by tools/make_plan_table.py -->", "<!-- end of what it makes -->"
GIB, IN_USE = 1 << 30, 2 << 30
CARDS, RAMS, SHARED = (6, 8, 12, 16, 24), (16, 32, 64), (16, 32)
SHORT = ((8, 16), (12, 32), (16, 32), (24, 64), (0, 32))  # cards and RAM of the table in README
MODELS = {  # by preset: the mixture of types, and the name
    "qwen3-30b-a3b": ("q4_k_m", "Qwen3-30B-A3B"),
    "qwen3.6-35b-a3b": ("q4_k_m", "Qwen3.6-35B-A3B"),
    "gemma-4-26b-a4b": ("q4_k_m", "Gemma 4 26B-A4B"),
    "gpt-oss-20b": ("mxfp4", "gpt-oss-20b"),
    "gpt-oss-120b": ("mxfp4", "gpt-oss-120b"),
    "mixtral-8x7b": ("q4_k_m", "Mixtral 8x7B"),
    "deepseek-v2-lite": ("q4_k_m", "DeepSeek-V2-Lite"),
    "olmoe-1b-7b": ("q4_k_m", "OLMoE 1B-7B"),
}


class Machine(NamedTuple):
    """Describes a device and the memory beside it; `card` is 0 where that is shared."""

    card: int  # GB
    ram: int
    info: DeviceInfo
    free: int  # bytes of host memory
    speeds: Any


def _machines() -> Iterator[Machine]:
    discrete, shared = read_profile("rtx3060-12gb"), read_profile("uma-32gb")
    for card in CARDS:
        for ram in RAMS:
            heaps = tuple(
                replace(heap, size=card * GIB, budget=None)
                if heap.device_local
                else replace(heap, size=ram * GIB, budget=None)
                for heap in discrete.info.heaps
            )
            info = replace(discrete.info, heaps=heaps)
            yield Machine(card, ram, info, ram * GIB - IN_USE, discrete.speeds)
    for ram in SHARED:
        heaps = tuple(
            replace(heap, size=heap.size * ram // 32, budget=None) for heap in shared.info.heaps
        )
        info = replace(shared.info, heaps=heaps)
        yield Machine(0, ram, info, ram * GIB - IN_USE, shared.speeds)


MACHINES = tuple(_machines())


@contextmanager
def opened() -> Iterator[dict[str, ModelFile]]:
    """Make and open the headers of all models."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        found = {}
        for preset, (mix, _) in MODELS.items():
            path = Path(folder) / f"{preset}.gguf"
            make(preset, path, None, mix, sparse=True)
            found[preset] = stack.enter_context(open_model(path))
        yield found


def plan_of(model: ModelFile, machine: Machine, **asked: Any) -> Decision:
    """Plan a model for a machine, with the CPU's help if that is predicted to be faster."""
    choosing = Choosing(lambda: machine.speeds, beside_cpu=True)
    free = machine.free
    return decide(EngineConfig(**asked), model, machine.info, None, choosing, True, free)


Cells = dict[tuple[str, int, int], str]  # by model, card and RAM


def _cells() -> Cells:
    with opened() as models:
        return {
            (preset, machine.card, machine.ram): _cell(models[preset], machine)
            for preset in MODELS
            for machine in MACHINES
        }


def _cell(model: ModelFile, machine: Machine) -> str:
    """Write the mode and the tokens per second that are predicted."""
    try:
        best = plan_of(model, machine).candidates[0]
    except OutOfMemoryError:
        return "no room"
    rate, mode = best.prediction.rate, best.plan.mode.name
    figure = f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"
    return f"{mode} {figure}{', file' if best.prediction.file_share else ''}"


def _whole(cells: Cells) -> str:
    """Write the whole table in Markdown."""
    columns = [f"{card} GB card" for card in CARDS] + ["integrated"]
    lines = [f"| model | RAM | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    for preset, (_, name) in MODELS.items():
        rows = [[cells.get((preset, card, ram), "") for card in (*CARDS, 0)] for ram in RAMS]
        for alike in _alike(rows):
            rams = " to ".join(str(RAMS[i]) for i in sorted({alike[0], alike[-1]}))
            lines.append(f"| {name} | {rams} GB | {' | '.join(rows[alike[0]])} |")
    return "\n".join(lines) + "\n"


def _alike(rows: Sequence[Sequence[str]]) -> list[list[int]]:
    """Group neighbours among rows that say the same; an empty cell says nothing."""
    groups = [[0]]
    for number, row in enumerate(rows[1:], 1):
        first = rows[groups[-1][0]]
        if all(not new or new == old for new, old in zip(row, first, strict=True)):
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def _short(cells: Cells) -> str:
    """Write a few of its columns, of models that are larger than some card."""
    names = [f"{f'{card} GB card' if card else 'integrated'}, {ram} GB RAM" for card, ram in SHORT]
    lines = [f"| model | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for preset, (_, name) in MODELS.items():
        row = [cells[preset, card, ram] for card, ram in SHORT]
        lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """Return the pages with their tables made anew."""
    cells, found = _cells(), {}
    for name, made in (("docs/expert-cache.md", _whole(cells)), ("README.md", _short(cells))):
        before, rest = (ROOT / name).read_text(encoding="utf-8").split(BEGIN + "\n")
        found[ROOT / name] = f"{before}{BEGIN}\n{made}{END}{rest.split(END)[1]}"
    return found


def main() -> None:
    """Write the tables between their marks."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
