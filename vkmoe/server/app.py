"""Puts the answers of a server together: their paths, what becomes of errors, what is logged."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vkmoe import __version__
from vkmoe.errors import VkmoeError
from vkmoe.server.api import facts
from vkmoe.server.api.chat import answer_chat, count_chat
from vkmoe.server.api.completions import complete
from vkmoe.server.api.embeddings import embed, embed_natively
from vkmoe.server.api.experts import change_experts, show_experts, stream_experts, why
from vkmoe.server.api.messages import answer_message, count_tokens
from vkmoe.server.api.native import fill_in, go_on
from vkmoe.server.api.ollama import embeddings as ollama_embeddings
from vkmoe.server.api.ollama import models as ollama_models
from vkmoe.server.api.ollama import replies as ollama
from vkmoe.server.api.responses import answer_response, count_response
from vkmoe.server.api.slot_files import act_on_slot
from vkmoe.server.errors import ApiError, api_error, unknown_model
from vkmoe.server.fields import body_of
from vkmoe.server.hosting.models import Lending, Models
from vkmoe.server.hosting.peers import HOP, Peers
from vkmoe.server.openapi import JSON, described, document
from vkmoe.server.page_files import read_page
from vkmoe.server.replies import ClientGone, Reply
from vkmoe.server.service import Service
from vkmoe.server.transport.guard import Guard, error_response
from vkmoe.server.transport.sse import json_bytes

_CLIENT_GONE = 499  # what nginx calls a request whose client left before the answer
_MOST_METHOD, _MOST_PATH = 20, 200  # characters of a line in the log

Answer = Callable[[Service, Request], Awaitable[Response]]


@described(dict[str, Any], statuses=())
async def show_document(service: Service, request: Request) -> Response:
    """Describe all of these answers in the form of OpenAPI."""
    return Response(_document(), media_type=JSON)


@cache
def _document() -> bytes:
    return json_bytes(document(ANSWERS, __version__, OPEN_PATHS))


ANSWERS: tuple[tuple[str, str, Answer], ...] = (
    ("GET", "/health", facts.health),
    ("GET", "/v1/health", facts.health),
    ("GET", "/v1/models", facts.models),
    ("GET", "/models", facts.models),
    ("GET", "/v1/models/{name:path}", facts.one_model),
    ("POST", "/v1/chat/completions", answer_chat),
    ("POST", "/chat/completions", answer_chat),
    ("POST", "/v1/chat/completions/input_tokens", count_chat),
    ("POST", "/chat/completions/input_tokens", count_chat),
    ("POST", "/v1/completions", complete),
    ("POST", "/completion", go_on),
    ("POST", "/completions", go_on),
    ("POST", "/infill", fill_in),
    ("POST", "/v1/responses", answer_response),
    ("POST", "/responses", answer_response),
    ("POST", "/v1/responses/input_tokens", count_response),
    ("POST", "/responses/input_tokens", count_response),
    ("POST", "/v1/messages", answer_message),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("POST", "/v1/embeddings", embed),
    ("POST", "/embeddings", embed_natively),
    ("POST", "/embedding", embed_natively),
    ("POST", "/tokenize", facts.tokenize),
    ("POST", "/detokenize", facts.detokenize),
    ("GET", "/tokenizer_info", facts.tokenizer_info),
    ("POST", "/apply-template", facts.apply_template),
    ("GET", "/experts", show_experts),
    ("PATCH", "/experts", change_experts),
    ("GET", "/experts/stream", stream_experts),
    ("GET", "/why", why),
    ("GET", "/props", facts.props),
    ("GET", "/slots", facts.slots),
    ("POST", "/slots/{slot}", act_on_slot),
    ("GET", "/metrics", facts.metrics),
    ("GET", "/lora-adapters", facts.lora_adapters),
    ("POST", "/api/chat", ollama.chat),
    ("POST", "/api/embed", ollama_embeddings.embed_texts),
    ("POST", "/api/embeddings", ollama_embeddings.embed_text),
    ("POST", "/api/generate", ollama.generate),
    ("GET", "/api/tags", ollama_models.tags),
    ("POST", "/api/show", ollama_models.show),
    ("GET", "/api/ps", ollama_models.running),
    ("GET", "/api/version", ollama_models.version),
    ("GET", "/openapi.json", show_document),
)
# Of APIs that clients may expect here, what vkmoe does not do.
_NOT_THERE = (
    "/v1/audio/{rest:path}",
    "/v1/images/{rest:path}",
    "/v1/moderations",
    "/v1/files{rest:path}",
    "/v1/fine_tuning/{rest:path}",
    "/v1/batches{rest:path}",
    "/v1/rerank",
    *(f"/api/{name}" for name in ("pull", "push", "create", "copy", "delete", "blobs/{rest:path}")),
)
OPEN_PATHS = ("/health", "/v1/health", "/", "/page/")

log = logging.getLogger("vkmoe")


# Answers for which a model that sleeps is not woken.
_AT_REST: tuple[Answer, ...] = (
    *(facts.health, facts.models, facts.one_model, facts.props, facts.slots, facts.metrics),
    *(facts.tokenizer_info, facts.lora_adapters, show_document),
    *(ollama_models.tags, ollama_models.running, ollama_models.version),
)


def make_app(models: Models, peers: Peers | None = None) -> ASGIApp:
    """Make the application; its start loads what is to be there, its end frees all models.

    Requests for models that it does not have go to `peers`.
    """
    settings = models.hosted[0].service.settings

    page = read_page() if settings.webui else {}
    app = Starlette(
        routes=[
            *(
                Route(path, partial(_answered, models, do), methods=[method])
                for method, path, do in ANSWERS
            ),
            *(Route(path, _not_there, methods=["GET", "POST", "DELETE"]) for path in _NOT_THERE),
            *(Route(path, file.send, methods=["GET"]) for path, file in page.items()),
        ],
        exception_handlers={
            ApiError: _refused,
            VkmoeError: _refused_by_model,
            HTTPException: _no_answer,
            ClientGone: _gone,
            ClientDisconnect: _gone,
            Exception: _failed,
        },
        lifespan=lambda _: _serving(models),
    )
    app.state.models, app.state.peers = models, peers
    guard = Guard(Lending(app, models), settings.hosts, settings.keys, OPEN_PATHS, settings.origins)
    return _RequestLog(_Prefixed(guard, settings.api_prefix))


@asynccontextmanager
async def _serving(models: Models) -> AsyncIterator[None]:
    """Load what is to be there from the start; at the end, free all models."""
    models.start()
    resting = asyncio.create_task(models.rest())
    try:
        yield
    finally:
        resting.cancel()
        models.end()
        await models.join()


async def _answered(models: Models, do: Answer, request: Request) -> Response:
    """Answer with the model that a request names, here or at a peer."""
    request.state.began = time.perf_counter()
    peers: Peers | None = None if HOP in request.headers else request.app.state.peers
    await models.renew()
    name = None if models.is_one and not peers else await _named(request)
    if name and peers and not models.has(name):
        if peer := await peers.holder(name):
            return await peers.forward(request, peer)
        if not models.is_one:
            theirs = [each["id"] for each in await peers.models()]
            raise unknown_model(name, (*(each.name for each in models.hosted), *theirs))
    if do in _AT_REST:
        return await do(models.found(name).service, request)
    return await do(await models.use(request, name), request)


async def _named(request: Request) -> str | None:
    """Return the model that is named in the path, in the query, or in the body."""
    name = request.path_params.get("name") or request.query_params.get("model")
    if name or not await request.body():
        return name
    body = await body_of(request)
    name = body.get("model") or body.get("name")  # as older clients of Ollama call it
    return name if isinstance(name, str) else None


class _Prefixed:
    """Takes a prefix off the paths of requests for `app`; without it there is nothing."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._prefix and scope["type"] == "http":
            path = scope["path"]
            if not path.startswith(f"{self._prefix}/"):
                refused = ApiError(404, f"there is nothing at {path}: see {self._prefix}/")
                await error_response(refused, path)(scope, receive, send)
                return
            scope = {**scope, "path": path.removeprefix(self._prefix)}
        await self._app(scope, receive, send)


