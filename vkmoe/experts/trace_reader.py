"""Reads trace files (trace.py), which may be damaged or made up to do harm.

Every line is checked before it is used; an error names the file and the line. A last line that is
cut short, as a killed recording leaves it, is left out with a note.
"""

from __future__ import annotations

import json
from array import array
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from vkmoe.errors import VkmoeError
from vkmoe.experts.trace import FORMAT, VERSION, Trace, TraceHeader

__all__ = ["read_trace"]

# No model is near these; they keep a few bytes of a made-up header from asking for gigabytes.
MAX_LAYERS, MAX_EXPERTS, MAX_KEYS, MAX_SPAN = 4096, 1 << 16, 1 << 22, 1 << 40
MAX_HEADER_BYTES = 1 << 20
_HINT = "the file is damaged, or was not made by `vkmoe trace`"
_PHASES = ("prompt", "decode")


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
    """One pass over a file."""

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
        """The ids of a token, checked: n_layers * n_used of them."""
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
    """A value of a file in at most a few characters."""
    if type(value) is int and abs(value) >= 1 << 64:
        return "of many digits"
    text = ascii(value)
    return text if len(text) <= 40 else text[:40] + "..."
