"""The compilers of GPUs that are not here take every kernel of real models, and need no memory for
registers.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tools.gpu_drivers import GPUS, command, folder
from tools.kernel_statistics import COLUMNS, LOADS, Compiled, _read_kept, compiled_for

from .conftest import OF_EACH_MAKER
from .limits import (
    CODE_BYTES,
    GCN,
    ON_UNITS,
    RDNA,
    WAVES,
    Figures,
    beyond,
    figures,
    kernel_of,
    stored,
    worse,
)

ROOT = Path(__file__).resolve().parent.parent.parent


class Allowed(NamedTuple):
    """Spills that stay: at most so many of one kind, of a family on some GPUs."""

    family: str
    gpus: tuple[str, ...]
    statistic: str
    most: int
    reason: str


SPILLS = (*COLUMNS["spilled"], *COLUMNS["scratch"])
STORING = "it runs only for an expert that is stored as it is read, of one type that is rare"
ALLOWED = tuple(
    Allowed(f"{kernel}.iq2_s", ("anv-bmg",), statistic, most, STORING)
    for kernel in ("expert_gate_up_keep", "expert_down_keep")
    for statistic, most in (("Spill Count", 8), ("Fill Count", 4), ("Scratch Memory Size", 1024))
)


# Pipelines of one type on one GPU; CI compiles all of them on every GPU.
SAMPLE = "q4_k"


def samples(gpus: Iterable[str]) -> list[Any]:
    """The sample on a GPU of one maker, and everything on all of `gpus`."""
    few = [(gpu, SAMPLE) for gpu in gpus if gpu == OF_EACH_MAKER[0]]
    return [*few, *(pytest.param(gpu, "", marks=pytest.mark.full) for gpu in gpus)]


@cache
def compiled(gpu: str, only: str) -> list[Compiled]:
    """What a GPU's compiler says of kernels that have changed since they were compiled here."""
    return compiled_for(gpu, only, kept=folder() / "compiled" / f"{gpu}.json")


@pytest.mark.usefixtures("drivers")
@pytest.mark.parametrize(("gpu", "only"), samples(GPUS))
def test_every_pipeline_compiles_and_spills_nothing(gpu: str, only: str) -> None:
    rows = compiled(gpu, only)  # raises where one does not compile
    assert len({row.name for row in rows}) == len(rows) > (10 if only else 200)
    assert all(set(SPILLS) & set(row.statistics) for row in rows), "the driver has other names"
    found = [f"{row.name}: {spills}" for row in rows if (spills := _spills(row, gpu))]
    assert not found, "\n".join(found)
    for item in ALLOWED:
        now = [row.statistics.get(item.statistic) for row in rows if row.family == item.family]
        assert gpu not in item.gpus or any(now), f"take from the list what is mended: {item}"


def _spills(row: Compiled, gpu: str) -> dict[str, float]:
    """What was spilled and is not allowed."""
    allowed = {
        item.statistic: item.most
        for item in ALLOWED
        if item.family == row.family and gpu in item.gpus
    }
    return {
        name: number
        for name in SPILLS
        if (number := row.statistics.get(name, 0)) > allowed.get(name, 0)
    }


@pytest.mark.usefixtures("drivers")
@pytest.mark.parametrize(("gpu", "only"), samples(OF_EACH_MAKER))
def test_no_family_needs_more_than_it_did(gpu: str, only: str) -> None:
    """Where the new figures are wanted: python -m tests.gpu_drivers.limits."""
    then = {name: numbers for name, numbers in stored(gpu).items() if only in name}
    found = list(worse(figures(compiled(gpu, only)), then))
    assert not found, "\n".join(found)


@pytest.mark.usefixtures("drivers")
@pytest.mark.parametrize(("gpu", "only"), samples([*RDNA, *GCN]))
def test_waves_fit_and_code_is_short(gpu: str, only: str) -> None:
    rows = compiled(gpu, only)
    kernels = {kernel_of(row).removesuffix(ON_UNITS) for row in rows}
    assert only or kernels >= {kernel.removesuffix(ON_UNITS) for kernel in WAVES}
    found = list(beyond(rows, gpu))
    assert not found, "\n".join(found)


UNITS = {"navi31": "v_wmma", "gfx1150": "v_wmma", "anv-bmg": "dpas"}


@pytest.mark.usefixtures("drivers")
@pytest.mark.parametrize(
    "gpu", [gpu if gpu == "navi31" else pytest.param(gpu, marks=pytest.mark.full) for gpu in UNITS]
)
def test_prompts_are_multiplied_by_matrix_instructions(gpu: str, tmp_path: Path) -> None:
    """As many as a subgroup's matrices need for 32 weights, at least."""
    (row,) = compiled_for(gpu, "expert_matmul_down.q4_k+matrix", tmp_path)
    (assembly,) = tmp_path.iterdir()
    numbers = {key: int(n) for key, _, n in (word.partition("=") for word in row.name.split()) if n}
    n_matrices = (numbers["lane_dots"] // numbers["matrix_rows"]) * (
        numbers["lane_columns"] // numbers["matrix_columns"]
    )
    text = assembly.read_text(encoding="utf-8")
    assert text.count(UNITS[gpu]) >= n_matrices * 32 // numbers["matrix_depth"] >= 8


