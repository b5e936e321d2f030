"""Answers POST /slots/{id}: a conversation's state goes to a file and comes back, or is forgotten.

The forms are llama-server's. Files lie in the folder that --slot-save-path names, and nowhere else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vkmoe.errors import VkmoeError
from vkmoe.generate.regions.state_files import StateCounts
from vkmoe.llm import LLM
from vkmoe.server.api.shapes import SlotFileShape
from vkmoe.server.errors import ApiError, api_error
from vkmoe.server.fields import Body, body_of, checked, read_query
from vkmoe.server.openapi import described
from vkmoe.server.service import Service
from vkmoe.server.transport.sse import json_answer

Result = TypeVar("Result")


class _Action(Body):
    action: Literal["save", "restore", "erase"]


class _File(Body):
    filename: str = Field(pattern=r"^[\w.-]{1,200}$")


@described(SlotFileShape, query=_Action, statuses=(400, 500, 501, 503))
async def act_on_slot(service: Service, request: HttpRequest) -> Response:
    """Save a sequence's state to a file (`filename`), restore it, or forget it."""
    action, slot = read_query(request, _Action).action, request.path_params["slot"]
    region = int(slot) if slot.isdecimal() and len(slot) < 9 else -1
    if not 0 <= region < service.learn_facts().n_slots:
        raise ApiError(400, f"there is no slot {slot}", param="id_slot")
    if action == "erase":
        n_tokens = await _between(service, lambda llm: llm.scheduler.erase(region))
        return json_answer({"id_slot": region, "n_erased": n_tokens})
    path = await _path(service, request)
    began = time.perf_counter()

    def move(llm: LLM) -> StateCounts:
        scheduler = llm.scheduler
        return (scheduler.save if action == "save" else scheduler.restore)(region, path)

    counts = await _between(service, move)
    names = ("n_saved", "n_written") if action == "save" else ("n_restored", "n_read")
    return json_answer(
        {
            "id_slot": region,
            "filename": path.name,
            names[0]: counts.n_tokens,
            names[1]: counts.n_bytes,
            "timings": {f"{action}_ms": 1e3 * (time.perf_counter() - began)},
        }
    )


async def _path(service: Service, request: HttpRequest) -> Path:
    """Return the file that a request names. Raises ApiError for one that would lie elsewhere."""
    folder = service.settings.slot_save_path
    if folder is None:
        raise ApiError(501, "this server saves no slots: start it with --slot-save-path FOLDER")
    name = checked(_File, await body_of(request)).filename
    if set(name) == {"."}:
        raise ApiError(400, f"{name!r} is no name of a file", param="filename")
    return Path(folder) / name


async def _between(service: Service, do: Callable[[LLM], Result]) -> Result:
    """Do something with the model between two submits. Raises ApiError."""
    try:
        return await asyncio.wrap_future(service.engine.between(do))
    except VkmoeError as error:
        raise api_error(error) from error
