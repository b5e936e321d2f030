"""Reads and formats the profile of `--expert-profile`: decayed uses of experts, kept between runs.

Owns the file's format, a JSON document, and the fingerprint that ties it to a model. Does not
decide what the counts are used for, nor write the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from vkmoe.errors import VkmoeError
from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import TensorInfo
from vkmoe.gguf_file.header import shown

__all__ = ["ProfiledModel", "load_profile", "profile_text", "profiled_model"]

FORMAT, VERSION = "vkmoe expert profile", 1
MAX_COUNT = 1e15  # more tokens than any run sees; keeps sums and weighted counts finite
_BYTES_PER_COUNT, _BYTES_BESIDE = 64, 1 << 16  # what a sound file needs at most
_WORDS = {
    "n_moe_layers": "number of MoE layers",
    "n_experts": "number of experts",
    "n_used": "number of experts per token",
}
_REMEDY = (
    "give another --expert-profile, or remove the file: a new one is written at the end of the run"
)
_OWN_FILE = "give each model a profile of its own: another --expert-profile"


@dataclass(frozen=True)
class ProfiledModel:
    """Holds what a profile must agree with; the file has the fields under these names."""

    architecture: str
    name: str
    n_moe_layers: int
    n_experts: int
    n_used: int
    expert_types: str  # of the weights, for people: the fingerprint decides
    fingerprint: str


def profiled_model(
    spec: ModelSpec, n_moe_layers: int, tensors: Sequence[TensorInfo]
) -> ProfiledModel:
    """Describe the model with experts whose expert tensors are `tensors`.

    The fingerprint is a sha256 of what the model is and of those tensors' names, shapes and types.
    """
    assert spec.experts is not None
    parts = sorted([tensor.name, list(tensor.shape), tensor.type] for tensor in tensors)
    experts = asdict(spec.experts)
    del experts["activation"]  # the architecture fixes it
    mixer = spec.layers[0].mixer
    heads = [mixer.n_heads, mixer.n_kv_heads, mixer.query_dim]
    sizes = [spec.n_layers, spec.width, spec.n_vocab, *heads]
    text = json.dumps([spec.architecture, spec.name, sizes, experts, parts], sort_keys=True)
    return ProfiledModel(
        spec.architecture,
        spec.name,
        n_moe_layers,
        spec.experts.n_experts,
        spec.experts.n_used,
        ", ".join(sorted({tensor.type for tensor in tensors})),
        hashlib.sha256(text.encode()).hexdigest(),
    )


def profile_text(model: ProfiledModel, counts: NDArray[np.float64]) -> str:
    """Return the file of the decayed counts [n_keys]."""
    rows = np.minimum(counts, MAX_COUNT).reshape(model.n_moe_layers, model.n_experts).tolist()
    document = {"format": FORMAT, "version": VERSION, "model": asdict(model), "counts": rows}
    return json.dumps(document, allow_nan=False) + "\n"


def load_profile(path: Path, model: ProfiledModel) -> NDArray[np.float64] | None:
    """Return the decayed counts [n_keys] of an earlier run; None if there is no such file.

    Raises VkmoeError for a file that cannot be read, is damaged or belongs to another model.
    """
    limit = _BYTES_BESIDE + _BYTES_PER_COUNT * model.n_moe_layers * model.n_experts
    try:
        with open(path, "rb") as stream:
            data = stream.read(limit + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        reason = error.strerror or error
        raise VkmoeError(f"the expert profile {path} cannot be read: {reason}", _REMEDY) from error
    if len(data) > limit:
        _refuse(path, f"is larger than the {limit} bytes a profile of this model can have")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        _refuse(path, "is not an expert profile, or damaged")
    if document.get("version") != VERSION:
        found = shown(str(document.get("version")))
        _refuse(path, f"has format version {found}, this vkmoe reads {VERSION}")
    _check_model(path, document.get("model"), model)
    return _counts(path, document.get("counts"), (model.n_moe_layers, model.n_experts))


def _check_model(path: Path, found: Any, model: ProfiledModel) -> None:
    """Refuse the profile of another model, naming the first thing that differs."""
    if not isinstance(found, dict):
        _refuse(path, "does not say which model it belongs to")
    for name, ours in asdict(model).items():
        if found.get(name) == ours:
            continue
        words = "the fingerprint of sizes and tensors differs"
        if name != "fingerprint":
            theirs, what = found.get(name), _WORDS.get(name, name.replace("_", " "))
            words = f"its {what} is {shown(str(theirs))}, this model's {shown(str(ours))}"
        _refuse(path, f"belongs to another model: {words}", _OWN_FILE)


def _counts(path: Path, rows: Any, shape: tuple[int, int]) -> NDArray[np.float64]:
    """Return the counts, if they are numbers from 0 to MAX_COUNT in the right shape."""
    try:
        counts = np.array(rows, np.float64)
    except (TypeError, ValueError, OverflowError):
        counts = np.empty(0)
    if counts.shape != shape or not ((counts >= 0) & (counts <= MAX_COUNT)).all():
        _refuse(path, f"is damaged: it needs {shape[0]} layers of {shape[1]} counts from 0")
    return counts.reshape(-1)


def _refuse(path: Path, message: str, remedy: str = _REMEDY) -> NoReturn:
    raise VkmoeError(f"the expert profile {path} {message}", remedy)
