"""Records routing: which experts each token of a run used, as a file of JSON lines.

The first line is a header (the model's shape), then comes one line per token:

    {"phase": "prompt", "experts": [[3, 17], [0, 9]]}

with the ids of each MoE layer's experts, the most important first, as the engine's routing log has
them. Owns the format, writing, joining and reading; no text, no weights. Files may be damaged, or
made up to do harm: every line is checked before it is used, and an error names file and line. A
last line that is cut short, as a killed recording leaves it, is left out with a note.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from vkmoe.closing import Closing
from vkmoe.errors import VkmoeError
from vkmoe.experts.decide.keys import KeySpace

__all__ = ["Trace", "TraceHeader", "TraceWriter", "joined", "read_trace"]

FORMAT, VERSION = "vkmoe-trace", 1
# No model is near these; they keep a few bytes of a made-up header from asking for gigabytes.
MAX_LAYERS, MAX_EXPERTS, MAX_KEYS, MAX_SPAN = 4096, 1 << 16, 1 << 22, 1 << 40
MAX_HEADER_BYTES = 1 << 20
_MODEL = ("name", "architecture", "MoE layers", "experts", "experts per token",
          "numbers of the MoE layers", "bytes of an expert by layer")  # fmt: skip
_HINT = "the file is damaged, or was not made by `vkmoe trace`"
_PHASES = ("prompt", "decode")


@dataclass(frozen=True)
class TraceHeader:
    """Describes the model a trace was recorded with; layers count MoE layers only."""

    model: str
    architecture: str
    layer_numbers: tuple[int, ...]  # the model's own number of each MoE layer
    n_experts: int
    n_used: int
    span_bytes: tuple[int, ...]  # of one expert in each layer
    n_prompt_tokens: int = 0

    @property
    def n_layers(self) -> int:
        return len(self.layer_numbers)

    @property
    def space(self) -> KeySpace:
        return KeySpace(self.n_layers, self.n_experts)

    def difference(self, other: TraceHeader) -> str | None:
        """Say how the model of `other` differs from ours; None: both are of one model."""
        for what, ours, theirs in zip(_MODEL, self._model(), other._model(), strict=True):
            if ours != theirs:
                first, second = _differing(ours, theirs), _differing(theirs, ours)
                return f"{what} {first} in one, {second} in the other"
        return None

    def document(self) -> dict[str, Any]:
        """Return the header line."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "architecture": self.architecture,
            "n_layers": self.n_layers,
            "layer_numbers": list(self.layer_numbers),
            "n_experts": self.n_experts,
            "n_used": self.n_used,
            "span_bytes": list(self.span_bytes),
            "prompt": {"n_tokens": self.n_prompt_tokens},
        }

    def _model(self) -> tuple[Any, ...]:
        shape = (self.n_layers, self.n_experts, self.n_used, self.layer_numbers, self.span_bytes)
        return self.model, self.architecture, *shape


def _differing(value: Any, other: Any) -> str:
    """Show a value in a few characters; of a tuple the first entry that is not the other's."""
    if isinstance(value, tuple):
        value = next(ours for ours, theirs in zip(value, other, strict=True) if ours != theirs)
    text = ascii(value)
    return text if len(text) <= 60 else text[:60] + "..."


@dataclass(frozen=True, eq=False)
class Trace:
    """Holds the routing of one or more sequences of tokens; at least one token."""

    header: TraceHeader
    routing: NDArray[np.uint32]  # [n_tokens, n_layers, n_used]
    is_prompt: NDArray[np.bool_]  # [n_tokens]
    starts: tuple[int, ...] = (0,)  # the first token of each sequence
    notes: tuple[str, ...] = ()  # what a reader should know of the file
    source: str = "a trace"  # the file, for messages

    @property
    def n_tokens(self) -> int:
        return len(self.routing)

    @property
    def space(self) -> KeySpace:
        return self.header.space

    @property
    def sequences(self) -> list[NDArray[np.uint32]]:
        """Return the routing of each sequence: [n_tokens of it, n_layers, n_used]."""
        return np.split(self.routing, self.starts[1:])


