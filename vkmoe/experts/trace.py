"""Recorded routing: which experts each token of a run used, as a file of JSON lines.

The first line is a header (the model's shape), then comes one line per token:

    {"phase": "prompt", "experts": [[3, 17], [0, 9]]}

with the ids of each MoE layer's experts, the most important first, as the engine's routing log has
them. Owns the format, writing and joining; trace_reader.py reads it. No text, no weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkmoe.closing import Closing
from vkmoe.errors import VkmoeError
from vkmoe.experts.decide.keys import KeySpace

__all__ = ["FORMAT", "VERSION", "Trace", "TraceHeader", "TraceWriter", "joined"]

FORMAT, VERSION = "vkmoe-trace", 1
_MODEL = ("name", "architecture", "MoE layers", "experts", "experts per token",
          "numbers of the MoE layers", "bytes of an expert by layer")  # fmt: skip


@dataclass(frozen=True)
class TraceHeader:
    """The model a trace was recorded with; layers count MoE layers only."""

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
        """What tells the model of `other` from ours, for people; None: both are of one model."""
        for what, ours, theirs in zip(_MODEL, self._model(), other._model(), strict=True):
            if ours != theirs:
                return f"{what} {_shown(ours, theirs)} in one, {_shown(theirs, ours)} in the other"
        return None

    def document(self) -> dict[str, Any]:
        """The header line."""
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


@dataclass(frozen=True, eq=False)
class Trace:
    """The routing of one or more sequences of tokens; at least one token."""

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
        """The routing of each sequence: [n_tokens of it, n_layers, n_used]."""
        return np.split(self.routing, self.starts[1:])


def joined(traces: Sequence[Trace]) -> Trace:
    """Traces of one model as one: a run that had one prompt after the other.

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


def _shown(value: Any, other: Any) -> str:
    """A value in a few characters; of a tuple the first entry that is not the other's."""
    if isinstance(value, tuple):
        value = next(ours for ours, theirs in zip(value, other, strict=True) if ours != theirs)
    text = ascii(value)
    return text if len(text) <= 60 else text[:60] + "..."
