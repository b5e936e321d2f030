"""Reads and formats the profile of `--expert-profile`: what is known of experts, kept between runs.

That is their decayed uses, and which of them each token used, by its id. Owns the file's format, a
JSON document, and the fingerprint that ties it to a model. Importance files and traces are
recognised by their contents and read in its place. Does not decide what is made of it, nor write
the file.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import numpy as np
from numpy.typing import NDArray

from vkmoe.errors import VkmoeError
from vkmoe.experts.decide.token_table import (
    SLOWEST,
    WIDTH,
    History,
    TokenRows,
    n_rows_of,
    row_bytes,
)
from vkmoe.experts.records.importance import is_importance_file, read_importance, remembered
from vkmoe.experts.records.trace import Trace, TraceHeader, is_trace_file, read_trace
from vkmoe.facts import DeltaNetSpec, ModelSpec
from vkmoe.gguf_file import TensorInfo
from vkmoe.gguf_file.header import shown

FORMAT, VERSION = "vkmoe expert profile", 2
MAX_COUNT = 1e15  # more tokens than any run sees; keeps sums and weighted counts finite
# What a sound file needs at most: for a count, beside all, and for the numbers of a token.
_BYTES_PER_COUNT, _BYTES_BESIDE, _BYTES_PER_TOKEN = 64, 1 << 16, 32
MAX_ID = 1 << 31
MOST_TRACED = 8192  # tokens of a trace that are read: reading takes a second then
_WORDS = {
    "n_moe_layers": "number of MoE layers",
    "n_experts": "number of experts",
    "n_used": "number of experts per token",
}
_REMEDY = (
    "give another --expert-profile, or remove the file: a new one is written at the end of the run"
)
_OTHER_TRACE = "give a trace that `vkmoe trace` recorded of this model"
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
    for name in ("activation", "output_scales", "beside_width"):  # the architecture fixes these
        del experts[name]
    heads: list[int] = []  # of the first attention, if there is any
    for mixer in spec.mixers:
        if not heads and not isinstance(mixer, DeltaNetSpec):
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


def profile_text(model: ProfiledModel, history: History) -> str:
    """Return the file of what a run leaves."""
    counts = np.minimum(history.counts, MAX_COUNT).reshape(model.n_moe_layers, model.n_experts)
    document = {"format": FORMAT, "version": VERSION, "model": asdict(model)}
    document |= {"counts": counts.tolist(), "tokens": None}
    if history.tokens is not None:
        ids, seen, experts, shares = history.tokens
        document["tokens"] = {
            "ids": ids.tolist(),
            "seen": seen.tolist(),
            "experts": _text_of(experts),
            "shares": _text_of(shares),
        }
    return json.dumps(document, allow_nan=False) + "\n"


def _text_of(values: NDArray[np.uint16]) -> str:
    """Write whole numbers as base64 of two bytes each, the lower one first."""
    return base64.b64encode(values.astype("<u2").tobytes()).decode("ascii")


def is_read_only(path: Path) -> bool:
    """Say whether a file stands in for a profile that no run may write to."""
    return is_importance_file(path) or is_trace_file(path)


def trace_of_model(path: Path, model: ProfiledModel) -> Trace:
    """Read the first tokens of a trace, as many as are of use in place of a profile.

    Raises VkmoeError for a file that is damaged or belongs to another model.
    """

    def check(header: TraceHeader) -> None:
        _check_header(path, header, model)

    return read_trace(path, MOST_TRACED, check)


def _check_header(path: Path, header: TraceHeader, model: ProfiledModel) -> None:
    """Raise VkmoeError for the trace of another model, however long that is."""
    theirs = {
        "architecture": header.architecture,
        "name": header.model,
        "n_moe_layers": header.n_layers,
        "n_experts": header.n_experts,
        "n_used": header.n_used,
    }
    for name, found in theirs.items():
        if found != getattr(model, name):
            words = _difference(name, found, getattr(model, name))
            raise VkmoeError(f"the trace {path} belongs to another model: {words}", _OTHER_TRACE)


def _difference(name: str, theirs: Any, ours: Any) -> str:
    """Say in what a model differs."""
    what = _WORDS.get(name, name.replace("_", " "))
    return f"its {what} is {shown(str(theirs))}, this model's {shown(str(ours))}"


def load_profile(path: Path, model: ProfiledModel, n_vocab: int) -> History | None:
    """Return what an earlier run left; None if there is no such file.

    Of an importance file (importance.py) or a trace (trace.py) the uses are returned. No more ids
    are expected than the `n_vocab` that the model has.

    Raises VkmoeError for a file that cannot be read, is damaged or belongs to another model.
    """
    if is_importance_file(path):
        n_layers, n_experts, n_used = model.n_moe_layers, model.n_experts, model.n_used
        return History(read_importance(path, n_layers, n_experts, n_used))
    if is_trace_file(path):
        trace = trace_of_model(path, model)
        keys = trace.space.keys_of(trace.routing).reshape(-1)
        uses = np.bincount(keys, minlength=trace.space.n_keys).astype(np.float64)
        return History(remembered(uses.reshape(model.n_moe_layers, -1), model.n_used))
    n_rows = min(n_vocab, n_rows_of(model.n_moe_layers, model.n_used))
    bytes_per_row = row_bytes(model.n_moe_layers, model.n_used) * 4 / 3  # base64
    limit = _BYTES_BESIDE + _BYTES_PER_COUNT * model.n_moe_layers * model.n_experts
    data = _read(path, limit + math.ceil(n_rows * (bytes_per_row + _BYTES_PER_TOKEN)))
    if data is None:
        return None
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        _refuse(path, "is not an expert profile, or damaged")
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        _refuse(path, f"has format version {shown(str(version))}, this vkmoe reads {VERSION}")
    _check_model(path, document.get("model"), model)
    counts = _counts(path, document.get("counts"), (model.n_moe_layers, model.n_experts))
    return History(counts, _token_rows(path, document.get("tokens"), model))


def _read(path: Path, limit: int) -> bytes | None:
    """Read a file of at most `limit` bytes; None if there is none."""
    try:
        with open(path, "rb") as stream:
            # One that is too large is not read: its size says so, if it has any.
            is_too_large = os.fstat(stream.fileno()).st_size > limit
            data = b"" if is_too_large else stream.read(limit + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        reason = error.strerror or error
        raise VkmoeError(f"the expert profile {path} cannot be read: {reason}", _REMEDY) from error
    if is_too_large or len(data) > limit:
        _refuse(path, f"is larger than the {limit} bytes a profile of this model can have")
    return data


def _check_model(path: Path, found: Any, model: ProfiledModel) -> None:
    """Refuse the profile of another model, naming the first thing that differs."""
    if not isinstance(found, dict):
        _refuse(path, "does not say which model it belongs to")
    for name, ours in asdict(model).items():
        if found.get(name) == ours:
            continue
        words = "the fingerprint of sizes and tensors differs"
        if name != "fingerprint":
            words = _difference(name, found.get(name), ours)
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


def _token_rows(path: Path, found: Any, model: ProfiledModel) -> TokenRows | None:
    """Return what is known of tokens, checked."""
    if found is None:
        return None
    if not isinstance(found, dict):
        _refuse(path, "is damaged: what it says of tokens is no object")
    ids, seen = found.get("ids"), found.get("seen")
    if not _are_numbers(ids, 0, MAX_ID) or not _are_numbers(seen, 1, SLOWEST):
        _refuse(path, "is damaged: what it says of tokens has no ids, or not how often they came")
    if len(ids) != len(seen) or len(set(ids)) != len(ids):
        _refuse(path, "is damaged: ids of tokens are not distinct, or more than their numbers")
    shape = (len(ids), model.n_moe_layers, WIDTH * model.n_used)
    experts, shares = (_values_of(found.get(name), shape) for name in ("experts", "shares"))
    if experts is None or shares is None or (experts >= model.n_experts).any():
        _refuse(path, f"is damaged: it needs experts and shares of {len(ids)} tokens")
    return TokenRows(np.array(ids, np.int64), np.array(seen, np.uint16), experts, shares)


def _are_numbers(values: Any, low: int, high: int) -> TypeGuard[list[int]]:
    """Return whether these are whole numbers within bounds."""
    return isinstance(values, list) and all(
        type(value) is int and low <= value <= high for value in values
    )


def _values_of(text: Any, shape: tuple[int, ...]) -> NDArray[np.uint16] | None:
    """Return what `_text_of` wrote; None where it is not of this shape."""
    n_bytes = 2 * math.prod(shape)
    if not isinstance(text, str) or len(text) != 4 * -(-n_bytes // 3):
        return None
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    if len(data) != n_bytes:
        return None
    return np.frombuffer(data, "<u2").astype(np.uint16).reshape(shape)


def _refuse(path: Path, message: str, remedy: str = _REMEDY) -> NoReturn:
    raise VkmoeError(f"the expert profile {path} {message}", remedy)
