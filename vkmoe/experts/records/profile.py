"""The expert profile of `--expert-profile`: decayed uses of every expert, kept between runs.

Owns the file's format, a JSON document, and the fingerprint that ties it to a model. Does not
decide what the counts are used for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from vkmoe.errors import VkmoeError
from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.records.writing import write_whole
from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import TensorInfo
from vkmoe.gguf_file.header import shown

__all__ = ["ProfiledModel", "load_profile", "model_fingerprint", "profiled_model", "save_profile"]

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

    @property
    def space(self) -> KeySpace:
        return KeySpace(self.n_moe_layers, self.n_experts)


def model_fingerprint(spec: ModelSpec, tensors: Iterable[TensorInfo]) -> str:
    """Return a sha256 of what the model is and of its expert tensors' names, shapes and types."""
    experts = asdict(spec.experts) if spec.experts else {}
    experts.pop("activation", None)  # the architecture fixes it
    mixer = spec.layers[0].mixer
    heads = [mixer.n_heads, mixer.n_kv_heads, mixer.query_dim]
    sizes = [spec.n_layers, spec.width, spec.n_vocab, *heads]
    parts = sorted([tensor.name, list(tensor.shape), tensor.type] for tensor in tensors)
    text = json.dumps([spec.architecture, spec.name, sizes, experts or None, parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def profiled_model(
    spec: ModelSpec, n_moe_layers: int, tensors: Iterable[TensorInfo]
) -> ProfiledModel:
    """Describe the model with experts whose expert tensors are `tensors`."""
    assert spec.experts is not None
    tensors = list(tensors)
    return ProfiledModel(
        spec.architecture,
        spec.name,
        n_moe_layers,
        spec.experts.n_experts,
        spec.experts.n_used,
        ", ".join(sorted({tensor.type for tensor in tensors})),
        model_fingerprint(spec, tensors),
    )


def save_profile(path: Path, model: ProfiledModel, counts: NDArray[np.float64]) -> None:
    """Write the decayed counts [n_keys]; an older file stays until this one is whole.

    Raises OSError.
    """
    space = model.space
    assert counts.shape == (space.n_keys,), counts.shape
    bounded = np.minimum(counts, MAX_COUNT).reshape(space.n_layers, space.n_experts)
    document = {"format": FORMAT, "version": VERSION, "model": asdict(model)}
    head = json.dumps(document, indent=1)[:-2]  # open again; one line per layer follows
    rows = ",\n  ".join(json.dumps(row, allow_nan=False) for row in bounded.tolist())
    write_whole(path, f'{head},\n "counts": [\n  {rows}\n ]\n}}\n'.encode())


def load_profile(path: Path, model: ProfiledModel) -> NDArray[np.float64] | None:
    """Return the decayed counts [n_keys] of an earlier run; None if there is no such file.

    Raises VkmoeError for a file that cannot be read, is damaged or belongs to another model.
    """
    limit = _BYTES_BESIDE + _BYTES_PER_COUNT * model.space.n_keys
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
    document = _parse(path, data)
    _check_model(path, document, model)
    return _counts(path, document.get("counts"), model.space)


# ----- reading -----


def _parse(path: Path, data: bytes) -> dict[str, Any]:
    """Return the document, if it is of our format and version."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        _refuse(path, "is not an expert profile, or damaged")
    version = document.get("version")
    if version != VERSION or isinstance(version, bool):
        _refuse(path, f"has format version {_in_short(version)}, this vkmoe reads {VERSION}")
    return document


def _check_model(path: Path, document: dict[str, Any], model: ProfiledModel) -> None:
    """Refuse the profile of another model, naming the first thing that differs."""
    found = document.get("model")
    if not isinstance(found, dict):
        _refuse(path, "does not say which model it belongs to")
    for name, ours in asdict(model).items():
        theirs = found.get(name)
        if theirs == ours and type(theirs) is type(ours):
            continue
        if name == "fingerprint":
            _refuse(
                path,
                "belongs to another model: the fingerprint of sizes and tensors differs",
                _OWN_FILE,
            )
        word = _WORDS.get(name, name.replace("_", " "))
        both = f"its {word} is {_in_short(theirs)}, this model's {_in_short(ours)}"
        _refuse(path, f"belongs to another model: {both}", _OWN_FILE)


def _counts(path: Path, rows: Any, space: KeySpace) -> NDArray[np.float64]:
    """Return the counts, if they are numbers from 0 to MAX_COUNT in the right shape."""
    if not isinstance(rows, list) or len(rows) != space.n_layers:
        _refuse(path, f"is damaged: there are not counts for {space.n_layers} layers")
    counts = np.empty((space.n_layers, space.n_experts), np.float64)
    for layer, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != space.n_experts:
            _refuse(path, f"is damaged: layer {layer} has not {space.n_experts} counts")
        for expert, count in enumerate(row):
            if not _is_count(count):
                where = f"expert {expert} of layer {layer}"
                _refuse(path, f"is damaged: the count of {where} is {_in_short(count)}")
            counts[layer, expert] = count
    return counts.reshape(-1)


def _is_count(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value <= MAX_COUNT  # false for NaN too


def _in_short(value: Any) -> str:
    """Show a value from the file in one short line; nested ones by their type."""
    if value is None:
        return "missing"
    if isinstance(value, int | float) and len(str(value)) < 25:
        return str(value)
    return shown(str(value)) if isinstance(value, str | int | float) else type(value).__name__


def _refuse(path: Path, message: str, remedy: str = _REMEDY) -> NoReturn:
    raise VkmoeError(f"the expert profile {path} {message}", remedy)
