"""This module says what the scheduler of replies needs of a model: the engine, or a test's fake.

Regions of the KV caches are the model's; regions.py knows what is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import RunResult, TextForm, TokenBatch, TopLogits
from vkmoe.errors import VkmoeError

FetchLogits = Callable[[], NDArray[np.float32]]  # [n_vocab]
Bytes = NDArray[np.uint8]


class KeptText(Protocol):
    """Describes a text that a model keeps in host memory, until that is needed for others."""

    is_spared: bool  # no other text may take its place

    @property
    def n_positions(self) -> int:
        """Return how many positions of a region it has rows of."""

    @property
    def n_bytes(self) -> int:
        """Count the bytes of memory that it takes."""

    @property
    def is_there(self) -> bool:
        """Say whether its memory was not needed for others."""

    def bring_back(self, region: int, n_positions: int, n_least: int) -> int:
        """Make a region hold the first positions of this text, and no others.

        Returns how many: fewer where the state cannot stop just there. Nothing is copied, and 0
        returned, if they are fewer than `n_least`. Must hold: it is there, and the region has room.
        """

    def drop(self) -> None:
        """Let other texts have its memory. May be called again. Mutates."""


class BatchRunner(Protocol):
    """Describes a model that runs batches of rows over several sequences.

    A batch is of one phase. Rows of a region come in order of positions, each right behind what is
    in the region; all rows of a region in one batch stand together.
    """

    @property
    def ctx_size(self) -> int:
        """Return how many positions each region can have."""

    @property
    def n_vocab(self) -> int:
        """Return how many tokens there are."""

    @property
    def n_regions(self) -> int:
        """Return how many sequences the KV caches hold at once."""

    @property
    def max_decode_rows(self) -> int:
        """Return the most rows of a decode batch."""

    @property
    def max_drafted(self) -> int:
        """Return the most guesses of a sequence in a batch that can be taken back."""

    @property
    def n_guesses(self) -> int:
        """Return how many tokens a layer of the model guesses ahead at a time; 0: it has none."""

    @property
    def max_logit_rows(self) -> int:
        """Return for how many rows of a prompt batch the head runs at once."""

    @property
    def prompt_rows(self) -> int:
        """Return the most rows of a prompt batch now; it may change from batch to batch."""

    def make_room(self, n_positions: int) -> None:
        """Give each region so many positions, of those it can have, if it has fewer.

        Raises OutOfMemoryError where memory has no room for them now, with all as it was.
        """

    def run(self, batch: TokenBatch) -> RunResult:
        """Process a batch; its result has the largest logits of each row that wants any.

        Where more rows of a prompt want some than `max_logit_rows`, it has those of the first.
        """

    def run_head(self, first: int) -> tuple[TopLogits, ...]:
        """Return the largest logits of more rows of the last batch, a prompt, that want any.

        Of those it is the `first`, counted from 0, and others behind it, `max_logit_rows` at most.
        """

    def states(self, first: int, n_rows: int) -> NDArray[np.float32]:
        """Return what the head would read of rows of the last batch: [n_rows, width].

        They are those from its `first` row on. Must hold: it `wants_states`, and these rows any.
        """

    def guess(
        self, following: Sequence[int], wanted: Sequence[bool], n_tokens: int
    ) -> list[list[int]]:
        """Guess up to `n_tokens` behind rows of the last batch, for each that is `wanted`.

        `following` has the token behind each row, and any where a row was a wrong guess.
        """

    def full_logits(self, index: int) -> NDArray[np.float32]:
        """Return all logits [n_vocab] of the index-th row for which the head ran last."""

    def rewind(self, region: int, position: int) -> int:
        """Go back to `position` in a region, or further where the state cannot stop just there.

        Returns the position from which tokens have to be run (again): at most `position`.
        """

    def copy_region(self, source: int, target: int, n_positions: int, n_least: int) -> int:
        """Make the first positions of one region those of another; it holds no others then.

        Returns how many: fewer where the state cannot stop just there. If they are fewer than
        `n_least` nothing is copied, and it is 0.
        """

    def keep_text(self, region: int, n_positions: int) -> KeptText | None:
        """Copy the first positions of a region to host memory.

        They are fewer where the state cannot stop just there. Returns None where memory has no room
        for them.
        """

    @property
    def text_fingerprint(self) -> bytes:
        """Return a hash of what the rows of a text depend on, 32 bytes."""

    def text_form(self, region: int) -> TextForm:
        """Say what a file of all that is in a region holds."""

    def text_bytes(self, form: TextForm) -> int | None:
        """Count the bytes of rows and states in a form; None: no text of the model has this form.

        Nothing need be there of it.
        """

    def write_text(self, region: int, form: TextForm, write: Callable[[Bytes], object]) -> None:
        """Pass the rows and states of a region, `text_form` of it, to `write`, block by block."""

    def read_text(self, region: int, form: TextForm, read: Callable[[Bytes], object]) -> None:
        """Fill a region with rows and states, of which `read` fills one block after the other.

        Where `read` raises, the region is left empty. Must hold: `text_bytes` knows the form, and
        it has `ctx_size` positions at most. Raises OutOfMemoryError where too little memory is
        left, with all kept.
        """


def heads(
    runner: BatchRunner, result: RunResult, n_rows: int, first: int = 0
) -> Iterator[tuple[TopLogits, FetchLogits]]:
    """Yield the largest logits of rows that want any, and what returns all of them.

    They are `n_rows` from the `first` of a batch on. The head runs again where it did not for all.
    """
    tops, n_done = result.tops[first : first + n_rows], 0
    while True:
        for index, top in enumerate(tops, first):
            yield top, partial(runner.full_logits, index)
        n_done += len(tops)
        if n_done >= n_rows:
            return
        tops, first = runner.run_head(n_done), 0


def bad_logits(name: str = "logits") -> VkmoeError:
    """Make the error for what is no number, where a model computed a logit, or else `name`."""
    return VkmoeError(
        f"the model computed {name} that are not numbers (NaN or infinite)",
        "the file may be damaged, or the driver wrong: try `vkmoe selftest`",
    )
