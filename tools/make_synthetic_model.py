"""Write a GGUF model of real shape with random weights, for benchmarks and memory tests.

    python -m tools.make_synthetic_model olmoe-1b-7b --layers 4 --out olmoe-4.gguf
    python -m tools.make_synthetic_model qwen3-30b-a3b --types q8_0 --out big.gguf
    python -m tools.make_synthetic_model gpt-oss-20b --types mxfp4 --out gpt-oss.gguf
    python -m tools.make_synthetic_model mixtral-8x7b --sparse --out mixtral.gguf   # for plans

Every preset is written in the architecture of the model it takes its shape from.  Matrices have
mean 0 and variance 1 / columns, so that activations stay near 1; one tensor is in memory at a time.
The vocabulary tokenizes any text.  The same arguments give the same bytes.  The last line that is
printed is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tools.gguf_writer import write_gguf
from tools.quantise import random_weights
from tools.synthetic.metadata import model_metadata
from tools.synthetic.mixes import MIXES
from tools.synthetic.presets import PRESETS, Preset
from tools.synthetic.tensors import tensor_list
from vkmoe.gguf_file.header import TensorInfo

__all__ = ["MIXES", "PRESETS", "Preset", "make", "model_metadata", "random_tensor",
           "tensor_list", "write_shape"]  # fmt: skip

ROUTER_GAIN = 2.0  # router logits spread this far: clear favourites, different for every token
BIAS_GAIN = 0.1


def random_tensor(tensor: TensorInfo, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Gains near 1, decays, small biases, clear favourites; variance 1 / columns in matrices."""
    columns = tensor.shape[-1]
    if tensor.name.endswith(".bias"):
        values = BIAS_GAIN * rng.standard_normal(tensor.shape, np.float32)
        return values.reshape(-1).view(np.uint8)
    if len(tensor.shape) == 1:
        gains = 1 + 0.1 * rng.standard_normal(columns, np.float32)
        sign = -1 if tensor.name.endswith(".ssm_a") else 1  # of the logarithm of a decay
        return (sign * gains).astype(np.float32).view(np.uint8)
    gain = ROUTER_GAIN if "ffn_gate_inp" in tensor.name else 1.0
    n_rows = tensor.n_weights // columns
    return random_weights(tensor.type, n_rows, columns, rng, gain / columns**0.5)


def make(
    name: str, out: Path, n_layers: int | None, mix: str, seed: int = 0, sparse: bool = False
) -> None:
    """Write preset `name` with `n_layers` layers (default: all) to `out`; see `write_shape`."""
    shape = PRESETS[name]
    if n_layers is not None:
        shape = replace(shape, n_layers=n_layers)
    write_shape(name, shape, out, mix, seed, sparse)


def write_shape(
    name: str, shape: Preset, out: Path, mix: str, seed: int = 0, sparse: bool = False
) -> None:
    """Write a model of any shape to `out`.

    A `sparse` file has the size of a whole one but no weights: it is for plans, which read none.
    """
    tensors = tensor_list(shape, mix)
    n_bytes = sum(tensor.n_bytes for tensor in tensors)
    out.parent.mkdir(parents=True, exist_ok=True)
    metadata, rng = model_metadata(name, shape, mix), np.random.default_rng(seed)
    if not sparse and n_bytes > (free := shutil.disk_usage(out.parent).free):
        raise SystemExit(f"{out}: needs {n_bytes / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB")
    data = None if sparse else lambda tensor: random_tensor(tensor, rng)
    write_gguf(out, metadata, tensors, data)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("preset", choices=sorted(PRESETS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, help="number of layers (default: the model's own)")
    parser.add_argument("--types", default="q4_k_m", choices=sorted(MIXES), help="default: q4_k_m")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--sparse", action="store_true", help="no weights: a file of full size that takes no disk"
    )
    options = parser.parse_args()
    if options.layers is not None and options.layers < 1:
        parser.error("--layers must be at least 1")
    make(options.preset, options.out, options.layers, options.types, options.seed, options.sparse)
    n_bytes, shape = options.out.stat().st_size, PRESETS[options.preset]
    print(f"{options.out}: {n_bytes / 1e6:.1f} MB")
    made = {"model": f"synthetic {options.preset}, {options.types}", "file_bytes": n_bytes}
    n_layers = options.layers or shape.n_layers
    print(json.dumps(made | {"n_layers": n_layers, "n_experts": shape.n_experts}))


if __name__ == "__main__":
    main()
