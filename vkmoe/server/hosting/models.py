"""Holds the models of a server: loads the one that a request names, and makes room for it.

A request has its model from `use` until it is answered; no model is unloaded before. Models are
unloaded, the least recently used first, where the plan of the one that is wanted asks for their
memory, or after some time without requests (`keep_seconds`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from vkmoe.errors import VkmoeError
from vkmoe.facts import MemoryPlan
from vkmoe.server.errors import api_error, unavailable, unknown_model
from vkmoe.server.hosting.roster import bare_name
from vkmoe.server.service import Service

_LOOK_S = 0.25  # between two looks for models that nothing uses
_FRESH_S = 1.0  # between two looks for models that come and go

log = logging.getLogger("vkmoe")

Makers = Mapping[str, Callable[[], "Hosted"]]  # of models, by their names


@dataclass(eq=False)
class Hosted:
    """Holds one model of a server, which may be loaded or not."""

    service: Service
    has_room: Callable[[Sequence[MemoryPlan]], bool]  # beside others with these plans
    n_users: int = 0  # requests that are being answered with it
    used_at: float = field(default_factory=time.monotonic)
    keep_seconds: float = field(init=False)  # how long it stays loaded without a request
    is_leaving: bool = False  # it is unloaded as soon as nothing uses it
    released: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.keep_seconds = self.usual_seconds

    @property
    def name(self) -> str:
        """Return the name that clients know it by."""
        return self.service.alias

    @property
    def names(self) -> set[str]:
        """Return all names that clients know it by."""
        return {self.name, *self.service.aliases}

    def is_called(self, name: str) -> bool:
        """Say whether a name is this model's, with or without a tag."""
        return bare_name(name) in map(bare_name, self.names)

    @property
    def is_there(self) -> bool:
        """Say whether it may be used at once."""
        return self.service.engine.state == "ready" and not self.is_leaving

    @property
    def usual_seconds(self) -> float:
        """Return how long it stays loaded without a request, unless the last one set that."""
        seconds = self.service.settings.sleep_idle_seconds
        return seconds if seconds >= 0 else math.inf

    @property
    def seconds_left(self) -> float:
        """Return how long it stays loaded if no request comes; 0 or less: it may be unloaded."""
        idle = 0.0 if self.n_users else time.monotonic() - self.used_at
        return self.keep_seconds - idle

    @property
    def is_idle(self) -> bool:
        """Say whether it stayed long enough without a request."""
        return self.is_there and not self.n_users and self.seconds_left <= 0


