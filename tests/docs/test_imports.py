"""The direction of imports (docs/structure.md), read from the source without running it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "vkmoe"

# Each layer may import from the layers above it and from its own folder, never from its neighbours.
LAYERS = (
    ("batch", "choices", "closing", "errors", "interrupts"),
    ("kv_types", "modes", "option_fields"),
    ("config", "facts"),
    ("quants",),
    ("gguf_file", "gpu"),
    ("cpu",),
    ("devices",),
    ("kernels", "experts"),
    ("models",),
    ("weights",),
    ("placement",),
    ("canary", "catalogue", "execute", "generate"),
    ("engine",),
    ("mode_trial", "view"),
    ("llm", "selftest"),
    ("bench", "server"),
    ("cli",),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
# The folders of experts/, and which others each may import from. Only store/ knows device memory.
EXPERTS = {
    "decide": (),
    "records": ("decide",),
    "store": ("decide", "records"),
    "study": ("decide", "records"),
}


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Absolute names of all that a file imports, at any depth; `from a import b` counts as a.b."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    package = ["vkmoe", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = [*base, *([node.module] if node.module else [])]
            yield from (".".join([*module, alias.name]) for alias in node.names)


def part_of(path: Path) -> str:
    """The first name below `vkmoe`: `vkmoe/gpu/device.py` -> `gpu`, `vkmoe/modes.py` -> `modes`."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


SOURCES = sorted(PACKAGE.rglob("*.py"))
# `vkmoe/__init__.py` and `vkmoe/__main__.py` stand above everything and may import anything.
RANKED = [path for path in SOURCES if path.parent != PACKAGE or not path.stem.startswith("__")]


@pytest.mark.parametrize("path", RANKED, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_upwards(path: Path) -> None:
    """A module imports only from layers above its own."""
    part = part_of(path)
    assert part in RANK, f"{part} has no place in LAYERS of this test"
    others = {name: name.split(".")[1] for name in imports_of(path) if name.startswith("vkmoe.")}
    for name, other in others.items():
        if other not in (part, "__version__"):
            assert RANK[other] < RANK[part], f"{path.name} ({part}) imports {name}"


@pytest.mark.parametrize("part", ["gpu", "cpu"])
def test_only_its_own_part_imports_an_extension(part: str) -> None:
    """Everything else goes through the classes of vkmoe/gpu, which is over Kompute, and of cpu."""
    name = f"vkmoe.{part}._native"
    assert {part_of(path) for path in SOURCES if name in imports_of(path)} == {part}


def test_cli_never_sees_a_kernel() -> None:
    """Commands talk to `LLM` and to lists of devices, not to programs, kernels or ops."""
    forbidden = ("vkmoe.kernels", "vkmoe.gpu.kernels", "vkmoe.gpu.program", "vkmoe.gpu.backend")
    for path in SOURCES:
        if part_of(path) == "cli":
            seen = [name for name in imports_of(path) if name.startswith(forbidden)]
            assert not seen, f"{path.name} imports {seen}"


def test_the_folders_of_experts_import_one_way() -> None:
    """What decides knows nothing of what counts, moves or replays; counting knows no bytes."""
    modules = [path for path in SOURCES if part_of(path) == "experts"]
    folders = {path: path.relative_to(PACKAGE / "experts").parts[0] for path in modules}
    assert set(folders.values()) == {*EXPERTS, "__init__.py"}
    for path, folder in folders.items():
        for name in imports_of(path):
            if name.startswith("vkmoe.experts.") and name != "vkmoe.experts._residency":
                other = name.split(".")[2]
                assert other == folder or other in EXPERTS[folder], f"{path} imports {name}"


def test_policies_never_see_a_buffer() -> None:
    """The pure parts of experts/ import nothing of the GPU layer."""
    for folder in set(EXPERTS) - {"store"}:
        for path in (PACKAGE / "experts" / folder).glob("*.py"):
            assert not [name for name in imports_of(path) if name.startswith("vkmoe.gpu")], path


def test_help_does_not_load_the_gpu() -> None:
    """`vkmoe --help` answers without the extension, so also on a machine without Vulkan."""
    code = "import sys, vkmoe.cli; print('vkmoe.gpu._native' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_parser_sees_every_form_of_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check above would be empty if relative, nested or type-only imports escaped it."""
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "gpu").mkdir()
    module = tmp_path / "gpu" / "x.py"
    module.write_text(
        "import vkmoe.a\nfrom vkmoe import b\nfrom . import c\nfrom .d import e\n"
        "from ..f import g\ndef late():\n    from vkmoe.h import i\n"
    )
    assert list(imports_of(module)) == [
        *("vkmoe.a", "vkmoe.b", "vkmoe.gpu.c", "vkmoe.gpu.d.e", "vkmoe.f.g", "vkmoe.h.i"),
    ]
