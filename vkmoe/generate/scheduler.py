"""This module runs several replies at once: it decides which rows the next batch has.

It owns the order in which sequences take turns, and what follows from the result of a batch. What a
region of the KV caches holds is known to regions.py, what a reply is to loop.py.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vkmoe.batch import MAX_LATER, Phase, RunResult, TokenBatch
from vkmoe.choices import DraftWay
from vkmoe.errors import OutOfMemoryError, VkmoeError
from vkmoe.generate.drafts import Ahead, Drafter, make_drafter
from vkmoe.generate.loop import Generation
from vkmoe.generate.regions.regions import Regions
from vkmoe.generate.regions.state_files import StateCounts, check_free, restore_region, save_region
from vkmoe.generate.runner import BatchRunner, heads

log = logging.getLogger("vkmoe")


@dataclass(eq=False)
class _Sequence:
    """Holds a reply that has a region."""

    generation: Generation
    drafter: Drafter | None
    region: int


@dataclass(frozen=True)
class _Rows:
    """Holds the rows of one sequence in a batch; the last `n_logits` want logits.

    The last `n_drafted` are guesses: they count only where the rows before them lead to them.
    """

    sequence: _Sequence
    position: int  # of the first
    tokens: tuple[int, ...]
    n_logits: int
    n_drafted: int = 0


class Scheduler:
    """Runs replies on the regions of a model, one batch a step.

    A batch has rows of prompts or rows that are decoded. Both take turns: after a batch of prompt
    rows, every sequence that decodes gets a token before the next one. Prompts take turns as well.
    What else runs never changes a reply, as no row's bits depend on its neighbours.

    One thread calls `step` and `sweep`; `submit` and `Generation.cancel` may be called on any.
    """

    def __init__(self, runner: BatchRunner, draft: DraftWay = "none") -> None:
        self.regions = Regions(runner)
        self.after_run: Callable[[TokenBatch, RunResult], None] | None = None
        self._runner, self._draft = runner, draft
        self._submitted: deque[Generation] = deque()  # by other threads, since the last step
        self._waiting: deque[Generation] = deque()  # for a region
        self._running: list[_Sequence] = []  # the one whose turn it is first
        self._n_owed = 0  # sequences that decode before prompts go on
        self.n_runs = self.n_turns = 0  # batches that ran, and their sequences, all together

    @property
    def has_work(self) -> bool:
        """Say whether a step would do anything."""
        return any((self._submitted, self._waiting, self._running))

    @property
    def n_waiting(self) -> int:
        """Count the replies that wait for a region."""
        return len(self._submitted) + len(self._waiting)

    @property
    def running(self) -> list[tuple[int, Generation]]:
        """List the regions that are in use, each with its reply."""
        return [(each.region, each.generation) for each in tuple(self._running)]

    def submit(self, generation: Generation) -> None:
        """Let a reply begin, as soon as a region is free. Any thread may call this."""
        generation.submitted()
        self._submitted.append(generation)

    def step(self) -> list[Generation]:
        """Run one batch at most; return the replies that went on or ended.

        Errors of the model end all replies that have a region, which hold the error; it is not
        raised. Ctrl-C is, and ends those of the batch.
        """
        news = self.sweep()
        try:
            news += self._admit()
            news += self._end_without_room()
            reading, writing = self._in_turn(reads=True), self._in_turn(reads=False)
            self._n_owed = min(self._n_owed, len(writing))
            phase: Phase = "decode" if writing and (self._n_owed or not reading) else "prompt"
            if phase == "decode":
                parts = self._decode_rows(writing)
            else:
                parts, self._n_owed = self._prompt_rows(reading), len(writing)
            if parts:
                later = self._later(parts, reading) if phase == "prompt" else ()
                self._run_or_end(parts, _batch(parts, phase, later))
        except VkmoeError as error:
            return news + self._fail(error)
        return [*news, *(part.sequence.generation for part in parts)]

    def sweep(self) -> list[Generation]:
        """Let go of replies that were cancelled, and return them. To be called between steps."""
        while self._submitted:
            self._waiting.append(self._submitted.popleft())
        found = [generation for generation in self._waiting if generation.is_cancelled]
        for generation in found:
            self._waiting.remove(generation)
            generation.end("interrupt")
        for sequence in tuple(self._running):
            if sequence.generation.is_cancelled:
                sequence.generation.end("interrupt")
                self._let_go(sequence)
                found.append(sequence.generation)
        return found

    def end_all(self, error: VkmoeError) -> None:
        """End every reply with an error, also those that wait. Mutates."""
        waiting = (*self._submitted, *self._waiting)
        self._submitted.clear()
        self._waiting.clear()
        for generation in waiting:
            generation.end("interrupt", error)
        self._fail(error)

    # ----- what is in a region, between steps -----

    def save(self, region: int, path: Path) -> StateCounts:
        """Write what is in a region to a file. The thread that steps calls this, between steps.

        Raises UsageError where a reply uses the region, StateFileError (see `save_region`).
        """
        return save_region(self._runner, self.regions, region, path)

    def restore(self, region: int, path: Path) -> StateCounts:
        """Fill a region with what `save` wrote to a file, to be called likewise. Mutates.

        Raises UsageError where a reply uses the region, StateFileError (see `restore_region`).
        """
        return restore_region(self._runner, self.regions, region, path)

    def erase(self, region: int) -> int:
        """Forget what is in a region, to be called likewise; return how many tokens. Mutates.

        Raises UsageError where a reply uses the region.
        """
        check_free(self.regions, region)
        n_rows = self.regions.n_rows(region)
        self.regions.go_back(region, 0)
        return n_rows

    # ----- which rows -----

    def _in_turn(self, reads: bool) -> list[_Sequence]:
        """List the sequences whose prompt is being read, or the others; the next one first."""
        return [
            sequence
            for sequence in self._running
            if (self.regions.n_rows(sequence.region) < sequence.generation.n_prompt) == reads
        ]

    def _admit(self) -> list[Generation]:
        """Give those that have waited longest the regions that are free.

        Returns those that ended, because memory has no room for their prompt.
        """
        refused = []
        while self._waiting and self.regions.n_free:
            generation = self._waiting.popleft()
            try:
                self._runner.make_room(generation.n_prompt)
            except OutOfMemoryError as error:
                generation.end("interrupt", error)
                refused.append(generation)
                continue
            # The last token runs in any case: its logits choose the first one of the reply.
            prefix = generation.tokens[: generation.n_prompt - 1]
            if generation.request.reads_all:
                prefix = []  # no row is used again: what it left is not known any more
            region = self.regions.take(prefix)
            sequence = _Sequence(generation, make_drafter(self._draft), region)
            self._running.append(sequence)
            generation.begin()
            generation.n_reused = generation.n_read = self.regions.keep(sequence.region, prefix)
        return refused

    def _end_without_room(self) -> list[Generation]:
        """End replies for which memory has no room any more, and return them."""
        ended = []
        for sequence in self._in_turn(reads=False):
            n_wanted = self.regions.n_rows(sequence.region) + self._runner.max_decode_rows
            try:
                self._runner.make_room(min(n_wanted, self._runner.ctx_size))
            except OutOfMemoryError as error:
                log.warning("a reply ends: %s", error)
                sequence.generation.end_for_room()
                self._let_go(sequence)
                ended.append(sequence.generation)
        return ended

    def _prompt_rows(self, reading: Sequence[_Sequence]) -> list[_Rows]:
        """Fill a batch with rows of prompts, in turn.

        A prompt that is scored has a batch of its own, as the head runs several times for it. Those
        whose embeddings are wanted have none beside others, as the head does not run.
        """
        parts: list[_Rows] = []
        n_rows, n_ends = self._runner.prompt_rows, self._runner.max_logit_rows
        embeds = bool(reading) and reading[0].generation.pool is not None
        for sequence in reading:
            generation, region = sequence.generation, sequence.region
            request, pool = generation.request, generation.pool
            joins = (pool is not None) == embeds and not (parts and request.scores_prompt)
            if n_rows and joins:
                prompt = generation.tokens[: generation.n_prompt]
                if not request.reads_all:
                    generation.n_reused += self.regions.share(region, prompt[:-1])
                first = self.regions.n_rows(region)
                rows = tuple(prompt[first : first + n_rows])
                if pool is not None:
                    parts.append(_Rows(sequence, first, rows, pool.n_wanted(first, len(rows))))
                    n_rows -= len(rows)
                    continue
                if request.scores_prompt:
                    return [_Rows(sequence, first, rows, len(rows))]
                ends = first + len(rows) == len(generation.tokens)
                if ends and not n_ends:
                    rows, ends = rows[:-1], False
                if rows:
                    parts.append(_Rows(sequence, first, rows, int(ends)))
                    n_rows, n_ends = n_rows - len(rows), n_ends - ends
        return parts

    def _later(self, parts: Sequence[_Rows], reading: Sequence[_Sequence]) -> tuple[int, ...]:
        """Return tokens of prompts that come in later batches, as far as that is known."""
        ends = {id(part.sequence): part.position + len(part.tokens) for part in parts}
        later: list[int] = []
        for sequence in sorted(reading, key=lambda each: id(each) in ends):  # whose turn it is next
            generation = sequence.generation
            first = ends.get(id(sequence), self.regions.n_rows(sequence.region))
            last = min(generation.n_prompt, first + MAX_LATER - len(later))
            later += generation.tokens[first:last]
        return tuple(later)

    def _decode_rows(self, writing: Sequence[_Sequence]) -> list[_Rows]:
        """Take the next row of the sequences whose turn it is, and guesses where there is room."""
        room = self._runner.max_decode_rows
        turn = writing[:room]
        parts: list[_Rows] = []
        for n_before, sequence in enumerate(turn):
            parts.append(self._rows_to_decode(sequence, room // (len(turn) - n_before)))
            room -= len(parts[-1].tokens)
        self._n_owed = max(0, self._n_owed - len(parts))
        return parts

    def _rows_to_decode(self, sequence: _Sequence, n_most: int) -> _Rows:
        """Make the rows of a sequence that decodes, one as a rule, and guesses."""
        generation, first = sequence.generation, self.regions.n_rows(sequence.region)
        rows = generation.tokens[first : first + n_most]
        if first + len(rows) < len(generation.tokens):  # the state could not stop where it should
            return _Rows(sequence, first, tuple(rows), 0)
        n_drafted = min(n_most - len(rows), generation.n_left - 1, self._runner.max_drafted)
        draft: list[int] = []
        if sequence.drafter is not None and n_drafted > 0:
            draft = sequence.drafter.draft(generation.tokens, n_drafted)
        return _Rows(sequence, first, (*rows, *draft), 1 + len(draft), len(draft))

    # ----- running them -----

    def _run_or_end(self, parts: Sequence[_Rows], batch: TokenBatch) -> None:
        """Run a batch; where that is broken off, its replies end there."""
        try:
            self._run(parts, batch)
        except VkmoeError:
            raise  # which ends more than these
        except BaseException:
            for part in parts:
                part.sequence.generation.end("interrupt")
                self._let_go(part.sequence)
            raise

    def _run(self, parts: Sequence[_Rows], batch: TokenBatch) -> None:
        """Run a batch, and give every sequence what it says of its rows."""
        result = self._runner.run(batch)
        self.n_runs, self.n_turns = self.n_runs + 1, self.n_turns + len(parts)
        self.regions.note(batch)
        if self.after_run is not None:
            self.after_run(batch, result)
        n_before = n_rows = 0
        for part in parts:
            routing = result.routing[n_rows : n_rows + len(part.tokens)]
            part.sequence.generation.note_routing(part.position, routing)
            if part.sequence.generation.pool is not None:
                self._receive_states(part, n_rows + len(part.tokens) - part.n_logits)
            else:
                self._receive(part, result, n_before)
            n_before, n_rows = n_before + part.n_logits, n_rows + len(part.tokens)
            self._end_turn(part.sequence)
        if self._draft == "mtp":
            self._guess(parts, batch.phase)

    def _guess(self, parts: Sequence[_Rows], phase: Phase) -> None:
        """Have a layer of the model guess what follows the last token of each sequence.

        It reads all rows of prompts, also those that nothing follows yet: later ones look back.
        """
        following: list[int] = []
        wanted: list[bool] = []
        asking: list[_Sequence] = []
        for part in parts:
            generation, first, n_rows = part.sequence.generation, part.position, len(part.tokens)
            known = generation.tokens[first + 1 : first + 1 + n_rows]
            following += [*known, *(0 for _ in range(n_rows - len(known)))]
            asks = generation.n_generated > 0 and generation.n_left > 1 and not generation.is_done
            last = len(generation.tokens) - 2 - first  # the row behind which the last token is
            wanted += [asks and row == last for row in range(n_rows)]
            asking += [part.sequence] * (asks and 0 <= last < n_rows)
        if not asking and phase == "decode":
            return
        guesses = self._runner.guess(following, wanted, self._runner.n_guesses)
        for sequence, guessed in zip(asking, guesses, strict=True):
            assert isinstance(sequence.drafter, Ahead)
            sequence.drafter.guessed = guessed

    def _receive(self, part: _Rows, result: RunResult, n_before: int) -> None:
        """Choose tokens by the logits of a part, of which `n_before` in the batch come first."""
        generation, region = part.sequence.generation, part.sequence.region
        drafter = part.sequence.drafter
        drafted = part.tokens[len(part.tokens) - part.n_drafted :]
        if part.position < generation.n_prompt:
            generation.n_read = min(self.regions.n_rows(region), generation.n_prompt)
        else:
            generation.n_decode_steps += 1
            generation.n_drafted += part.n_drafted
        n_right = 0  # of the guesses
        position = part.position + len(part.tokens) - part.n_logits
        for top, fetch in heads(self._runner, result, part.n_logits, n_before):
            position += 1
            try:
                if position < generation.n_prompt:
                    generation.score(top, fetch)
                    continue
                token = generation.choose(top, fetch)
            except VkmoeError as error:  # of this sequence's logits: the others go on
                generation.end("interrupt", error)
                return
            if generation.is_done or n_right == part.n_drafted or token != drafted[n_right]:
                break
            n_right += 1
        if drafter is not None and drafted:
            generation.n_accepted += n_right
            drafter.learn(len(drafted), n_right)
            n_rows = part.position + len(part.tokens) - len(drafted) + n_right
            if n_rows < self.regions.n_rows(region):
                self.regions.go_back(region, n_rows)

    def _receive_states(self, part: _Rows, first: int) -> None:
        """Take the states of a part's rows that want any, of which one is the batch's `first`."""
        generation = part.sequence.generation
        generation.n_read = self.regions.n_rows(part.sequence.region)
        if not part.n_logits:
            return
        states = self._runner.states(first, part.n_logits)
        try:
            generation.take_states(states)
        except VkmoeError as error:  # of this sequence's states: the others go on
            generation.end("interrupt", error)

    def _end_turn(self, sequence: _Sequence) -> None:
        """Put a sequence behind the others, and let go of it where its reply has ended. Mutates."""
        others = [each for each in self._running if each is not sequence]
        self._running = [*others, sequence]  # at once, as other threads look
        if sequence.generation.is_done:
            self._let_go(sequence)

    def _let_go(self, sequence: _Sequence) -> None:
        """Free the region of a sequence. May be called again. Mutates."""
        if sequence in self._running:
            self._running.remove(sequence)
            # Few texts are embedded again: conversations need the room.
            self.regions.release(sequence.region, keeps=sequence.generation.pool is None)

    def _fail(self, error: VkmoeError) -> list[Generation]:
        """End all replies that have a region, whose rows are worth nothing now."""
        failed = tuple(self._running)
        for sequence in failed:
            sequence.generation.end("interrupt", error)
            self._let_go(sequence)
        self.regions.forget()
        return [sequence.generation for sequence in failed]


def _batch(parts: Sequence[_Rows], phase: Phase, later: tuple[int, ...]) -> TokenBatch:
    """Put rows of several sequences one behind the other."""
    return TokenBatch(
        tokens=tuple(token for part in parts for token in part.tokens),
        positions=tuple(part.position + i for part in parts for i in range(len(part.tokens))),
        sequences=tuple(part.sequence.region for part in parts for _ in part.tokens),
        wants_logits=tuple(
            i >= len(part.tokens) - part.n_logits for part in parts for i in range(len(part.tokens))
        ),
        phase=phase,
        later=later,
        wants_states=any(part.sequence.generation.pool is not None for part in parts),
    )
