"""The tiny models of the fixtures, and copies of them with something changed.

Owns how a model file is taken apart and written again. Does not own what its tests expect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from numpy.typing import NDArray

from tools.gguf_writer import raw_type
from tools.quantise import quantise
from vkmoe.gguf_file import open_gguf
from vkmoe.models import ARCHITECTURES, ModelFile, open_model
from vkmoe.quants import TYPES, decode

FOLDER = Path(__file__).resolve().parent.parent / "fixtures" / "models"
DRAFTER_FOLDER = FOLDER.parent / "drafters"
# What the first word of a fixture's name says.
KINDS = {
    "dense": "qwen3",
    "moe": "qwen3moe",
    "olmoe": "olmoe",
    "llama": "llama",
    "mixtral": "llama",
    "qwen2moe": "qwen2moe",
    "gptoss": "gpt-oss",
    "deepseek2": "deepseek2",
    "qwen35moe": "qwen35moe",
    "qwen35": "qwen35",
    "qwen3next": "qwen3next",
    "gemma4": "gemma4",
    "glm4moe": "glm4moe",
    "ernie45moe": "ernie4_5-moe",
    "dots1": "dots1",
    "minimaxm2": "minimax-m2",
    "bailingmoe2": "bailingmoe2",
    "hyv3": "hy_v3",
    "hunyuanmoe": "hunyuan-moe",
    "deepseek32": "deepseek32",
    "glmdsa": "glm-dsa",
    "mistral4": "mistral4",
}


def architecture(name: str) -> str:
    """The architecture of a fixture."""
    return KINDS[name.split("_")[0]]


NAMES = sorted(
    path.stem for path in FOLDER.glob("*.gguf") if architecture(path.stem) in ARCHITECTURES
)
# For tests that take long: of each kind the model with the most that is its own.
ONE_OF_EACH = tuple(
    name
    for name in ("moe_odd", "dense_tied", "olmoe_one_kv_head", "llama_biases", "mixtral_top1",
                 "qwen2moe_top1", "gptoss_odd", "deepseek2_lite", "deepseek2_v3",
                 "qwen35moe_odd", "qwen35_dense", "qwen3next_odd", "glm4moe_odd",
                 "ernie45moe_odd", "dots1_odd", "minimaxm2_odd", "bailingmoe2_odd", "hyv3_odd",
                 "hunyuanmoe_odd", "deepseek32_odd", "glmdsa_odd", "mistral4_odd", "gemma4_odd",
                 "gemma4_dense_inputs")
    if name in NAMES
)  # fmt: skip
RECURRENT = tuple(
    name for name in NAMES if architecture(name) in ("qwen35", "qwen35moe", "qwen3next")
)
WINDOWED = tuple(name for name in NAMES if architecture(name) in ("gpt-oss", "gemma4"))


class Tensor(NamedTuple):
    """A tensor to write: its type by name, row-major shape and bytes."""

    type: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def model_path(name: str) -> Path:
    return FOLDER / f"{name}.gguf"


def drafter_path(name: str) -> Path:
    return DRAFTER_FOLDER / f"{name}.gguf"


def expected(name: str, folder: Path = FOLDER) -> dict[str, NDArray[Any]]:
    """What transformers computed: tokens, logits, router_ids, router_margin."""
    with np.load(folder / f"{name}.npz") as stored:
        return dict(stored)


def lengthened(path: Path, ctx_size: int) -> ModelFile:
    """A model as if it were trained for contexts of at least this many tokens."""
    opened = open_model(path)
    length = max(ctx_size, opened.spec.context_length)
    return replace(opened, spec=replace(opened.spec, context_length=length))


def rewrite(source: Path, target: Path, change: Change, per_part: int = 0) -> Path:
    """Write `source` again as `target` after `change(metadata, tensors)` has had its way.

    Numbers are written in 32 bits, or in 64 where they need them. With `per_part`, in parts of so
    many tensors; returns the first.
    """
    with open_gguf(source) as file:
        metadata: dict[str, Any] = dict(file.metadata)
        tensors = {name: Tensor(info.type, info.shape, file.data(name).copy())
                   for name, info in file.tensors.items()}  # fmt: skip
    change(metadata, tensors)
    architecture = str(metadata.pop("general.architecture", "none"))
    writer = gguf.GGUFWriter(target, architecture, split_max_tensors=per_part)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, tensor in tensors.items():
        byte_shape = (*tensor.shape[:-1], TYPES[tensor.type].row_bytes(tensor.shape[-1]))
        data = tensor.data.reshape(byte_shape)
        writer.add_tensor(name, data, raw_dtype=raw_type(tensor.type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(iter(sorted(target.parent.glob(f"{target.stem}-00001-of-*.gguf"))), target)


def retyped(tensor: Tensor, type_name: str) -> Tensor:
    """A tensor in another type."""
    n_weights = int(np.prod(tensor.shape))
    values = decode(tensor.type, tensor.data, n_weights).reshape(tensor.shape)
    return Tensor(type_name, tensor.shape, quantise(type_name, values).reshape(-1))


def with_metadata(changes: Mapping[str, Any]) -> Change:
    """A change of metadata alone; None removes a key."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for key, value in changes.items():
            if value is None:
                metadata.pop(key)
            else:
                metadata[key] = value

    return change


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int) and value < 0:
        writer.add_int64(key, value)
    elif isinstance(value, int):
        (writer.add_uint32 if 0 <= value < 1 << 32 else writer.add_uint64)(key, value)
    elif isinstance(value, float) and abs(value) > 1e38:
        writer.add_float64(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else value)


def mixed_model(target: Path) -> Path:
    """A tiny model whose layers have other types, so that their experts differ in size."""
    types = (("F16", "Q8_0", "BF16"), ("F32", "F32", "Q8_0"))  # gate, up, down of each layer

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for layer, kinds in enumerate(types):
            for name, kind in zip(("gate", "up", "down"), kinds, strict=True):
                key = f"blk.{layer}.ffn_{name}_exps.weight"
                tensors[key] = retyped(tensors[key], kind)

    return rewrite(model_path("moe_plain"), target, change)
