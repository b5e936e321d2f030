"""The models benchmarks run: synthetic ones made once into a cache folder, or the user's own.

Owns the cache. Does not run anything.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.make_synthetic_model import MIXES, PRESETS, Preset, write_shape

DEFAULT_PRESET, DEFAULT_LAYERS, DEFAULT_TYPES = "olmoe-1b-7b", 4, "q4_k_m"


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
    shape = shape_of(options.preset, n_layers=options.layers)
    name = f"{options.preset}-{shape.architecture}-{options.layers}-{options.types}"
    return custom_model(name, shape, options.types, options.cache)


def custom_model(name: str, shape: Preset, mix: str, cache: Path) -> Path:
    """A synthetic model of any shape, made if it is not in the cache yet."""
    target = cache / f"{name}.gguf"
    if not target.exists():
        print(f"making the synthetic model {name} (once) ...", flush=True)
        # A name that no other process uses: a model appears whole or not at all.
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        write_shape(name, shape, partial, mix)
        partial.replace(target)
    return target


def shape_of(preset: str, **changes: Any) -> Preset:
    """A preset with some numbers changed."""
    return replace(PRESETS[preset], **changes)


def default_cache() -> Path:
    """Where synthetic models are kept unless the user says otherwise."""
    user = os.getuid() if hasattr(os, "getuid") else ""
    return Path(tempfile.gettempdir()) / f"vkmoe-bench-{user}"
