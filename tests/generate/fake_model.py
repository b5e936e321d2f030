"""A model whose logits are a hash of all rows before them, and which checks every rule of batches.

Any mistake in positions, regions, kinds of rows or neighbours changes what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import RunResult, TextForm, TokenBatch, TopLogits
from vkmoe.errors import OutOfMemoryError
from vkmoe.generate.runner import Bytes

N_VOCAB = 262  # as tests.generate.conftest.tiny_metadata
N_LISTED = 64  # of the largest logits
WIDTH = 8  # of a state


class FakeText:
    """A kept text: the hashes of its rows."""

    def __init__(self, model: FakeModel, rows: list[int]) -> None:
        self.model, self.rows, self.is_there, self.is_spared = model, rows, True, False

    @property
    def n_positions(self) -> int:
        return len(self.rows)

    @property
    def n_bytes(self) -> int:
        return 8 * len(self.rows)

    def bring_back(self, region: int, n_positions: int, n_least: int) -> int:
        assert self.is_there and n_positions <= len(self.rows)
        n_positions -= n_positions % self.model.stops_at
        if n_positions < n_least:
            return 0
        self.model.rows[region] = self.rows[:n_positions]
        return n_positions

    def drop(self) -> None:
        self.is_there = False


class FakeModel:
    """A `BatchRunner` that computes nothing.

    `habit` is how much likelier a token is that follows from the last one alone: the text repeats
    itself then. `stops_at` is the distance of positions at which the state can stop.
    """

    def __init__(
        self,
        n_regions: int = 4,
        ctx_size: int = 64,
        max_decode_rows: int = 8,
        prompt_rows: int = 16,
        habit: float = 0.0,
        stops_at: int = 1,
        n_vocab: int = N_VOCAB,
        n_guesses: int = 0,
        most_kept: int = 0,
    ) -> None:
        self.most_kept, self.kept = most_kept, list[FakeText]()  # rows; the oldest text first
        self.n_regions, self.ctx_size = n_regions, ctx_size
        self.max_decode_rows, self.prompt_rows = max_decode_rows, prompt_rows
        self.max_logit_rows, self.max_drafted = max_decode_rows, max_decode_rows - 1
        self.most_positions = ctx_size  # that memory has room for
        self.n_guesses, self.n_guessed = n_guesses, 0
        self._habit, self.stops_at, self.n_vocab = habit, stops_at, n_vocab
        self.rows: list[list[int]] = [[] for _ in range(n_regions)]  # a hash of all up to each
        self.batches: list[TokenBatch] = []
        self.heads: list[int] = []  # rows for which the head ran again
        self.n_copied = 0
        self._logits: list[NDArray[np.float32]] = []

    def make_room(self, n_positions: int) -> None:
        if n_positions > self.most_positions:
            raise OutOfMemoryError(f"no memory is left for {n_positions} tokens", "")

    def run(self, batch: TokenBatch) -> RunResult:
        self._check(batch)
        self.batches.append(batch)
        self._logits = []
        columns = batch.tokens, batch.positions, batch.sequences, batch.wants_logits
        for token, position, region, wants in zip(*columns, strict=True):
            rows = self.rows[region]
            assert position == len(rows) < self.ctx_size, (position, len(rows))
            rows.append(hash((rows[-1] if rows else 0, token, batch.phase == "prompt")))
            if wants and not batch.wants_states:
                self._logits.append(self._logits_after(rows[-1], token))
        self._last = (batch, [self.rows[region][position] for position, region in
                                zip(batch.positions, batch.sequences, strict=True)])  # fmt: skip
        routing = np.zeros((len(batch.tokens), 0, 0), np.uint32)
        return RunResult(routing, None, tuple(map(_top, self._logits[: self.max_logit_rows])))

    def states(self, first: int, n_rows: int) -> NDArray[np.float32]:
        batch, rows = self._last
        assert batch.wants_states and batch.phase == "prompt"
        assert n_rows and all(batch.wants_logits[first : first + n_rows]), (batch, first, n_rows)
        seeds = (row & 0xFFFFFFFFFFFFFFFF for row in rows[first : first + n_rows])
        return np.stack([
            np.random.default_rng(seed).normal(size=WIDTH).astype(np.float32) for seed in seeds
        ])  # fmt: skip

    def run_head(self, first: int) -> tuple[TopLogits, ...]:
        batch, rows = self._last
        assert batch.phase == "prompt", batch
        assert 0 <= first < sum(batch.wants_logits), (batch, first)
        found = zip(rows, batch.tokens, batch.wants_logits, strict=True)
        logits = [self._logits_after(row, token) for row, token, wants in found if wants]
        self._logits = logits[first : first + self.max_logit_rows]
        self.heads.append(len(self._logits))
        return tuple(map(_top, self._logits))

    def guess(
        self, following: Sequence[int], wanted: Sequence[bool], n_tokens: int
    ) -> list[list[int]]:
        """Guess the likeliest tokens, and at times another one."""
        batch, rows = self._last
        assert len(following) == len(wanted) == len(batch.tokens) and n_tokens == self.n_guesses
        found = []
        for row, token, wants in zip(rows, following, wanted, strict=True):
            guesses: list[int] = []
            while wants and len(guesses) < n_tokens:
                row = hash((row, token, False))
                token = int(self._logits_after(row, token).argmax()) ^ (row % 7 == 0)
                guesses.append(token)
            found += [guesses] * wants
        self.n_guessed += len(found)
        return found

    def full_logits(self, index: int) -> NDArray[np.float32]:
        return self._logits[index]

    def rewind(self, region: int, position: int) -> int:
        assert position <= len(self.rows[region])
        del self.rows[region][position - position % self.stops_at :]
        return len(self.rows[region])

    def copy_region(self, source: int, target: int, n_positions: int, n_least: int) -> int:
        assert source != target and n_positions <= len(self.rows[source])
        n_positions -= n_positions % self.stops_at
        if n_positions < n_least:
            return 0
        self.rows[target] = self.rows[source][:n_positions]
        self.n_copied += n_positions
        return n_positions

    def keep_text(self, region: int, n_positions: int) -> FakeText | None:
        assert n_positions <= len(self.rows[region])
        n_positions -= n_positions % self.stops_at

        def held() -> list[FakeText]:
            return [text for text in self.kept if text.is_there]

        leaving = [text for text in held() if not text.is_spared]
        while leaving and sum(map(len, (x.rows for x in held()))) + n_positions > self.most_kept:
            leaving.pop(0).drop()
        if sum(len(text.rows) for text in held()) + n_positions > self.most_kept:
            return None
        self.kept = [*held(), FakeText(self, self.rows[region][:n_positions])]
        return self.kept[-1]

    text_fingerprint = b"x" * 32

    def text_form(self, region: int) -> TextForm:
        return TextForm(len(self.rows[region]))

    def text_bytes(self, form: TextForm) -> int | None:
        return None if form.stops else 8 * form.n_positions

    def write_text(self, region: int, form: TextForm, write: Callable[[Bytes], object]) -> None:
        for row in self.rows[region]:
            write(np.array([row]).view(np.uint8))

    def read_text(self, region: int, form: TextForm, read: Callable[[Bytes], object]) -> None:
        found = []
        self.rows[region] = []
        for _ in range(form.n_positions):
            block = np.zeros(8, np.uint8)
            read(block)
            found.append(int(block.view(np.int64)[0]))
        self.rows[region] = found

    def _check(self, batch: TokenBatch) -> None:
        n_rows = len(batch.tokens)
        most = self.max_decode_rows if batch.phase == "decode" else self.prompt_rows
        assert 0 < n_rows <= most, batch
        assert all(0 <= region < self.n_regions for region in batch.sequences), batch
        changes = sum(a != b for a, b in zip(batch.sequences, batch.sequences[1:], strict=False))
        assert changes == len(set(batch.sequences)) - 1, "a sequence's rows do not stand together"

    def _logits_after(self, row: int, token: int) -> NDArray[np.float32]:
        random = np.random.default_rng(row & 0xFFFFFFFFFFFFFFFF)
        logits = random.normal(size=self.n_vocab).astype(np.float32)
        logits[(7 * token + 3) % 11] += np.float32(self._habit)
        return logits


def _top(logits: NDArray[np.float32]) -> TopLogits:
    ids = np.lexsort((np.arange(len(logits)), -logits))[:N_LISTED]
    total = float(np.log(np.exp(logits.astype(np.float64)).sum()))
    return TopLogits(ids.astype(np.int32), logits[ids], len(logits), total)