def joined(traces: Sequence[Trace]) -> Trace:
    """Join traces of one model to one: a run that had one prompt after the other.

    Raises VkmoeError if their models differ.
    """
    first = traces[0]
    for trace in traces[1:]:
        difference = first.header.difference(trace.header)
        if difference is not None:
            raise VkmoeError(
                f"{first.source} and {trace.source} are of different models: {difference}",
                "simulate the traces of one model at a time",
            )
    offsets = np.cumsum([0, *(trace.n_tokens for trace in traces[:-1])])
    starts = zip(traces, offsets.tolist(), strict=True)
    return Trace(
        first.header,
        np.concatenate([trace.routing for trace in traces]),
        np.concatenate([trace.is_prompt for trace in traces]),
        tuple(offset + start for trace, offset in starts for start in trace.starts),
        tuple(note for trace in traces for note in trace.notes),
    )


class TraceWriter(Closing):
    """Writes a trace token by token; each line reaches the file at once.

    What was written before Ctrl-C or a crash can be read. Replaces the file. Raises VkmoeError
    where it cannot be written.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        self._path, self._shape = path, (header.n_layers, header.n_used)
        self.n_tokens = 0
        try:
            self._file = path.open("w", buffering=1, encoding="utf-8")
        except OSError as error:
            raise self._failed(error) from error
        self._line(header.document())

    def write(self, routing: NDArray[np.uint32], is_prompt: bool) -> None:
        """Add a token: ids [n_layers, n_used]."""
        assert routing.shape == self._shape, (routing.shape, self._shape)
        phase = "prompt" if is_prompt else "decode"
        self._line({"phase": phase, "experts": routing.tolist()})
        self.n_tokens += 1

    def close(self) -> None:
        self._file.close()

    def _line(self, record: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
        except OSError as error:
            with suppress(OSError):  # what could not be written would be tried once more
                self._file.close()
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> VkmoeError:
        return VkmoeError(
            f"the trace {self._path} cannot be written: {error.strerror or error}",
            "make room, or write it elsewhere with --output",
        )


def read_trace(path: Path) -> Trace:
    """Read a trace file; several written one behind the other count as one.

    Raises VkmoeError for a file that cannot be read, is damaged or holds no tokens.
    """
    try:
        with path.open("rb") as file:
            return _Reader(path, file).read()
    except OSError as error:
        raise VkmoeError(
            f"the trace {path} cannot be read: {error.strerror}",
            "give a file that `vkmoe trace` wrote and that you may read",
        ) from error


class _Reader:
    """Makes one pass over a file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._line = 0  # number of the line being read, from 1
        self._header: TraceHeader | None = None
        self._ids = array("I")
        self._is_prompt = bytearray()
        self._starts: list[int] = []

    def read(self) -> Trace:
        notes: tuple[str, ...] = ()
        while line := self._next_line():
            if not line.strip():
                continue
            try:
                record = json.loads(line, parse_constant=self._refuse_constant)
            except (ValueError, RecursionError):
                if line.endswith(b"\n") or self._header is None:
                    self._refuse("is not JSON")
                notes = (f"{self._path}: the last line is cut short and was left out",)
                break
            self._take(record)
        return self._trace(notes)

    def _next_line(self) -> bytes:
        self._line += 1
        header = self._header
        limit = MAX_HEADER_BYTES
        if header is not None:
            limit += header.n_layers * (header.n_used + 1) * 32
        line = self._file.readline(limit + 1)
        if len(line) > limit:
            self._refuse("is too long")
        return line

    def _take(self, record: Any) -> None:
        if not isinstance(record, dict):
            self._refuse("is not a JSON object")
        if "format" in record or self._header is None:
            header = self._read_header(record)
            if self._header is not None and (other := self._header.difference(header)):
                self._refuse(f"begins a trace of another model: {other}")
            self._header = self._header or header
            self._starts.append(len(self._is_prompt))
            return
        if record.get("phase") not in _PHASES:
            self._refuse(f"has no phase {' or '.join(_PHASES)}")
        self._ids.extend(self._token(record.get("experts"), self._header))
        self._is_prompt.append(record["phase"] == "prompt")

    def _trace(self, notes: tuple[str, ...]) -> Trace:
        header = self._header
        if header is None:
            raise VkmoeError(f"{self._path}: the trace is empty", _HINT)
        n_tokens = len(self._is_prompt)
        if not n_tokens:
            raise VkmoeError(f"{self._path}: the trace holds no tokens", "record it again")
        ids = np.frombuffer(self._ids, np.uint32)
        ends = [*self._starts[1:], n_tokens]
        return Trace(
            header,
            ids.reshape(n_tokens, header.n_layers, header.n_used),
            np.frombuffer(self._is_prompt, np.bool_),
            tuple(start for start, end in zip(self._starts, ends, strict=True) if end > start),
            notes,
            str(self._path),
        )

    # ----- one line -----

    def _read_header(self, record: dict[str, Any]) -> TraceHeader:
        if record.get("format") != FORMAT:
            self._refuse(f"is no header of a trace (format {FORMAT})")
        version = self._number(record, "version", 1, 1 << 31)
        if version > VERSION:
            raise VkmoeError(
                f"{self._path}: the trace has version {version}, this vkmoe reads {VERSION}",
                "update vkmoe",
            )
        n_layers = self._number(record, "n_layers", 1, MAX_LAYERS)
        n_experts = self._number(record, "n_experts", 1, MAX_EXPERTS)
        n_used = self._number(record, "n_used", 1, n_experts)
        if n_layers * n_experts > MAX_KEYS:
            self._refuse(f"has {n_layers} layers of {n_experts} experts, which no model has")
        prompt = record.get("prompt", {})
        if not isinstance(prompt, dict):
            self._refuse("has a prompt that is no object")
        return TraceHeader(
            self._text(record, "model"),
            self._text(record, "architecture"),
            self._numbers(record, "layer_numbers", n_layers, 0, 1 << 31),
            n_experts,
            n_used,
            self._numbers(record, "span_bytes", n_layers, 1, MAX_SPAN),
            self._number({"n_tokens": 0, **prompt}, "n_tokens", 0, 1 << 31),
        )

    def _token(self, rows: Any, header: TraceHeader) -> list[int]:
        """Return the checked ids of a token: n_layers * n_used of them."""
        if not isinstance(rows, list) or len(rows) != header.n_layers:
            self._refuse(f"needs experts of {header.n_layers} layers")
        for layer, row in enumerate(rows):
            if not isinstance(row, list) or len(row) != header.n_used:
                self._refuse(f"needs {header.n_used} experts in layer {layer}")
        ids = list(chain.from_iterable(rows))
        if set(map(type, ids)) != {int}:
            self._refuse("has an expert id that is not a whole number")
        for bad in (min(ids), max(ids)):
            if not 0 <= bad < header.n_experts:
                self._refuse(f"has expert id {_shown(bad)}; the model has {header.n_experts}")
        for layer, row in enumerate(rows):
            if len(set(row)) != header.n_used:
                self._refuse(f"names an expert twice in layer {layer}")
        return ids

    def _text(self, record: dict[str, Any], name: str) -> str:
        value = record.get(name)
        if not isinstance(value, str):
            self._refuse(f"has no text {name}")
        return value

    def _number(self, record: dict[str, Any], name: str, low: int, high: int) -> int:
        value = record.get(name)
        if type(value) is not int or not low <= value <= high:
            self._refuse(f"has {name} {_shown(value)}, not a whole number from {low} to {high}")
        return value

    def _numbers(
        self, record: dict[str, Any], name: str, n: int, low: int, high: int
    ) -> tuple[int, ...]:
        values = record.get(name)
        if not isinstance(values, list) or len(values) != n:
            self._refuse(f"needs {n} numbers as {name}")
        return tuple(self._number({name: value}, name, low, high) for value in values)

    def _refuse_constant(self, name: str) -> NoReturn:
        self._refuse(f"holds {name}")

    def _refuse(self, problem: str) -> NoReturn:
        raise VkmoeError(f"{self._path}: line {self._line} {problem}", _HINT)


def _shown(value: Any) -> str:
    """Show a value of a file in a few characters."""
    if type(value) is int and abs(value) >= 1 << 64:
        return "of many digits"
    text = ascii(value)
    return text if len(text) <= 40 else text[:40] + "..."
