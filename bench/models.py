"""The models benchmarks run: synthetic ones made once into a cache folder, or the user's own.

Owns the cache and the count of bytes a token reads. Does not run anything.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tools.gguf_writer import write_gguf
from tools.make_synthetic_model import (
    MIXES,
    PRESETS,
    ModelShape,
    make,
    model_metadata,
    random_tensor,
    tensor_list,
)
from vkmoe.gguf_file import open_gguf
from vkmoe.models import read_spec
from vkmoe.models.tensors import read_tensors
from vkmoe.placement.sizes import weight_bytes
from vkmoe.quants import device_row_bytes

__all__ = [
    "TokenBytes",
    "add_model_options",
    "chosen_model",
    "custom_model",
    "default_cache",
    "shape_of",
    "token_bytes",
]

DEFAULT_PRESET, DEFAULT_LAYERS, DEFAULT_TYPES = "olmoe-1b-7b", 4, "q4_k_m"
SEED = 0


class TokenBytes(NamedTuple):
    """Bytes of weights one decoded token reads, in device layout."""

    trunk: int  # attention, router, gains, output head, one row of the embeddings
    experts: int  # the routed experts it uses

    @property
    def total(self) -> int:
        return self.trunk + self.experts


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options that choose a model; `chosen_model` reads them."""
    parser.add_argument("--model", type=Path, help="a GGUF file instead of a synthetic model")
    parser.add_argument("--preset", default=DEFAULT_PRESET, choices=sorted(PRESETS))
    parser.add_argument("--layers", type=int, default=DEFAULT_LAYERS)
    parser.add_argument("--types", default=DEFAULT_TYPES, choices=sorted(MIXES))
    parser.add_argument(
        "--cache",
        type=Path,
        default=default_cache(),
        help="where synthetic models are kept (default: a folder of yours in the temporary folder)",
    )


def chosen_model(options: argparse.Namespace) -> Path:
    """The user's model, or the synthetic one, made if it is not in the cache yet."""
    if options.model is not None:
        return Path(options.model)
    architecture = PRESETS[options.preset].architecture
    name = f"{options.preset}-{architecture}-{options.layers}-{options.types}"
    target = Path(options.cache) / f"{name}.gguf"
    if not target.exists():
        print(f"making the synthetic model {name} (once) ...", flush=True)
        partial = _partial(target)
        make(options.preset, partial, options.layers, options.types, SEED)
        partial.replace(target)
    return target


def custom_model(name: str, shape: ModelShape, mix: str, cache: Path) -> Path:
    """A synthetic model of any shape, made if it is not in the cache yet."""
    target = cache / f"{name}.gguf"
    if not target.exists():
        partial = _partial(target)
        rng = np.random.default_rng(SEED)
        metadata = model_metadata(name, shape, mix)
        write_gguf(partial, metadata, tensor_list(shape, mix), lambda t: random_tensor(t, rng))
        partial.replace(target)
    return target


def shape_of(preset: str, **changes: Any) -> ModelShape:
    """A preset with some numbers changed."""
    return replace(PRESETS[preset], **changes)


def token_bytes(path: Path) -> TokenBytes:
    """trunk - embeddings + one row + experts * used / all, from the file's own tensors."""
    with open_gguf(path) as file:
        spec = read_spec(file)
        tensors = read_tensors(file, spec)
        sizes = weight_bytes(tensors)
        embeddings = tensors.embeddings
        row_bytes = device_row_bytes(embeddings.type, spec.width)
        tied = tensors.output is embeddings
        trunk = sizes.trunk + row_bytes - (0 if tied else spec.n_vocab * row_bytes)
        used = sizes.experts * spec.experts.n_used // spec.experts.n_experts if spec.experts else 0
        return TokenBytes(trunk, used)


def default_cache() -> Path:
    """Where synthetic models are kept unless the user says otherwise."""
    user = os.getuid() if hasattr(os, "getuid") else ""
    return Path(tempfile.gettempdir()) / f"vkmoe-bench-{user}"


def _partial(target: Path) -> Path:
    """A name beside the target that no other process uses: a model appears whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return target.with_name(f"{target.name}.{os.getpid()}.partial")
