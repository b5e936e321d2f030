"""Finds the tensors of a file by their names and checks them; what nothing asked for is refused.

Does not know which tensors a model consists of.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from vkmoe.errors import ModelFileError, UnsupportedModelError
from vkmoe.gguf_file import GgufFile, TensorInfo
from vkmoe.gguf_file.header import shown
from vkmoe.models.trunk_tensors import FileMatrix, FileVector
from vkmoe.quants import HAS_KERNEL, TYPES
from vkmoe.quants.layouts import HAS_ROW_SCALE

VECTOR_TYPES = frozenset({"F32", "F16", "BF16"})  # a file's types of what is used as float32
_HINT = "the file was converted wrongly, is damaged, or needs a newer vkmoe"
# What converters put into one tensor where they are asked to.
_FUSED = {"attn_q": "attn_qkv"}


class TensorFinder:
    """Finds tensors by name and checks them. Call `finish` when all that are known were asked for.

    Raises ModelFileError for a tensor that is missing or of another shape.
    """

    def __init__(self, file: GgufFile) -> None:
        self.path, self._tensors = file.path, file.tensors
        self._used: set[str] = set()
        self._prefix = ""

    def within(self, prefix: str) -> TensorFinder:
        """Make a finder that puts `prefix` before each name; what it finds counts as used here."""
        inner = copy(self)
        inner._prefix = prefix
        return inner

    def has(self, name: str) -> bool:
        return self._prefix + name in self._tensors

    def ignore(self, name: str) -> None:
        """Count a tensor that changes nothing as used, if it is there."""
        self._used.add(self._prefix + name)

    def ignore_layer(self, index: int) -> None:
        """Count all tensors of a layer that is not run as used."""
        prefix = f"blk.{index}."
        self._used |= {name for name in self._tensors if name.startswith(prefix)}

    def matrix(self, name: str, *shape: int) -> FileMatrix:
        """Find weights [..., rows, columns]. Raises UnsupportedModelError if they cannot be run."""
        tensor = self._find(name, shape)
        name = tensor.name
        if tensor.type not in HAS_KERNEL:
            number = TYPES[tensor.type].ggml_id
            raise UnsupportedModelError(
                f"{self.path}: {name} is of type {tensor.type} ({number}), which is not for "
                "weights",
                f"requantise the model; vkmoe runs {', '.join(sorted(HAS_KERNEL))}",
            )
        if shape[-1] % 32:
            raise UnsupportedModelError(
                f"{self.path}: {name} has rows of {shape[-1]} weights, not a multiple of 32",
                "vkmoe cannot run this model",
            )
        return FileMatrix(tensor, scale_tensor=self._scale(tensor))

    def _scale(self, tensor: TensorInfo) -> TensorInfo | None:
        """Find what the weights of a matrix, or of each expert's, are multiplied by (NVFP4).

        The scale of inputs is of use where vectors are rounded to that type too: not here.
        """
        if tensor.type not in HAS_ROW_SCALE:
            return None
        name = tensor.name.removeprefix(self._prefix).removesuffix(".weight")
        self.ignore(f"{name}.input_scale")
        n = tensor.shape[0] if name.endswith("_exps") else 1
        return self._find(f"{name}.scale", (n,)) if self.has(f"{name}.scale") else None

    def alike(self, names: Sequence[str], *shape: int) -> list[FileMatrix]:
        """Find matrices of one shape, which must have one type."""
        found = [self.matrix(name, *shape) for name in names]
        tensors = [matrix.tensor for matrix in found]
        other = next((tensor for tensor in tensors if tensor.type != tensors[0].type), None)
        if other is not None:
            raise UnsupportedModelError(
                f"{self.path}: {other.name} is of type {other.type}, "
                f"{tensors[0].name} of type {tensors[0].type}",
                "vkmoe needs one type for all experts of a layer; convert the model again",
            )
        return found

    def vector(self, name: str, *shape: int) -> FileVector:
        """Find gains or biases, which are used as float32."""
        tensor = self._find(name, shape)
        if tensor.type not in VECTOR_TYPES:
            message = f"{self.path}: {tensor.name} is of type {tensor.type}"
            raise UnsupportedModelError(message, _HINT)
        return FileVector((tensor,))

    def finish(self, prefix: str = "") -> None:
        """Raise UnsupportedModelError for tensors that were not asked for, of those so named."""
        unknown = sorted(name for name in self._tensors if name.startswith(prefix))
        unknown = [name for name in unknown if name not in self._used]
        if unknown:
            names = ", ".join(shown(name) for name in unknown[:3]) + (
                f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            )
            raise UnsupportedModelError(
                f"{self.path}: tensors vkmoe does not know: {names}",
                "leaving them out could change the answer; update vkmoe",
            )

    def _find(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        """Find a tensor. A vector and a matrix of one row are the same to files."""
        name = self._prefix + name
        tensor = self._tensors.get(name)
        if tensor is None:
            self._refuse_fused(name)
            raise ModelFileError(f"{self.path}: tensor {name} is missing", _HINT)
        if _without_leading_ones(tensor.shape) != _without_leading_ones(shape):
            raise ModelFileError(
                f"{self.path}: {name} has shape {list(tensor.shape)}, expected {list(shape)}",
                _HINT,
            )
        self._used.add(name)
        return tensor._replace(shape=shape)

    def _refuse_fused(self, name: str) -> None:
        """Say so where a tensor is not missing but a part of another."""
        prefix, _, rest = name.rpartition(".weight")[0].rpartition(".")
        fused = f"{prefix}.{_FUSED.get(rest, rest)}.weight"
        if rest in _FUSED and fused in self._tensors:
            raise UnsupportedModelError(
                f"{self.path}: {name} is a part of {fused}, which vkmoe does not take apart",
                "convert the model again without fusing tensors",
            )


def _without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    n_ones = next((index for index, size in enumerate(shape) if size != 1), len(shape))
    return shape[n_ones:]
