"""One configuration of the engine under measurement, and what its cache did in the timed tokens.

Owns an engine while it is open, and its place in a text. Compares nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.slow_link import SlowLink, throttle
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine

__all__ = ["CachedArm", "Counts"]


class Counts(NamedTuple):
    """What an engine did since it was opened, or in one or all turns."""

    tokens: int
    uses: int
    hits: int
    read_bytes: int  # in place
    copied: int  # experts
    copied_bytes: int
    landed: int
    hinted: int
    right: int  # hints
    stall_ns: int


class CachedArm:
    """The model in one configuration."""

    def __init__(
        self, name: str, model: Path, config: EngineConfig, link: SlowLink | None, compute_s: float
    ) -> None:
        """With a `link`, `compute_s` is a token's time without misses, for the copies' budget."""
        self.name = name
        self._model, self._config = model, config
        self._link, self._compute_s = link, compute_s
        self._engine: Engine | None = None
        self._pieces: Iterator[Sequence[int]] = iter(())
        self._position = 0
        self.turns: list[Counts] = []
        self.logits: list[NDArray[np.float32]] = []  # after each turn

    @contextmanager
    def opened(self, warm: Sequence[Sequence[int]]) -> Iterator[None]:
        """Open an engine, and run these texts before the link is slow."""
        with Engine(self._model, self._config) as self._engine:
            for text in warm:
                for position, token in enumerate(text):
                    self._engine.run_token(token, position)
            if self._link is not None:
                throttle(self._engine, self._link, self._compute_s)
            yield
        self._engine = None

    def begin(self, pieces: Sequence[Sequence[int]]) -> None:
        """The next turns are on this text; what is on the device stays there."""
        self._pieces, self._position = iter(pieces), 0
        self.turns, self.logits = [], []

    def turn(self) -> float:
        """Tokens per second on the next piece."""
        engine, piece = self._engine, next(self._pieces)
        assert engine is not None
        before, began = _counted(engine), time.perf_counter()
        for token in piece:
            engine.run_token(token, self._position)
            self._position += 1
        speed = len(piece) / (time.perf_counter() - began)
        engine.settle()
        after = _counted(engine)
        self.turns.append(Counts(*(now - then for now, then in zip(after, before, strict=True))))
        self.logits.append(engine.full_logits().copy())
        return speed

    @property
    def counts(self) -> Counts:
        """Of all turns on this text."""
        return Counts(*map(sum, zip(*self.turns, strict=True)))

    @property
    def overlapped(self) -> float | None:
        """The part of all its copies' time in which tokens were computed."""
        assert self._engine is not None
        overlap = self._engine._experts.overlap
        return overlap.fraction if overlap is not None else None


def _counted(engine: Engine) -> Counts:
    assert engine.profiler is not None and engine.cache is not None
    total, moved = engine.profiler.served().total, engine.cache.counters
    guesses = engine.cache.residency.predictions
    return Counts(
        engine.profiler.n_tokens,
        total.n_uses,
        total.n_hits,
        moved.missed_bytes,
        moved.n_uploads,
        moved.upload_bytes,
        moved.n_landed,
        guesses.n_hinted,
        guesses.n_right,
        moved.stall_ns,
    )
