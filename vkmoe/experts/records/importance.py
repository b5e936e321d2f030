"""This module reads how often experts were used from an importance file of llama.cpp.

`llama-imatrix` runs a text through a model and writes a GGUF file (`general.type` is "imatrix"):
for the experts of a layer it has a tensor NAME.counts with the tokens that each expert got. Such
files are published beside many models. They are read, and never written.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vkmoe.errors import ModelFileError, VkmoeError
from vkmoe.gguf_file import GgufFile, open_gguf

_COUNTS = re.compile(r"blk\.(\d+)\.ffn_(?:down|gate|up|gate_up)_exps\.weight\.counts")
# A long text counts as the tokens that a run remembers at a half-life of 64: what the
# run itself uses soon counts for more.
_REMEMBERED_TOKENS = 1 / (1 - 0.5 ** (1 / 64))
_HINT = "give the file that llama-imatrix wrote for this model, or a profile of vkmoe's own"


def is_importance_file(path: Path) -> bool:
    """Say whether a file is one of these. False also for one that cannot be read."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                return False
        with open_gguf(path) as file:
            return file.get("general.type", str, "") == "imatrix"
    except (OSError, VkmoeError):
        return False


def read_importance(path: Path, n_layers: int, n_experts: int, n_used: int) -> NDArray[np.float64]:
    """Return the uses of each expert of a model with `n_layers` MoE layers: [n_layers * n_experts].

    They are as many as a run remembers. Raises VkmoeError for a file of another model, and
    ModelFileError for a damaged one.
    """
    with open_gguf(path) as file:
        found = _by_layer(file)
        if len(found) != n_layers:
            raise VkmoeError(
                f"the importance file {path} has counts of {len(found)} layers with experts, this "
                f"model has {n_layers}",
                _HINT,
            )
        rows = [_row(file, name, n_experts) for _, name in sorted(found.items())]
    return remembered(np.array(rows), n_used)


def remembered(counts: NDArray[np.float64], n_used: int) -> NDArray[np.float64]:
    """Scale the uses of a long text [n_layers, n_experts] to what a run remembers: [n_keys].

    Each layer's sum is that of the tokens it remembers, which use `n_used` experts each.
    """
    sums = counts.sum(axis=1, keepdims=True)
    shares: NDArray[np.float64] = counts / np.where(sums > 0, sums, 1.0)
    return n_used * _REMEMBERED_TOKENS * shares.reshape(-1)


def _by_layer(file: GgufFile) -> dict[int, str]:
    """Return a tensor with counts for each layer that has one: all parts of an expert agree."""
    matches = ((_COUNTS.fullmatch(name), name) for name in file.tensors)
    return {int(match[1]): name for match, name in matches if match is not None}


def _row(file: GgufFile, name: str, n_experts: int) -> NDArray[np.float64]:
    """Return the counts of one layer, checked: [n_experts]."""
    tensor = file.tensors[name]
    if tensor.type != "F32" or tensor.n_weights != n_experts:
        raise VkmoeError(
            f"the importance file {file.path} has {tensor.n_weights} counts of type {tensor.type} "
            f"in {name}, this model has {n_experts} experts",
            _HINT,
        )
    counts = file.data(name).view("<f4").astype(np.float64)
    if not (np.isfinite(counts) & (counts >= 0)).all():
        raise ModelFileError(f"{file.path}: {name} has counts below 0 or none", "it is damaged")
    return counts
