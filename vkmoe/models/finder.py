"""Finds tensors of a file by name, checks them, and knows which ones nobody asked for."""

from __future__ import annotations

from collections.abc import Sequence

from vkmoe.errors import ModelFileError, UnsupportedModelError
from vkmoe.gguf_file import GgufFile, TensorInfo
from vkmoe.gguf_file.header import shown
from vkmoe.quants import HAS_KERNEL, TYPES, can_load

__all__ = ["Finder"]

VECTOR_TYPES = frozenset({"F32", "F16", "BF16"})
_HINT = "the file was converted wrongly, is damaged, or needs a newer vkmoe"
# What converters put into one tensor where they are asked to.
_FUSED = {"attn_q": "attn_qkv", "ffn_gate_exps": "ffn_gate_up_exps"}


class Finder:
    """The tensors of one file. Call `finish` when all that are known were asked for.

    Raises ModelFileError for a tensor that is missing or of another shape.
    """

    def __init__(self, file: GgufFile) -> None:
        self._path, self._tensors = file.path, file.tensors
        self._used: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def ignore(self, name: str) -> None:
        """A tensor that changes nothing, if it is there."""
        self._used.add(name)

    def ignore_layer(self, index: int) -> None:
        """A layer that is not run."""
        prefix = f"blk.{index}."
        self._used |= {name for name in self._tensors if name.startswith(prefix)}

    def matrix(self, name: str, *shape: int) -> TensorInfo:
        """Weights [..., rows, columns]. Raises UnsupportedModelError if they cannot be run."""
        tensor = self._find(name, shape)
        if not can_load(tensor.type):
            converted = sorted(kind for kind in TYPES if can_load(kind) and kind not in HAS_KERNEL)
            raise UnsupportedModelError(
                f"{self._path}: {name} is of type {tensor.type}, which vkmoe cannot run",
                f"requantise the model; vkmoe runs {', '.join(sorted(HAS_KERNEL))}, and converts "
                f"{', '.join(converted)}",
            )
        if shape[-1] % 32:
            raise UnsupportedModelError(
                f"{self._path}: {name} has rows of {shape[-1]} weights, not a multiple of 32",
                "vkmoe cannot run this model",
            )
        return tensor

    def alike(self, names: Sequence[str], *shape: int) -> tuple[TensorInfo, ...]:
        """Matrices of one shape and type."""
        tensors = tuple(self.matrix(name, *shape) for name in names)
        other = next((tensor for tensor in tensors if tensor.type != tensors[0].type), None)
        if other is not None:
            raise UnsupportedModelError(
                f"{self._path}: {other.name} is of type {other.type}, "
                f"{tensors[0].name} of type {tensors[0].type}",
                "vkmoe needs one type for all experts of a layer; convert the model again",
            )
        return tensors

    def row(self, name: str, width: int) -> TensorInfo:
        """A matrix of one row, which files also hold as a vector."""
        tensor = self._tensors.get(name)
        if tensor is not None and len(tensor.shape) == 1:
            return self.matrix(name, width)
        return self.matrix(name, 1, width)

    def vector(self, name: str, *shape: int) -> TensorInfo:
        """Gains or biases, which are used as float32."""
        tensor = self._find(name, shape)
        if tensor.type not in VECTOR_TYPES:
            raise UnsupportedModelError(f"{self._path}: {name} is of type {tensor.type}", _HINT)
        return tensor

    def finish(self) -> None:
        """Raises UnsupportedModelError for tensors that were not asked for."""
        unknown = sorted(set(self._tensors) - self._used)
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
            self._refuse_fused(name)
            raise ModelFileError(f"{self._path}: tensor {name} is missing", _HINT)
        if tuple(tensor.shape) != shape:
            raise ModelFileError(
                f"{self._path}: {name} has shape {list(tensor.shape)}, expected {list(shape)}",
                _HINT,
            )
        self._used.add(name)
        return tensor

    def _refuse_fused(self, name: str) -> None:
        """Say so where a tensor is not missing but a part of another."""
        prefix, _, rest = name.rpartition(".weight")[0].rpartition(".")
        fused = f"{prefix}.{_FUSED.get(rest, rest)}.weight"
        if rest in _FUSED and fused in self._tensors:
            raise UnsupportedModelError(
                f"{self._path}: {name} is a part of {fused}, which vkmoe does not take apart",
                "convert the model again without fusing tensors",
            )
