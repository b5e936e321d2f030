"""Records routing: which experts each token of a run used, as a file of JSON lines.

The first line is a header (the model's shape), then comes one line per token:

    {"phase": "prompt", "experts": [[3, 17], [0, 9]]}

with the ids of each MoE layer's experts, the most important first. Where that was asked for, a line
has a name for its token too, "token": a hash of its id and of a salt that is not in the file, the
same wherever the token occurs. Owns the format, writing,
joining and reading. Files may be damaged, or made up to do harm: every line is checked before it is
used. A last line that is cut short, as a killed recording leaves it, is left out with a note.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from vkmoe.closing import Closing
from vkmoe.errors import VkmoeError
from vkmoe.experts.decide.keys import KeySpace

FORMAT, VERSION = "vkmoe-trace", 1
# No model is near these; they keep a few bytes of a made-up header from asking for gigabytes.
MAX_LAYERS, MAX_KEYS, MAX_SPAN = 4096, 1 << 22, 1 << 40
MAX_EXPERTS, MAX_USED = 1 << 16, 256  # of a layer; what the sums in C++ and the table have room for
MAX_HEADER_BYTES = 1 << 20
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

    @property
    def n_layers(self) -> int:
        return len(self.layer_numbers)

    @property
    def space(self) -> KeySpace:
        return KeySpace(self.n_layers, self.n_experts)

    def document(self) -> dict[str, Any]:
        """Return the header line."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}


@dataclass(frozen=True, eq=False)
class Trace:
    """Holds the routing of one or more sequences of tokens; at least one token."""

    header: TraceHeader
    routing: NDArray[np.uint32]  # [n_tokens, n_layers, n_used]
    is_prompt: NDArray[np.bool_]  # [n_tokens]
    starts: tuple[int, ...] = (0,)  # the first token of each sequence
    notes: tuple[str, ...] = ()  # what a reader should know of the file
    source: str = "a trace"  # the file, for messages
    ids: NDArray[np.int64] | None = None  # [n_tokens]: names of the tokens; None: not recorded
    # The first token of each run, where tokens of a prompt are processed together; (): each alone.
    runs: tuple[int, ...] = ()
    n_text: int = 0  # tokens of the texts, where others are guesses; 0: all are

    @property
    def n_tokens(self) -> int:
        return len(self.routing)

    @property
    def space(self) -> KeySpace:
        return self.header.space


def joined(traces: Sequence[Trace]) -> Trace:
    """Join traces of one model to one: a run that had one prompt after the other.

    Raises VkmoeError if their models differ.
    """
    first = traces[0]
    for trace in traces[1:]:
        for item in fields(TraceHeader):
            ours, theirs = getattr(first.header, item.name), getattr(trace.header, item.name)
            if ours != theirs:
                raise VkmoeError(
                    f"{first.source} and {trace.source} are of different models: "
                    f"{item.name} {_shown(ours)} in one, {_shown(theirs)} in the other",
                    "simulate the traces of one model at a time",
                )
    named = [trace.ids for trace in traces if trace.ids is not None]
    notes = [note for trace in traces for note in trace.notes]
    if 0 < len(named) < len(traces):
        without = ", ".join(trace.source for trace in traces if trace.ids is None)
        notes.append(f"tokens are not named in {without}: so their names are used in none")
    offsets = np.cumsum([0, *(trace.n_tokens for trace in traces[:-1])])
    starts = zip(traces, offsets.tolist(), strict=True)
    return Trace(
        first.header,
        np.concatenate([trace.routing for trace in traces]),
        np.concatenate([trace.is_prompt for trace in traces]),
        tuple(offset + start for trace, offset in starts for start in trace.starts),
        tuple(notes),
        ids=np.concatenate(named) if len(named) == len(traces) else None,
    )


class TraceWriter(Closing):
    """Writes a trace token by token; each line reaches the file at once.

    What was written before Ctrl-C or a crash can be read. Replaces the file. Raises VkmoeError
    where it cannot be written.
    """

    def __init__(self, path: Path, header: TraceHeader, salt: bytes | None = None) -> None:
        """Write the header; with a `salt`, of 64 bytes at most, tokens will be named."""
        self._salt = salt
        self._path, self._shape = path, (header.n_layers, header.n_used)
        self.n_tokens = 0
        try:
            self._file = path.open("w", buffering=1, encoding="utf-8")
        except OSError as error:
            raise self._failed(error) from error
        self._line(header.document() | ({"names_tokens": True} if salt is not None else {}))

    def write(self, routing: NDArray[np.uint32], is_prompt: bool, token: int | None = None) -> None:
        """Add a token: ids [n_layers, n_used], and its own, which is named if there is a salt."""
        assert routing.shape == self._shape, (routing.shape, self._shape)
        phase, named = "prompt" if is_prompt else "decode", {}
        if self._salt is not None:
            assert token is not None, "it cannot be named"
            named["token"] = token_name(token, self._salt)
        self._line({"phase": phase, **named, "experts": routing.tolist()})
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


def token_name(token: int, salt: bytes) -> str:
    """Name a token by its id: 16 hexadecimal digits that tell nothing of it without the salt."""
    return hashlib.blake2b(str(token).encode(), digest_size=8, key=salt).hexdigest()


