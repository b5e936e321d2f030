"""This module knows which tokens lie in each region of the KV caches, and which one a prompt gets.

It owns the order of regions and the rule of what may be used again. The rows themselves are the
model's (runner.py); when a prompt is admitted is the subject of scheduler.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vkmoe.batch import TokenBatch
from vkmoe.generate.regions.kept_prompts import KeptPrompts
from vkmoe.generate.runner import BatchRunner

# Positions beyond a region's own that make a copy worth its submit: a chunk of prompt rows costs
# about as much with one row as with this many.
_LEAST_COPIED = 32
# The part of a text that must be about to be lost for the whole to be kept in host memory: copying
# a row takes far less than computing it, but few texts come back.
_LEAST_LOST = 0.25


@dataclass
class _Region:
    """Holds what is known of one region."""

    tokens: list[int] = field(default_factory=list)  # one for each row that is in it
    n_prompt_rows: int = 0  # how many of them, from the start, were run as rows of a prompt
    is_taken: bool = False
    last_used: int = 0  # by the count of takes and releases


class Regions:
    """Gives each prompt the region that saves most of its rows.

    Rows of a prompt and rows that were decoded differ by rounding. A prompt goes on only from rows
    of the first kind: so its reply is the same wherever it is generated.
    """

    def __init__(self, runner: BatchRunner) -> None:
        self._runner = runner
        self._regions = [_Region() for _ in range(runner.n_regions)]
        self._clock = 0
        self.kept = KeptPrompts(runner)  # those that left their regions

    def __len__(self) -> int:
        return len(self._regions)

    @property
    def n_free(self) -> int:
        """Return how many regions no sequence has."""
        return sum(not region.is_taken for region in self._regions)

    def tokens(self, region: int) -> tuple[int, ...]:
        """Return the tokens whose rows are in a region, in order."""
        return tuple(self._regions[region].tokens)

    def n_prompt_rows(self, region: int) -> int:
        """Return how many of a region's rows, from the first on, were run as rows of a prompt."""
        return self._regions[region].n_prompt_rows

    def is_taken(self, region: int) -> bool:
        """Say whether a sequence has a region."""
        return self._regions[region].is_taken

    def n_rows(self, region: int) -> int:
        """Return how many rows are in a region: the next one's position."""
        return len(self._regions[region].tokens)

    def take(self, tokens: Sequence[int]) -> int:
        """Choose a free region for a prompt that may begin with rows of `tokens`. Mutates.

        Returns its index; `keep` is to follow. It is the region with the longest common prefix,
        unless most of what it holds would be lost, or host memory has more of the prompt: then, or
        where nothing is common, the one unused for longest. Must hold: one is free.
        """
        _, n_kept = self.kept.find(tokens)
        free = [index for index, region in enumerate(self._regions) if not region.is_taken]
        common = {index: self._n_common(index, tokens) for index in free}
        keeping = [
            i
            for i in free
            if common[i] and 2 * common[i] >= len(self._usable(i))
            if common[i] + _LEAST_COPIED > n_kept
        ]
        chosen = min(
            keeping or free,
            key=lambda i: (-common[i] if keeping else 0, self._regions[i].last_used),
        )
        self._touch(chosen)
        self._regions[chosen].is_taken = True
        return chosen

    def keep(self, region: int, tokens: Sequence[int]) -> int:
        """Have a region hold nothing but rows that a prompt of `tokens` may use; return how many.

        A text of which much would be lost goes to host memory, from where rows come back that
        regions do not have. Mutates.
        """
        others = (i for i in range(len(self._regions)) if i != region)
        n_shared = max((self._n_common(i, tokens) for i in others), default=0)
        n_own = self._n_common(region, tokens)
        prompt, n_kept = self.kept.find(tokens)
        if prompt is None or n_kept <= max(n_shared, n_own):
            self.let_leave(region, n_own)
            self.go_back(region, n_own)
            return self.n_rows(region)
        with prompt.spared():
            self.let_leave(region, n_own)
        self.go_back(region, n_own)
        n_least = self.n_rows(region) + _LEAST_COPIED
        if n_rows := self.kept.bring_back(prompt, region, n_kept, n_least):
            self.hold(region, tokens[:n_rows], n_rows)
        return self.n_rows(region)

    def let_leave(self, region: int, n_own: int) -> None:
        """Keep a region's text in host memory if much of it is lost without it. Mutates.

        The first `n_own` rows stay in the region.
        """
        usable = self._usable(region)
        if len(usable) - n_own >= max(_LEAST_COPIED, _LEAST_LOST * len(usable)):
            self.kept.keep(region, usable)

    def release(self, region: int, keeps: bool = True) -> None:
        """Make a region free. Mutates.

        What it holds may be used again, unless it `keeps` nothing: then it is the next one that a
        prompt gets which has nothing in common with any.
        """
        held = self._regions[region]
        held.is_taken = False
        self._touch(region)
        if not keeps:
            self.go_back(region, 0)
            held.last_used = 0

    def share(self, region: int, tokens: Sequence[int]) -> int:
        """Copy rows of `tokens` into a region where another holds enough more of them. Mutates.

        Returns how many rows that saves. Must hold: all that is in the region begins `tokens`.
        """
        n_own = self.n_rows(region)
        others = [index for index in range(len(self._regions)) if index != region]
        common = {index: self._n_common(index, tokens) for index in others}
        source = max(others, key=common.__getitem__, default=region)
        n_common = common.get(source, 0)
        if n_common < n_own + _LEAST_COPIED:
            return 0
        n_common = self._runner.copy_region(source, region, n_common, n_own + _LEAST_COPIED)
        if not n_common:
            return 0
        n_prompt_rows = min(self._regions[source].n_prompt_rows, n_common)
        self.hold(region, tokens[:n_common], n_prompt_rows)
        return n_common - n_own

    def hold(self, region: int, tokens: Sequence[int], n_prompt_rows: int) -> None:
        """Note that a region has the rows of `tokens`. Mutates.

        The first `n_prompt_rows` of them were run as rows of a prompt.
        """
        held = self._regions[region]
        held.tokens[:], held.n_prompt_rows = tokens, n_prompt_rows

    def go_back(self, region: int, n_rows: int) -> None:
        """Forget the rows of a region from `n_rows` on, or from where its state can stop."""
        held = self._regions[region]
        del held.tokens[self._runner.rewind(region, n_rows) :]
        held.n_prompt_rows = min(held.n_prompt_rows, len(held.tokens))

    def note(self, batch: TokenBatch) -> None:
        """Note the rows of a batch that was run. Mutates."""
        rows = zip(batch.tokens, batch.positions, batch.sequences, strict=True)
        for token, position, region in rows:
            held = self._regions[region]
            assert position == len(held.tokens), (position, region)
            held.n_prompt_rows += batch.phase == "prompt" and held.n_prompt_rows == position
            held.tokens.append(token)

    def forget(self) -> None:
        """Have no prompt use any rows that are there now. Mutates.

        A sequence goes on from those of its own region.
        """
        for index, region in enumerate(self._regions):
            region.n_prompt_rows = 0
            if not region.is_taken:
                self.go_back(index, 0)

    def _n_common(self, region: int, tokens: Sequence[int]) -> int:
        """Count the leading rows of a region that a prompt of `tokens` may use."""
        n_common = 0
        for ours, theirs in zip(tokens, self._usable(region), strict=False):
            if ours != theirs:
                break
            n_common += 1
        return n_common

    def _usable(self, region: int) -> list[int]:
        """List the tokens of the leading rows that a prompt may go on from."""
        held = self._regions[region]
        return held.tokens[: held.n_prompt_rows]

    def _touch(self, region: int) -> None:
        self._clock += 1
        self._regions[region].last_used = self._clock
