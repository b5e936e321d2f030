"""Runs a model on a thread of its own: loads it, lets replies go on, one batch after the other.

It owns the model from then on. Between two submits it does what other threads ask for, and sees
which replies were cancelled. How replies are followed on an event loop is the subject of
following.py.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal, TypeVar

from vkmoe.errors import DeviceLostError, UnavailableError, VkmoeError
from vkmoe.experts.store.memory_watch import WATCH_SECONDS
from vkmoe.generate.constraint import Constraints
from vkmoe.generate.loop import Generation, Request
from vkmoe.generate.regions.kept_prompts import KeptPrompt
from vkmoe.llm.llm import LLM

State = Literal["asleep", "loading", "ready", "failed", "ended"]
Result = TypeVar("Result")

log = logging.getLogger("vkmoe")


class LoadingEnded(Exception):
    """Ends the loading of a model that nothing will use any more."""


class EngineThread:
    """Serves replies of one model, which `load` opens, on a thread of its own.

    `submit`, `wake` and `between` may be called on any thread.
    """

    def __init__(
        self,
        load: Callable[[], LLM],
        max_queue: int | None,
        restarts: int = 1,
        prepares_forms: bool = True,
        is_asleep: bool = False,
    ) -> None:
        """Begin with nothing; at most `max_queue` replies wait for their turn, or as many as come.

        After a lost device the model is loaded again, up to `restarts` times. `prepares_forms`:
        the first reply of a given form need not wait for what all forms need. With `is_asleep` the
        model is loaded when `wake_up` asks for it, and a failure to load leaves it asleep.
        """
        self.state: State = "asleep" if is_asleep else "loading"
        self.error: VkmoeError | None = None  # why it failed
        self.n_restarts = 0
        self.first: Future[LLM] = Future()  # the model, as soon as it is there
        self._load, self._max_queue = load, max_queue
        self._restarts, self._prepares_forms = restarts, prepares_forms
        self._llm: LLM | None = None
        self._n_ran = 0, 0  # batches, and sequences in them, of models that were let go
        self._listeners: dict[Generation, Callable[[], None]] = {}
        self._calls: deque[tuple[Callable[[LLM], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._is_ending = False
        self._may_fail = is_asleep  # in loading: it stays asleep then, and may be tried again
        self._wants_model = not is_asleep  # or is to sleep, once nothing runs
        self._waking: list[Future[LLM]] = []  # until the model is there
        self._dozing: list[Future[None]] = []  # until it is not
        self._thread = threading.Thread(target=self._run, name="engine")

    def start(self) -> None:
        """Begin to load the model."""
        self._thread.start()

    # ----- on any thread -----

    @property
    def llm(self) -> LLM:
        """Return the model, of which other threads may read what never changes.

        Raises UnavailableError while there is none.
        """
        llm = self._llm
        if self.state == "ready" and llm is not None:
            return llm
        if self.state in ("loading", "asleep"):
            raise UnavailableError("Loading model")
        reason = self.error or "it is being closed"
        raise UnavailableError(f"the model is not there: {reason}", seconds=30)

    @property
    def has_failed(self) -> bool:
        """Say whether there is no model, and there will be none."""
        return self.state == "failed" and not self._thread.is_alive()

    @property
    def gave_up(self) -> bool:
        """Say whether it ends, or the model could not be loaded at all."""
        first = self.first
        return self._is_ending or (first.done() and first.exception() is not None)

    @property
    def must_be_waited_for(self) -> bool:
        """Say whether the model sleeps, or is being loaded after it slept."""
        return self.state == "asleep" or (self.state == "loading" and self._may_fail)

    @property
    def n_running(self) -> int:
        """Count the replies that have a region of the KV caches."""
        return len(self.running)

    @property
    def running(self) -> dict[int, Generation]:
        """Return the replies that run, by the regions that they have."""
        llm = self._llm
        return dict(llm.scheduler.running) if llm is not None else {}

    @property
    def kept_prompts(self) -> Sequence[KeptPrompt]:
        """List the prompts that left the KV caches, and are kept in host memory."""
        llm = self._llm
        return llm.scheduler.regions.kept.prompts if llm is not None else ()

    @property
    def n_waiting(self) -> int:
        """Count the replies that wait for a region."""
        llm = self._llm
        return llm.scheduler.n_waiting if llm is not None else 0

    @property
    def n_runs(self) -> tuple[int, int]:
        """Count the batches that ran, and the sequences in them, since the server began."""
        (n_runs, n_turns), llm = self._n_ran, self._llm
        if llm is not None:
            n_runs, n_turns = n_runs + llm.scheduler.n_runs, n_turns + llm.scheduler.n_turns
        return n_runs, n_turns

    def submit(self, request: Request, on_news: Callable[[], None]) -> Generation:
        """Let a reply begin; `on_news` is called on the engine's thread whenever it went on.

        Raises UnavailableError where there is no model, or too many replies wait.
        """
        llm = self.llm
        if self._is_ending:
            raise UnavailableError("the model is being closed", seconds=30)
        self._check_queue(llm)
        generation = Generation(request, llm.tokenizer, llm.engine.ctx_size)
        with self._changed:
            if self._llm is not llm:  # which ended just now, with all its replies
                _ = self.llm
                raise UnavailableError("the model was loaded again")
            self._listeners[generation] = on_news
            llm.scheduler.submit(generation)
            self._changed.notify_all()
        return generation

    def _check_queue(self, llm: LLM) -> None:
        most = self._max_queue
        if most is None or self.n_running + self.n_waiting < llm.engine.n_regions + most:
            return
        raise UnavailableError(
            f"{most} request{'s' * (most != 1)} wait already",
            "--max-queue allows no more",
            code="queue_full",
        )

    def wake(self) -> None:
        """Have the thread look at what was submitted or cancelled."""
        with self._changed:
            self._changed.notify_all()

    def between(self, function: Callable[[LLM], Result]) -> Future[Result]:
        """Call a function with the model between two submits. Raises UnavailableError."""
        future: Future[Result] = Future()
        with self._changed:
            if self.state != "ready":
                _ = self.llm  # says why
            self._calls.append((function, future))
            self._changed.notify_all()
        return future

    def wake_up(self) -> Future[LLM]:
        """Load the model, unless it is there. The future raises VkmoeError where that fails."""
        future: Future[LLM] = Future()
        with self._changed:
            self._wants_model = True
            if self.state == "ready" and self._llm is not None:
                future.set_result(self._llm)
            elif self._ends or self.state in ("failed", "ended"):
                future.set_exception(self.error or UnavailableError("the model is being closed"))
            else:
                self._waking.append(future)
            self._changed.notify_all()
        return future

    def sleep(self) -> Future[None]:
        """Unload the model once nothing runs; the future is done when its memory is free."""
        future: Future[None] = Future()
        with self._changed:
            self._wants_model = False
            if self.state == "ready":
                self._dozing.append(future)
            else:
                future.set_result(None)
            self._changed.notify_all()
        return future

    def end(self) -> None:
        """Take no more requests, and end when those that are there have. Does not wait."""
        self._is_ending = True
        self.wake()

    def cancel_all(self) -> None:
        """Let all replies end where they are."""
        for generation in tuple(self._listeners):
            generation.cancel()
        self.wake()

    def join(self) -> None:
        """Wait until the thread has ended, with the model closed and its records written."""
        self._thread.join()

    # ----- on the thread -----

    def loaded(self, done: int, total: int) -> None:
        """Note how much is loaded, as `progress` of LLM. Raises LoadingEnded once it is to end."""
        if self._ends:
            raise LoadingEnded

    @property
    def _ends(self) -> bool:
        """Say whether to end: it was asked for, or the program is over."""
        return self._is_ending or not threading.main_thread().is_alive()

    def _run(self) -> None:
        try:
            while self._is_wanted():
                if not self._serve_once():
                    continue
                if self.n_restarts == self._restarts:
                    break
                self.n_restarts += 1
                self.error, self.state = None, "loading"
                log.warning("the device was lost: loading the model again")
        except LoadingEnded:
            log.info("the model was not loaded: it is not needed any more")
        except VkmoeError as error:
            self.error = error
        except Exception as error:
            log.exception("internal error")
            self.error = VkmoeError(f"internal error, {type(error).__name__}: {error}")
        finally:
            with self._changed:
                self.state = "failed" if self.error is not None else "ended"
                self._llm = None
            self._let_go(self.error)

    def _is_wanted(self) -> bool:
        """Wait until the model is to be loaded; False where the thread is to end instead."""
        with self._changed:
            while not (self._wants_model or self._ends):
                self._changed.wait(WATCH_SECONDS)
            if self._ends and self.state == "asleep":
                return False
            if self.state == "asleep":
                self.state = "loading"
        return self.state == "loading"

    def _loaded(self) -> LLM | None:
        """Load the model. None where it failed, and may be tried again."""
        try:
            return self._load()
        except VkmoeError as error:
            if not self._may_fail:
                raise
            with self._changed:
                self.state, self._wants_model = "asleep", False
                waking, self._waking = self._waking, []
            _settle(waking, error)
            return None

    def _serve_once(self) -> bool:
        """Load the model, serve it to the end or until it sleeps; return if the device was lost."""
        llm = self._loaded()
        if llm is None:
            return False
        is_lost = False
        preparing = threading.Thread(target=_prepare, args=(llm.constraints,), name="forms")
        try:
            with self._changed:
                self._llm, self.state = llm, "ready"
                waking, self._waking = self._waking, []
            _settle([*waking, self.first], llm)
            if self._prepares_forms:
                preparing.start()
            self._serve(llm)
        except DeviceLostError as error:
            is_lost = True
            with self._changed:
                self._llm, self.state, self.error = None, "failed", error
            self._let_go(error)
        finally:
            n_runs, n_turns = self._n_ran
            self._n_ran = n_runs + llm.scheduler.n_runs, n_turns + llm.scheduler.n_turns
            try:
                llm.close()
            except VkmoeError as error:
                if self._ends and not is_lost:  # else it may be loaded again
                    raise
                log.warning("%s", error)
        with self._changed:
            dozing, self._dozing = self._dozing, []
        _settle(dozing, None)
        return is_lost

    def _serve(self, llm: LLM) -> None:
        """Let replies go on until the end was asked for. Raises DeviceLostError."""
        scheduler = llm.scheduler
        while True:
            llm.engine.watch_memory()
            with self._changed:
                is_idle = not (self._calls or scheduler.has_work)
                if is_idle and not self._wants_model and not self._ends:
                    self._llm, self.state, self._may_fail = None, "asleep", True
                    return
                if is_idle and not self._ends:
                    self._changed.wait(WATCH_SECONDS)
            while self._calls:
                _answer(*self._calls.popleft(), llm)
            if not scheduler.has_work:
                if self._ends:
                    return
                continue
            news = scheduler.step()
            for generation in news:  # a lost device is news once the model counts as lost
                if isinstance(generation.error, DeviceLostError):
                    raise generation.error
            for generation in news:
                self._tell(generation)
            if not scheduler.has_work:
                llm.engine.settle()

    def _tell(self, generation: Generation) -> None:
        listener = self._listeners.get(generation)
        if generation.is_done:
            self._listeners.pop(generation, None)
        if listener is not None:
            listener()

    def _let_go(self, error: VkmoeError | None) -> None:
        """End what is still there: replies, and calls that nothing will answer."""
        reason = error or UnavailableError("the model is being closed")
        with self._changed:
            waking, self._waking = self._waking, []
            dozing, self._dozing = self._dozing, []
            calls = [future for _, future in self._calls]
            self._calls.clear()
        _settle([*waking, self.first, *calls], reason)
        _settle(dozing, None)
        for generation in tuple(self._listeners):
            generation.end("interrupt", reason)
            self._tell(generation)


def _prepare(constraints: Constraints) -> None:
    """Build the vocabulary of forms before a request needs it; without llguidance, nothing."""
    with suppress(VkmoeError):
        constraints.prepare()


def _settle(futures: Sequence[Future[Any]], result: Any) -> None:
    """Give futures a result, or an error; those that are done, or cancelled, stay as they are."""
    for future in futures:
        if future.done() or not future.set_running_or_notify_cancel():
            continue
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)


def _answer(function: Callable[[LLM], Any], future: Future[Any], llm: LLM) -> None:
    """Call a function and put what it gives, or raises, into a future that may be cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(llm)
    except DeviceLostError as error:
        future.set_exception(error)
        raise
    except Exception as error:
        future.set_exception(error)
    else:
        with suppress(Exception):
            future.set_result(result)