class Models:
    """Lends the models of a server to requests. All methods are called on the event loop."""

    def __init__(
        self, hosted: Sequence[Hosted], most: int = 0, look: Callable[[], Makers] | None = None
    ) -> None:
        """Lend these. At most `most` are loaded together; 0: as many as have room.

        `look` says which models there are now, where they may come and go (`renew`).
        """
        self.hosted, self._most, self._look = list(hosted), most, look
        self._looked_at = time.monotonic()
        self._swaps = asyncio.Lock()  # its holder loads and unloads
        self._swapping = set[asyncio.Task[None]]()  # so that none is collected before its end
        self._n_waiting = 0  # requests whose model is not there
        settings = hosted[0].service.settings
        self._max_queue = settings.max_queue
        self._patience = settings.timeout or None  # seconds to wait for a model

    @property
    def is_one(self) -> bool:
        """Say whether there is one model, which may be called by any name."""
        return len(self.hosted) == 1

    def has(self, name: str) -> bool:
        """Say whether one of the models has this name."""
        return any(each.is_called(name) for each in self.hosted)

    def found(self, name: str | None) -> Hosted:
        """Find a model by its name; without one, the one that was used last.

        Raises ApiError for a name of none.
        """
        if self.is_one or not name:
            return max(self.hosted, key=lambda each: (each.is_there, each.used_at))
        for each in self.hosted:
            if each.is_called(name):
                return each
        raise unknown_model(name, (each.name for each in self.hosted))

    async def renew(self) -> None:
        """Take in models that appeared, and leave out those that vanished and sleep. Mutates.

        It looks once a second at most. Where nothing is found all stay.
        """
        if self._look is None or time.monotonic() - self._looked_at < _FRESH_S:
            return
        self._looked_at = time.monotonic()
        with suppress(VkmoeError):
            there = await asyncio.to_thread(self._look)
            known = {each.name for each in self.hosted}
            new = [make() for name, make in there.items() if name not in known]
            gone = [
                x for x in self.hosted if x.name not in there and x.service.engine.state == "asleep"
            ]
            self.hosted = [*(x for x in self.hosted if x not in gone), *new]
            for each in new:
                each.service.engine.start()
            for each in gone:
                each.service.engine.end()

    async def use(self, request: Request, name: str | None) -> Service:
        """Lend a model until the request is answered; load it first if that has to be.

        Afterwards it stays loaded as long as --sleep-idle-seconds says, unless the request sets
        its `keep_seconds`.

        Raises ApiError for a name of none, for a model that cannot be loaded or is loaded for the
        first time, and where too many wait or waiting takes too long.
        """
        hosted = self.found(name)
        if hosted.is_leaving or hosted.service.engine.must_be_waited_for:
            await self._wait_for(hosted, request)
        else:
            _lend(hosted, request)
        return hosted.service

    def release(self, hosted: Hosted) -> None:
        """Take back what `use` lent."""
        hosted.n_users, hosted.used_at = hosted.n_users - 1, time.monotonic()
        if not hosted.n_users:
            hosted.released.set()

    async def _wait_for(self, hosted: Hosted, request: Request) -> None:
        """Lend a model that is not there, once it is. Raises ApiError."""
        if self._n_waiting >= max(self._max_queue, 1):  # without one, no model would be loaded
            raise unavailable(
                f"requests that wait for a model: {self._n_waiting}; --max-queue allows no more",
                code="queue_full",
            )
        self._n_waiting += 1
        lent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        swap = asyncio.create_task(self._swap_in(hosted, request, lent))
        self._swapping.add(swap)
        swap.add_done_callback(self._swapping.discard)
        try:
            async with asyncio.timeout(self._patience):
                await lent
        except TimeoutError:
            raise unavailable(
                f"{hosted.name} was not loaded in time: see --timeout", 30, code="timeout"
            ) from None
        except VkmoeError as error:
            raise api_error(error) from error
        finally:
            self._n_waiting -= 1

    async def _swap_in(self, hosted: Hosted, request: Request, lent: asyncio.Future[None]) -> None:
        """Load a model and lend it, before another swap can unload it again.

        It ends whole, also if the request gives up meanwhile; it does not begin if that gave up.
        """
        async with self._swaps:
            error: Exception | None = None
            if not (hosted.is_there or lent.done()):
                try:
                    await self._bring(hosted)
                except Exception as failure:
                    error = failure
            if lent.done():
                return
            if error is not None:
                lent.set_exception(error)
            else:
                _lend(hosted, request)
                lent.set_result(None)

    async def _bring(self, hosted: Hosted) -> None:
        """Load a model, after those were unloaded whose memory it needs. Raises VkmoeError."""
        while (others := self._loaded(besides=hosted)) and not await self._fits(hosted, others):
            await self._unload(others[0])
        log.info("loading %s", hosted.name)
        await asyncio.wrap_future(hosted.service.engine.wake_up())

    def _loaded(self, besides: Hosted) -> list[Hosted]:
        """List the other models that are loaded, the least recently used first."""
        found = [each for each in self.hosted if each is not besides and each.is_there]
        return sorted(found, key=lambda each: (each.n_users > 0, each.used_at))

    async def _fits(self, hosted: Hosted, others: Sequence[Hosted]) -> bool:
        if self._most and len(others) >= self._most:
            return False
        plans = [each.service.engine.llm.plan for each in others]
        return await asyncio.to_thread(hosted.has_room, plans)

    async def _unload(self, hosted: Hosted) -> None:
        """Unload a model once the requests that use it are answered; new ones wait."""
        hosted.is_leaving = True
        try:
            while hosted.n_users:
                hosted.released.clear()
                await hosted.released.wait()
            log.info("unloading %s", hosted.name)
            with suppress(VkmoeError):  # a model that was lost meanwhile
                hosted.service.learn_facts()
            await asyncio.wrap_future(hosted.service.engine.sleep())
        finally:
            hosted.is_leaving = False

    # ----- for as long as the server runs -----

    def start(self) -> None:
        """Begin to load what is to be there from the start."""
        for each in self.hosted:
            each.service.engine.start()

    async def rest(self) -> None:
        """Unload models that were kept long enough. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for each in self.hosted:
                if each.is_idle:
                    async with self._swaps:
                        if each.is_idle:
                            await self._unload(each)

    def end(self) -> None:
        """Take no more requests, and end when those that are there have. Does not wait."""
        for each in self.hosted:
            each.service.engine.end()

    def cancel_all(self) -> None:
        """Let all replies end where they are."""
        for each in self.hosted:
            each.service.engine.cancel_all()

    async def join(self) -> None:
        """Wait until all models are closed and their records written."""
        for each in self.hosted:
            await asyncio.to_thread(each.service.engine.join)

    @property
    def errors(self) -> Iterator[VkmoeError]:
        """Yield what models failed with that are not tried again."""
        yield from (x.service.engine.error for x in self.hosted if x.service.engine.error)

    @property
    def has_failed(self) -> bool:
        """Say whether there is no model, and there will be none."""
        return all(each.service.engine.has_failed for each in self.hosted)


def _lend(hosted: Hosted, request: Request) -> None:
    """Count a request as a user of a model until `Lending` takes that back. Mutates both."""
    hosted.n_users, hosted.keep_seconds = hosted.n_users + 1, hosted.usual_seconds
    request.state.lent.append(hosted)


class Lending:
    """Takes the models back that a request was lent, once `app` has answered it."""

    def __init__(self, app: ASGIApp, models: Models) -> None:
        self._app, self._models = app, models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        lent = scope.setdefault("state", {})["lent"] = list[Hosted]()
        try:
            await self._app(scope, receive, send)
        finally:
            for hosted in lent:
                self._models.release(hosted)