async def _not_there(request: Request) -> Response:
    raise ApiError(501, f"vkmoe has no {request.url.path}")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.url.path)


async def _refused_by_model(request: Request, error: Exception) -> Response:
    """Answer where there is no model, or it cannot do what was asked."""
    assert isinstance(error, VkmoeError)
    return error_response(api_error(error), request.url.path)


async def _no_answer(request: Request, error: Exception) -> Response:
    """Answer for paths and methods that there are none of."""
    assert isinstance(error, HTTPException)
    texts = {404: "there is nothing at", 405: f"{request.method} is not for"}
    message = f"{texts.get(error.status_code, error.detail)} {request.url.path}"
    refused = ApiError(error.status_code, message, kind="invalid_request_error")
    if error.status_code == 404:
        refused.error["type"] = "not_found_error"
    answer = error_response(refused, request.url.path)
    answer.headers.update(error.headers or {})
    return answer


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # which does not arrive


async def _failed(request: Request, error: Exception) -> Response:
    """Answer for a bug of ours; the log has it."""
    log.error("internal error in %s", request.url.path, exc_info=error)
    refused = ApiError(500, f"internal error, {type(error).__name__}")
    return error_response(refused, request.url.path)


# ----- one line for each request -----


class _RequestLog:
    """Logs a line for each request for `app`: what it asked and what it took, but no text of it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        loop = asyncio.get_running_loop()
        began, status = loop.time(), _CLIENT_GONE

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            path = scope["raw_path"].decode("ascii")  # with control characters quoted
            asked = f"{scope['method'][:_MOST_METHOD]} {path[:_MOST_PATH]}"
            took = f"{status} in {loop.time() - began:.3f} s"
            replies = scope.get("state", {}).get("replies", ())
            log.info("%s %s%s", asked, took, _costs(replies, began))


def _costs(replies: Sequence[Reply], began: float) -> str:
    """Say how many tokens the prompts and replies of a request have, and how fast they came.

    `began` is when the request came, in seconds of the event loop's clock.
    """
    if not replies:
        return ""
    each = [reply.generation for reply in replies]
    n_prompt, n_reply = sum(g.n_prompt for g in each), sum(g.n_generated for g in each)
    costs = [f": {n_prompt} + {n_reply} tokens"]
    firsts = [reply.first_at for reply in replies if reply.first_at is not None]
    if firsts:
        costs.append(f"the first after {min(firsts) - began:.3f} s")
        seconds = max(reply.last_at for reply in replies) - min(firsts)
        if seconds > 0:
            costs.append(f"{(n_reply - len(firsts)) / seconds:.1f} tok/s")
    return ", ".join(costs)
