"""Answers /experts and /why: what the experts do, what may be changed about them, where time goes.

What the answers hold is described in docs/expert-view.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vkmoe.choices import PolicyName
from vkmoe.errors import VkmoeError
from vkmoe.server.errors import api_error
from vkmoe.server.fields import Body, Many, read_body, read_query
from vkmoe.server.openapi import EVENTS, described
from vkmoe.server.service import Service
from vkmoe.server.transport.sse import EventStream, event, json_answer
from vkmoe.view.experts import ExpertView

Result = TypeVar("Result")
Key = Annotated[Many[int], Field(min_length=2, max_length=2)]  # layer, expert

MOST_RATE = 20  # events a second
_REST = 1.0  # seconds between events where nothing happens
_NEWS = {"heat", "slots"}  # what deltas have only where tokens ran, or something was changed


class _Pace(Body):
    rate: Annotated[int, Field(ge=1, le=MOST_RATE)] = 10  # events a second


class _Changes(Body):
    slots: Annotated[int, Field(ge=0)] | None = None
    policy: PolicyName | None = None
    pin: Many[Key] | None = None
    unpin: Many[Key] | None = None


async def _between(service: Service, ask: Callable[[ExpertView], Result]) -> Result:
    """Ask a view between two submits. Raises ApiError."""
    future = service.engine.between(lambda llm: ask(service.view_of(llm)))
    try:
        return await asyncio.wrap_future(future)
    except VkmoeError as error:
        raise api_error(error) from error


@described(dict[str, Any])
async def show_experts(service: Service, request: HttpRequest) -> Response:
    """Show where each expert is, how hot, and how often it was found."""
    return json_answer(await _between(service, lambda view: view.snapshot()))


@described(dict[str, Any], body=_Changes)
async def change_experts(service: Service, request: HttpRequest) -> Response:
    """Change slots, policy or pins; the text never changes."""
    asked = await read_body(request, _Changes)
    pin, unpin = ([(layer, e) for layer, e in keys or ()] for keys in (asked.pin, asked.unpin))
    return json_answer(
        await _between(
            service, lambda view: view.change(asked.slots, asked.policy, pin or None, unpin or None)
        )
    )


@described(dict[str, Any])
async def why(service: Service, request: HttpRequest) -> Response:
    """Say where the time of the last tokens went."""
    return json_answer(await _between(service, lambda view: view.why()))


@described(str, query=_Pace, media_types=(EVENTS,))
async def stream_experts(service: Service, request: HttpRequest) -> Response:
    """Send a snapshot, then what changes, up to `rate` times a second (20 at most)."""
    rate = read_query(request, _Pace).rate
    first = await _between(service, lambda view: view.snapshot())
    return EventStream(_changes(service, first, 1 / rate), named_errors=True)


async def _changes(service: Service, first: dict[str, Any], seconds: float) -> AsyncIterator[bytes]:
    """Yield the events of a stream; a snapshot again where the changes are not known any more.

    Where nothing happens, one a second is enough: rates of the last second fall to nothing.
    """
    yield event(first, "snapshot")
    version, passed = first["version"], 0.0  # seconds since the last event
    while True:
        await asyncio.sleep(seconds)
        passed += seconds
        found = await _between(service, partial(ExpertView.deltas, since=version))
        version = found.get("version", version)
        if "reset" in found:
            found = await _between(service, lambda view: view.snapshot())
            version, passed = found["version"], 0.0
            yield event(found, "snapshot")
        elif passed >= _REST or found["moves"] or not _NEWS.isdisjoint(found):
            passed = 0.0
            yield event(found, "delta")
