"""What a user is told of types that loading converts, before it begins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engine.other_types import UNEVEN, of_types
from tests.engine.tiny import model_path, rewrite

from .conftest import Run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    target: Path = tmp_path_factory.mktemp("types") / "m.gguf"
    return str(rewrite(model_path("moe_plain"), target, of_types(UNEVEN)))


def test_info_lists_each_type_and_its_bytes(run: Run, model: str) -> None:
    """Experts apart; and what it takes is in the plan."""
    done = run("info", model)
    assert done.code == 0, done.err
    lines = [line for line in done.out.splitlines() if line.startswith("converted ")]
    assert len(lines) == 6
    seen = re.compile(
        r"converted     2 tensors( of experts)? from [QF]\S+ to Q8_0, [\d.]+ -> [\d.]+ MiB"
    )
    assert sum(bool(seen.fullmatch(line)) for line in lines) == 5, lines
    assert sum(line.startswith("converted     1 tensor from Q5_0 to Q8_0, ") for line in lines) == 1
    assert "MiB host     converting weights (" in done.out


def test_info_of_other_models_says_nothing_of_it(run: Run) -> None:
    assert "convert" not in run("info").out


@pytest.mark.full
def test_generate_says_it_on_stderr_unless_quiet(run: Run, model: str) -> None:
    asked = ("generate", model, "-p", "a", "--max-tokens", "1", "--ctx-size", "16")
    told = [line for line in run(*asked).err.splitlines() if "convert" in line]
    assert len(told) == 1
    assert re.fullmatch(r"converting 2 tensors of F64 to Q8_0, .* KiB -> .* KiB", told[0])
    assert "convert" not in run(*asked, "--quiet").err
