"""`vkmoe tune`: measures, remembers, has nothing to do the second time, and changes no text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from vkmoe.choices import TuningSource
from vkmoe.cli.cache.tune import tiles_line
from vkmoe.gpu.device import choose_device, list_devices
from vkmoe.kernels.launches import Launch
from vkmoe.llm import LLM
from vkmoe.placement import remembered
from vkmoe.placement.remembered import MeasuredTiles, recall
from vkmoe.selftest import launches as launch_choice
from vkmoe.selftest import matrices as launch_cases
from vkmoe.selftest.matrices import MatrixWork, largest_of_each_class, works_of

pytestmark = pytest.mark.usefixtures("one_device")

WORKS = Counter(
    {MatrixWork("matvec", "Q8_0", 40, 256): 2, MatrixWork("matvec_residual", "Q4_K", 24, 256): 1}
)


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    where = tmp_path / "cache" / "tuning.json"
    monkeypatch.setattr(
        remembered, "remembered_path", lambda device, what="tuning": where.parent / f"{what}.json"
    )
    monkeypatch.setattr(launch_cases, "common_works", lambda: WORKS)
    return where


def last_wins(times: Mapping[Launch, Sequence[float]], _: Launch) -> tuple[Launch, float]:
    return [*times][-1], 0.25


def test_a_second_run_has_nothing_to_do(run: Run, path: Path) -> None:
    first = run("tune")
    assert first.code == 0 and f"remembered in {path}" in first.err
    assert "matvec          Q8_0    few   short" in first.out and "matvec_residual" in first.out
    second = run("tune")
    assert second.code == 0 and second.out == first.out and "nothing to do" in second.err
    assert "remembered in" not in second.err
    again = run("tune", "--again")
    assert again.code == 0 and "remembered in" in again.err
    assert "forgotten" in run("tune", "--forget").err and not path.exists()
    assert "nothing was remembered" in run("tune", "--forget").err


def test_the_cpu_needs_none(run: Run, path: Path, cpu_native: None) -> None:
    """One line says so, and what changes its speed; a script that tunes goes on."""
    done = run("tune", "--device", "cpu")
    device, line = done.err.splitlines()
    assert (done.code, done.out) == (0, "") and device.startswith("device ")
    assert "the CPU needs no tuning" in line and "-t" in line and not path.exists()
    assert "nothing was remembered" in run("tune", "--device", "cpu", "--forget").err


def test_a_model_is_measured_by_its_own_matrices_and_its_text_stays(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where every class of kernels is launched otherwise than by default."""
    with LLM() as llm:
        wanted = llm.generate("def fib(n):", max_tokens=12, temp=0).text
        works = largest_of_each_class(works_of(llm.engine.model))
        model = str(llm.engine.model.file.path)
    monkeypatch.setattr(launch_choice, "choose", last_wins)
    monkeypatch.setattr("vkmoe.cli.cache.tune.SECONDS", 600.0)
    done = run("tune", model)
    assert done.code == 0 and done.out.count("->") == len(works), done.err
    info = run("info", model)
    assert f"{len(works)} of {len(works)} measured kernels run otherwise" in info.out
    assert info.out.count("->") == len(works)
    assert "tuning  " not in run("info", model, "--tuning", "table").out
    sources: dict[TuningSource, int] = {"remembered": len(works), "table": 0}
    for source, n_launches in sources.items():
        with LLM(tuning=source) as llm:
            assert len(llm.engine.tuning.launches) == n_launches
            assert llm.generate("def fib(n):", max_tokens=12, temp=0).text == wanted


def test_what_is_left_for_want_of_time_is_done_the_next_time(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vkmoe.cli.cache.tune.SECONDS", -1.0)
    done = run("tune")
    assert done.code == 0 and not done.out and "2 of 2 are left" in done.err
    monkeypatch.setattr("vkmoe.cli.cache.tune.SECONDS", 600.0)
    assert "are left" not in run("tune").err


def test_a_damaged_file_is_noted_and_replaced(run: Run, path: Path) -> None:
    path.parent.mkdir()
    path.write_text("{")
    info = run("info")
    assert (
        info.code == 0 and f"tuning        by default: the tuning in {path} is not used" in info.out
    )
    done = run("tune")
    assert done.code == 0 and "it is damaged" in done.err
    assert recall(choose_device(list_devices(), None)).measured


def test_a_cache_that_cannot_be_written_is_one_line(run: Run, path: Path) -> None:
    path.parent.write_text("a file where a folder should be")
    done = run("tune")
    assert done.code == 1 and "could not be written" in done.err and "XDG_CACHE_HOME" in done.err
    assert "Traceback" not in done.err


def test_what_computes_wrongly_is_an_error_and_never_remembered(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = launch_choice._Tuner._is_right

    def wrong_sums(self: Any, kernel: Any, launch: Launch, thorough: bool = False) -> bool:
        return kernel.family != "matvec" and right(self, kernel, launch, thorough)

    monkeypatch.setattr(launch_choice._Tuner, "_is_right", wrong_sums)
    done = run("tune")
    assert done.code == 1 and "1 of 2 kernels compute wrongly" in done.err
    assert "matvec_residual" in done.out and '"matvec"' not in path.read_text()


@pytest.mark.parametrize(
    ("tiles", "text"),
    [
        (MeasuredTiles("f16", "f16", 0.0), "f16, as by default"),
        (
            MeasuredTiles("matrix", "matrix", 0.0),
            "f16 on matrix units, as by default; attention of prompts runs there too",
        ),
        (
            MeasuredTiles("matrix", "f16", 0.2),
            "f16 in place of f16 on matrix units: it takes 20% less time; attention of prompts "
            "leaves them too",
        ),
        (MeasuredTiles("f16", "f32", 0.0), "f32 in place of f16: that computes wrongly here"),
    ],
)
def test_what_tiles_multiply_and_where_attention_runs(tiles: MeasuredTiles, text: str) -> None:
    assert tiles_line(tiles) == f"tiles of prompts multiply {text}"
