"""This module lets calls of several threads share one scheduler: they take turns between two runs.

A run brings on the replies of all calls that are under way, so that calls are joined wherever the
KV caches have regions for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple, TypeVar

from vkmoe.errors import GpuError, UsageError
from vkmoe.generate.loop import Generation, Piece
from vkmoe.generate.regions.regions import Regions
from vkmoe.generate.scheduler import Scheduler
from vkmoe.interrupts import acquired, at_checkpoints

Item = TypeVar("Item")


class CallNews(NamedTuple):
    """Holds the new part of a reply."""

    number: int  # of its prompt
    generation: Generation
    pieces: list[Piece]
    is_whole: bool  # nothing comes behind them, and no error


class Turns:
    """Keeps a scheduler to one thread at a time, and runs it for the replies of calls."""

    def __init__(self, scheduler: Scheduler, settle: Callable[[], None]) -> None:
        """Begin without a call. `settle` is called when no reply is under way any more."""
        self.scheduler, self._settle = scheduler, settle
        self._turn = threading.Lock()  # its holder alone uses engine and scheduler
        self._next = threading.Lock()  # its holder has the turn after this one
        self._is_closed = False
        self._was_left = False  # by a call whose replies nothing has freed yet

    def check_open(self) -> None:
        """Raise UsageError once the model is closed."""
        if self._is_closed:
            raise model_closed()

    @contextmanager
    def taken(self) -> Iterator[Scheduler]:
        """Keep other threads from engine and scheduler. Raises UsageError once this is closed."""
        with self._held():
            self.check_open()
            yield self.scheduler

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Do as `taken`, with every reply ended and no turn after this one."""
        with self._held():
            self._is_closed = True
            self.scheduler.end_all(model_closed())
            yield

    @contextmanager
    def free_region(self) -> Iterator[Regions]:
        """Do as `taken`, once a region of the KV cache is free; until then replies go on."""
        with self.taken() as scheduler:
            while not scheduler.regions.n_free:
                scheduler.step()
            yield scheduler.regions

    def one_by_one(self, found: Iterator[Item]) -> Iterator[Item]:
        """Take items that need a free region, each in a turn of its own."""
        while True:
            with self.free_region():
                item = next(found, None)
            if item is None:
                return
            yield item

    def run(self, generations: Sequence[Generation]) -> Generator[CallNews, None, None]:
        """Let replies begin and go on to their end; yield what is new of each.

        Raises the first error that ends one; however this ends, no reply is under way then.
        """
        try:
            with self.taken() as scheduler:
                for generation in generations:
                    scheduler.submit(generation)
            running = dict(enumerate(generations))
            while running:
                self._bring_on(running.values())
                for index, generation in tuple(running.items()):
                    is_done = generation.is_done  # first: another call may end it at any time
                    if is_done:
                        del running[index]
                    is_whole = is_done and generation.error is None
                    yield CallNews(index, generation, generation.take_pieces(), is_whole)
                    if generation.error is not None:
                        raise generation.error
        finally:
            for generation in generations:
                generation.cancel()
            self._let_go()

    # ----- inside -----

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the turn.

        A lock alone may be taken by the same thread again and again while others wait for it.
        """
        with at_checkpoints(), ExitStack() as turn:
            with acquired(self._next):
                turn.enter_context(acquired(self._turn))
            turn.callback(self._free_left)
            yield

    def _bring_on(self, generations: Collection[Generation]) -> None:
        """Run the model once, unless one of these has news, which another call's run may bring."""

        def has_news() -> bool:
            return any(each.is_done or each.pieces for each in generations)

        if not has_news():
            with self.taken() as scheduler:
                if not has_news():
                    assert scheduler.has_work, "replies were lost"
                    scheduler.step()

    def _let_go(self) -> None:
        """Free what cancelled replies have, or leave that to a call that has the turn.

        A dropped stream comes here from wherever Python collects it, even amid another call of the
        same thread: so this waits for no call of its own thread.
        """
        self._was_left = True
        if not self._turn.locked():
            with at_checkpoints(), self._turn:
                self._free_left()

    def _free_left(self) -> None:
        """Free what replies have whose call has ended. Must hold: the turn is taken."""
        if not self._was_left or self._is_closed:
            return
        self._was_left = False
        self.scheduler.sweep()
        if not self.scheduler.has_work:
            with suppress(GpuError):  # an error of the generation is the one to raise
                self._settle()


def model_closed() -> UsageError:
    """Say that a call came too late."""
    return UsageError("the model is closed", "load it again, or close it after its last use")