def is_trace_file(path: Path) -> bool:
    """Say whether a file begins as a trace does. False also for one that cannot be read."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            if FORMAT.encode() not in file.read(100):  # the writer begins with it
                return False
            file.seek(0)
            record = json.loads(file.readline(MAX_HEADER_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(record, dict) and record.get("format") == FORMAT


def read_trace(
    path: Path,
    most_tokens: int | None = None,
    check: Callable[[TraceHeader], None] = lambda header: None,
) -> Trace:
    """Read a trace file, or its first `most_tokens`; `check` its header before these.

    Raises VkmoeError for a file that cannot be read, is damaged or holds no tokens, and what
    `check` raises.
    """
    try:
        with path.open("rb") as file:
            return _Reader(path, file).read(most_tokens, check)
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

    def read(self, most_tokens: int | None, check: Callable[[TraceHeader], None]) -> Trace:
        line = self._next_line(MAX_HEADER_BYTES)
        if not line.strip():
            raise VkmoeError(f"{self._path}: the trace is empty", _HINT)
        record = self._record(line)
        header, names = self._header(record), record.get("names_tokens") is True
        check(header)
        ids: list[int] = []
        limit = MAX_HEADER_BYTES + header.n_layers * (header.n_used + 1) * 32
        routing: list[NDArray[np.uint32]] = []
        is_prompt, notes = [], []
        while len(routing) != most_tokens and (line := self._next_line(limit)):
            if not line.endswith(b"\n"):
                notes.append(f"{self._path}: the last line is cut short and was left out")
                break
            record = self._record(line)
            if record.get("phase") not in _PHASES:
                self._refuse(f"has no phase {' or '.join(_PHASES)}")
            is_prompt.append(record["phase"] == "prompt")
            routing.append(self._token(record.get("experts"), header))
            if names:
                ids.append(self._name(record.get("token")))
        if not routing:
            raise VkmoeError(f"{self._path}: the trace holds no tokens", "record it again")
        source = str(self._path)
        named = np.array(ids, np.uint64).view(np.int64) if names else None
        return Trace(
            header, np.stack(routing), np.array(is_prompt), (0,), tuple(notes), source, named
        )

    def _next_line(self, limit: int) -> bytes:
        self._line += 1
        line = self._file.readline(limit + 1)
        if len(line) > limit:
            self._refuse("is too long")
        return line

    def _record(self, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            self._refuse("is not JSON")
        if not isinstance(record, dict):
            self._refuse("is not a JSON object")
        return record

    def _header(self, record: dict[str, Any]) -> TraceHeader:
        if record.get("format") != FORMAT:
            self._refuse(f"is no header of a trace (format {FORMAT})")
        version = self._number("version", record.get("version"), 1, 1 << 31)
        if version > VERSION:
            raise VkmoeError(
                f"{self._path}: the trace has version {version}, this vkmoe reads {VERSION}",
                "update vkmoe",
            )
        for name in ("model", "architecture"):
            if not isinstance(record.get(name), str):
                self._refuse(f"has no text {name}")
        layer_numbers = self._numbers(record, "layer_numbers", 0, 1 << 31)
        span_bytes = self._numbers(record, "span_bytes", 1, MAX_SPAN)
        n_layers = len(layer_numbers)
        if len(span_bytes) != n_layers:
            self._refuse(f"needs {n_layers} numbers as span_bytes")
        most = min(MAX_EXPERTS, MAX_KEYS // n_layers)
        n_experts = self._number("n_experts", record.get("n_experts"), 1, most)
        n_used = self._number("n_used", record.get("n_used"), 1, min(n_experts, MAX_USED))
        return TraceHeader(
            record["model"], record["architecture"], layer_numbers, n_experts, n_used, span_bytes
        )

    def _token(self, rows: Any, header: TraceHeader) -> NDArray[np.uint32]:
        """Return the checked ids of a token, [n_layers, n_used]."""
        rows = rows if isinstance(rows, list) else []
        widths = [len(row) if isinstance(row, list) else -1 for row in rows]
        is_whole = widths == [header.n_used] * header.n_layers
        ids = list(chain.from_iterable(rows)) if is_whole else []
        if set(map(type, ids)) != {int}:
            self._refuse(f"needs {header.n_used} ids in each of {header.n_layers} layers")
        for bad in (min(ids), max(ids)):
            if not 0 <= bad < header.n_experts:
                self._refuse(f"has expert id {_shown(bad)}; the model has {header.n_experts}")
        if any(len(set(row)) != header.n_used for row in rows):
            self._refuse("names an expert twice in a layer")
        return np.array(rows, np.uint32)

    def _name(self, name: Any) -> int:
        """Return the checked name of a token as a number."""
        if not isinstance(name, str) or not re.fullmatch("[0-9a-f]{16}", name):
            self._refuse(f"has no name of its token but {_shown(name)}")
        return int(name, 16)

    def _numbers(self, record: dict[str, Any], name: str, low: int, high: int) -> tuple[int, ...]:
        """Return a number for each layer."""
        values = record.get(name)
        if not isinstance(values, list) or not 1 <= len(values) <= MAX_LAYERS:
            self._refuse(f"needs a number of each layer as {name}")
        return tuple(self._number(name, value, low, high) for value in values)

    def _number(self, name: str, value: Any, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            self._refuse(f"has {name} {_shown(value)}, not a whole number from {low} to {high}")
        return value

    def _refuse(self, problem: str) -> NoReturn:
        raise VkmoeError(f"{self._path}: line {self._line} {problem}", _HINT)


def _shown(value: Any) -> str:
    """Show a value of a file in a few characters."""
    text = ascii(value)
    return text if len(text) <= 40 else text[:40] + "..."
