"""The specs of the tiny models, and of copies of them with other metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.tiny import model_path, rewrite, with_metadata
from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import open_gguf
from vkmoe.models import read_spec
from vkmoe.models.tensors import read_tensors


def spec_of(path: Path) -> ModelSpec:
    """The spec of a file whose tensors are as it says."""
    with open_gguf(path) as file:
        spec = read_spec(file)
        read_tensors(file, spec)
        return spec


def changed(folder: Path, name: str, **changes: Any) -> ModelSpec:
    """The spec of a tiny model after changes of keys below its architecture; `__` stands for ."""
    with open_gguf(model_path(name)) as file:
        prefix = file.require("general.architecture", str)
    keys = {f"{prefix}.{key.replace('__', '.')}": value for key, value in changes.items()}
    return spec_of(rewrite(model_path(name), folder / "changed.gguf", with_metadata(keys)))
