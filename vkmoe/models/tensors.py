"""Which tensors of a file a model consists of; every tensor is used or named as ignored.

Names are llama.cpp's. Shapes are NumPy's: [rows, columns], rows being outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vkmoe.errors import ModelFileError, UnsupportedModelError
from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import GgufFile, TensorInfo
from vkmoe.gguf_file.cursor import shown
from vkmoe.quants import HAS_KERNEL

__all__ = ["LayerTensors", "ModelTensors", "read_tensors"]

IGNORED: frozenset[str] = frozenset()  # tensors that are known to do nothing
GAIN_TYPES = frozenset({"F32", "F16", "BF16"})
_HINT = "the file was converted wrongly, is damaged, or needs a newer vkmoe"


@dataclass(frozen=True)
class LayerTensors:
    """One layer's tensors. Routed experts have three dimensions: [n_experts, rows, columns]."""

    attention_gain: TensorInfo
    q: TensorInfo
    k: TensorInfo
    v: TensorInfo
    output: TensorInfo
    q_gain: TensorInfo
    k_gain: TensorInfo
    feed_forward_gain: TensorInfo
    router: TensorInfo | None  # None: a dense layer
    gate: TensorInfo
    up: TensorInfo
    down: TensorInfo


@dataclass(frozen=True)
class ModelTensors:
    """All tensors of a model; `output` is `embeddings` when they are tied."""

    embeddings: TensorInfo
    output_gain: TensorInfo
    output: TensorInfo
    layers: tuple[LayerTensors, ...]


def read_tensors(file: GgufFile, spec: ModelSpec) -> ModelTensors:
    """Find and check every tensor the spec asks for.

    Raises ModelFileError for a missing tensor or a wrong shape, UnsupportedModelError for a type
    without a kernel or a tensor vkmoe does not know.
    """
    finder = _Finder(file.path, file.tensors)
    width = spec.width
    embeddings = finder.matrix("token_embd.weight", spec.n_vocab, width)
    output_gain = finder.gain("output_norm.weight", width)
    output = (
        embeddings if spec.tied_embeddings else finder.matrix("output.weight", spec.n_vocab, width)
    )
    layers = tuple(_layer(finder, spec, f"blk.{i}.") for i in range(spec.n_layers))
    finder.finish()
    return ModelTensors(embeddings, output_gain, output, layers)


def _layer(finder: _Finder, spec: ModelSpec, prefix: str) -> LayerTensors:
    width, q_width = spec.width, spec.attention_width
    kv_width = spec.n_kv_heads * spec.head_dim
    experts = spec.experts
    inner = experts.width if experts else spec.feed_forward_width
    stack = (experts.n_experts,) if experts else ()
    suffix = "_exps" if experts else ""
    return LayerTensors(
        attention_gain=finder.gain(prefix + "attn_norm.weight", width),
        q=finder.matrix(prefix + "attn_q.weight", q_width, width),
        k=finder.matrix(prefix + "attn_k.weight", kv_width, width),
        v=finder.matrix(prefix + "attn_v.weight", kv_width, width),
        output=finder.matrix(prefix + "attn_output.weight", width, q_width),
        q_gain=finder.gain(prefix + "attn_q_norm.weight", spec.head_dim),
        k_gain=finder.gain(prefix + "attn_k_norm.weight", spec.head_dim),
        feed_forward_gain=finder.gain(prefix + "ffn_norm.weight", width),
        router=None
        if experts is None
        else finder.matrix(prefix + "ffn_gate_inp.weight", experts.n_experts, width),
        gate=finder.matrix(f"{prefix}ffn_gate{suffix}.weight", *stack, inner, width),
        up=finder.matrix(f"{prefix}ffn_up{suffix}.weight", *stack, inner, width),
        down=finder.matrix(f"{prefix}ffn_down{suffix}.weight", *stack, width, inner),
    )


class _Finder:
    """Looks tensors up by name and remembers which were asked for."""

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self._path = path
        self._tensors = tensors
        self._used: set[str] = set()

    def matrix(self, name: str, *shape: int) -> TensorInfo:
        tensor = self._find(name, shape)
        if tensor.type not in HAS_KERNEL:
            raise UnsupportedModelError(
                f"{self._path}: {name} is of type {tensor.type}, which vkmoe cannot run yet",
                f"requantise the model; vkmoe runs {', '.join(sorted(HAS_KERNEL))}",
            )
        if shape[-1] % 32:
            raise UnsupportedModelError(
                f"{self._path}: {name} has rows of {shape[-1]} weights, not a multiple of 32",
                "vkmoe cannot run this model",
            )
        return tensor

    def gain(self, name: str, width: int) -> TensorInfo:
        tensor = self._find(name, (width,))
        if tensor.type not in GAIN_TYPES:
            raise UnsupportedModelError(f"{self._path}: {name} is of type {tensor.type}", _HINT)
        return tensor

    def finish(self) -> None:
        unknown = sorted(set(self._tensors) - self._used - IGNORED)
        if unknown:
            names = ", ".join(shown(name) for name in unknown[:3]) + (
                f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            )
            raise UnsupportedModelError(
                f"{self._path}: tensors vkmoe does not know: {names}",
                "leaving them out could change the answer; update vkmoe",
            )

    def _find(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{self._path}: tensor {name} is missing", _HINT)
        if tuple(tensor.shape) != shape:
            raise ModelFileError(
                f"{self._path}: {name} has shape {list(tensor.shape)}, expected {list(shape)}",
                _HINT,
            )
        self._used.add(name)
        return tensor
