"""docs/models.md names every architecture, type and pre-tokenizer, and tests that are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from tests.engine.test_dispatches import LAYERS
from tests.engine.tiny import NAMES, architecture
from tools.tiny_models import MODELS, TinyModel
from vkmoe.generate.text.byte_level import PRE_TOKENIZERS
from vkmoe.models import ARCHITECTURES
from vkmoe.quants import HAS_KERNEL, TYPES

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "docs" / "models.md").read_text()
TESTS = sorted(set(re.findall(r"`(tests/[\w/.]+)((?:::\w+)?)`", TEXT)))


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its first two lines."""
    section = re.split(rf"^#+ {heading}$", TEXT, flags=re.MULTILINE)[1].split("\n#")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    assert lines, f"no table below {heading}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def codes(cell: str) -> list[str]:
    """What a cell has in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def first_codes(heading: str) -> list[str]:
    return list(chain.from_iterable(codes(row[0]) for row in rows(heading)))


def test_every_architecture_has_a_row_and_no_other() -> None:
    assert sorted(first_codes("Architectures")) == sorted(ARCHITECTURES)


def test_dispatches_are_those_of_the_printed_programs() -> None:
    found = {codes(row[0])[0]: row[3] for row in rows("Architectures")}
    counts = {name: sorted({len(layer) for layer in layers}) for name, layers in LAYERS.items()}
    assert found == {name: ", ".join(map(str, numbers)) for name, numbers in counts.items()}


def test_types_and_tokenizers_of_architectures_are_those_of_the_other_tables() -> None:
    known = set(first_codes("Types"))
    for row in rows("Architectures"):
        assert set(row[4].split(", ")) <= known, row[0]
        assert set(codes(row[5])) <= set(PRE_TOKENIZERS) and row[5], row[0]


def test_every_mark_stands_for_a_test() -> None:
    marks = set(re.findall(r"^- \*\*(\w)\*\* `tests/", TEXT, re.MULTILINE))
    used = {mark for row in rows("Architectures") for mark in row[-1].split(", ")}
    assert used == marks


@pytest.mark.parametrize("path", sorted({path for path, _ in TESTS}))
def test_named_files_and_tests_are_there(path: str) -> None:
    file = ROOT / path
    assert file.exists()
    names = {test.removeprefix("::") for where, test in TESTS if where == path and test}
    if names:
        tree = ast.parse(file.read_text())
        assert names <= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def odd(model: TinyModel) -> Iterator[str]:
    """What a tiny model has that simpler ones have not."""
    if model.heads * model.head_dim != model.hidden:
        yield "wide heads"
    if model.kv_heads == 1 < model.heads:
        yield "one KV head"
    if model.experts & (model.experts - 1):
        yield f"{model.experts} experts"
    if model.experts and model.top_k in (1, model.experts):
        yield "top 1" if model.top_k == 1 else "all experts used"
    if "rope_type" in model.rope:
        yield model.rope["rope_type"]
    window = getattr(model, "window", 0)
    if 0 < window < model.n_tokens:
        yield f"window of {window} for {model.n_tokens} tokens"
    if getattr(model, "n_groups", 1) > 1:
        yield f"{vars(model)['n_groups_used']} of {vars(model)['n_groups']} groups"
    if model.tied:
        yield "tied embeddings"


def test_tiny_models_are_described_as_they_are() -> None:
    """What follows a semicolon is words; each architecture has two odd ones at least."""
    found = {
        codes(row[0])[0]: (codes(row[1])[0], row[2].split("; ")[0]) for row in rows("Tiny models")
    }
    assert found == {model.name: (model.architecture, ", ".join(odd(model))) for model in MODELS}
    assert sorted(found) == NAMES
    assert all(architecture(name) == kind for name, (kind, _) in found.items())
    for kind in ARCHITECTURES:
        assert (
            sum(len(list(odd(model))) >= 1 for model in MODELS if model.architecture == kind) >= 2
        )


def test_types_are_those_with_kernels() -> None:
    assert sorted(first_codes("Types")) == sorted(HAS_KERNEL)
    refused = [name for name in TYPES if name not in HAS_KERNEL]
    line = next(line for line in TEXT.splitlines() if line.startswith("- types: "))
    assert sorted(codes(line)) == sorted(refused)


def test_pre_tokenizers_stand_beside_those_that_cut_alike() -> None:
    found = {codes(row[0])[0]: {*codes(row[0]), *codes(row[1])} for row in rows("Pre-tokenizers")}
    kinds: dict[str, set[str]] = {}
    for name, spec in PRE_TOKENIZERS.items():
        kinds.setdefault(spec.name, set()).add(name)
    assert found == kinds