@pytest.mark.full
def test_only_what_has_changed_is_compiled_again(drivers: Path, tmp_path: Path) -> None:
    """What is kept is what was found; a figure of another SPIR-V is not taken for it."""
    kept = tmp_path / "record" / "navi31.json"
    program = [sys.executable, "-m", "tools.kernel_statistics", "--json", "--kept", str(kept)]
    words, environment = command(drivers, "navi31", [*program, "--only", "embed.q4_k"])

    def run() -> list[dict[str, Any]]:
        done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        rows: list[dict[str, Any]] = json.loads(done.stdout)
        return rows

    (first,), record = run(), json.loads(kept.read_text(encoding="utf-8"))
    ((key, row),) = record.items()
    assert row == first and first["statistics"]["VGPRs"] > 0
    kept.write_text(json.dumps({key: row | {"milliseconds": -1.0}}), encoding="utf-8")
    assert run()[0]["milliseconds"] == -1.0
    kept.write_text(json.dumps({key[::-1]: row | {"milliseconds": -1.0}}), encoding="utf-8")
    assert run()[0]["milliseconds"] > 0
    assert json.loads(kept.read_text(encoding="utf-8"))[key]["statistics"] == row["statistics"]


def test_a_damaged_record_is_none(tmp_path: Path) -> None:
    assert _read_kept(tmp_path / "none.json") == {}
    for text in ("{", "[1, 2]", '{"a": 1}'):
        (tmp_path / "navi31.json").write_text(text, encoding="utf-8")
        assert _read_kept(tmp_path / "navi31.json") == {}


def test_the_table_and_the_assembly_are_of_what_was_asked_for(
    drivers: Path, tmp_path: Path
) -> None:
    done = _statistics("--gpu", "navi31", "--only", "embed.q4_k", "--assembly", str(tmp_path))
    assert done.returncode == 0, done.stderr
    head, row, total = done.stdout.splitlines()
    assert head.split()[:3] == ["pipeline", "lanes", "registers"] and row.startswith("embed.q4_k ")
    assert total.startswith("1 pipelines in ") and total.endswith(" s, 0 spill")
    (assembly,) = tmp_path.iterdir()
    assert "s_endpgm" in assembly.read_text(encoding="utf-8")


def _statistics(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "tools.kernel_statistics", *arguments]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True)


def test_a_device_without_statistics_is_refused_in_a_line() -> None:
    done = _statistics("--only", "embed.q4_k")
    if done.returncode == 0:  # lavapipe has none, another device at hand may have them
        assert done.stdout.splitlines()[-1].startswith("1 pipelines in ")
    else:
        assert done.returncode == 1 and not done.stdout
        assert re.fullmatch(r"error: .* keeps no statistics .*\nhint: .*\n", done.stderr)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Figures(72, 1000, 4), []),
        (Figures(64, 1050, 8), []),
        (Figures(79, 1000, 4), ["matvec: 79 registers, 72 stored"]),
        (Figures(72, 1100, 4), ["matvec: 1100 instructions, 1000 stored"]),
        (Figures(72, 1000, 3), ["matvec: 3 loads of weights in flight, 4 stored"]),
    ],
)
def test_a_tenth_more_is_too_much(found: Figures, words: list[str]) -> None:
    assert list(worse({"matvec": found}, {"matvec": Figures(72, 1000, 4)})) == words


@pytest.mark.parametrize(
    ("gpu", "waves", "code", "words"),
    [
        ("navi31", 8, CODE_BYTES, []),
        ("navi31", 7, CODE_BYTES, ["matvec q8_0: 7 waves, at least 8"]),
        ("vega10", 2, CODE_BYTES, []),
        ("vega10", 1, CODE_BYTES, ["matvec q8_0: 1 waves, at least 2"]),
        ("navi31", 8, CODE_BYTES + 4, ["matvec q8_0: 16388 bytes of code, at most 16384"]),
    ],
)
def test_fewer_waves_and_more_code_are_named(
    gpu: str, waves: int, code: int, words: list[str]
) -> None:
    said = {"Subgroups per SIMD": waves, "Code size": code}
    row = Compiled("matvec q8_0", "matvec.q8_0", (), 64, 1.0, said)
    assert list(beyond([row], gpu)) == words


def test_families_that_come_and_go_are_named() -> None:
    one = Figures(1, 1, None)
    assert list(worse({"new": one}, {"old": one})) == ["new: not stored", "old: stored, but gone"]


def test_the_worst_of_a_family_counts() -> None:
    def row(family: str, **statistics: float) -> Compiled:
        return Compiled(family, family, (), 64, 1.0, statistics)

    rows = [
        row("a", VGPRs=72, Instructions=900, **{LOADS: 4}),
        row("a", VGPRs=60, Instructions=950, **{LOADS: 2}),
        row("b", VGPRs=24, Instructions=16),
    ]
    assert figures(rows) == {"a": Figures(72, 950, 2), "b": Figures(24, 16, None)}
