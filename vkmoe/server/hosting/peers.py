"""Forwards requests to other servers for models that this one does not have.

Other servers are asked what they have (`/v1/models`); vkmoe and others that speak OpenAI's API do.
A request that was forwarded is not forwarded again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import quote

import httpx
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from vkmoe.server.errors import unavailable
from vkmoe.server.hosting.roster import Peer, bare_name
from vkmoe.server.replies import ClientGone, until_gone
from vkmoe.server.transport.sse import event, json_bytes

HOP = "X-Vkmoe-Forwarded"  # which a forwarded request has
_FRESH_S = 10.0  # for which an answer to /v1/models is good
_CONNECT_S = 5.0
_ANSWER_S = 10.0  # for a whole answer to /v1/models
_MOST_BYTES = 4 << 20  # of it
_ODD = (ValueError, LookupError, TypeError, RecursionError)  # what an odd list of models raises
_MOST_MODELS = 1 << 10  # of a peer
# Headers of one connection (RFC 9110, section 7.6.1), and those that are made anew.
_OWN = frozenset(
    ("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "host")
) | {"proxy-authorization", "proxy-authenticate", "content-length", "authorization", "x-api-key"}

log = logging.getLogger("vkmoe")


class Peers:
    """Knows what other servers have. All methods are called on the event loop."""

    def __init__(self, peers: Sequence[Peer], timeout: float | None) -> None:
        """Begin with nothing known; a peer may be silent for `timeout` seconds."""
        self._peers, self._timeout = peers, timeout
        self._known: dict[Peer, list[dict[str, Any]]] = {}
        self._asked_at = -_FRESH_S
        self._asking = asyncio.Lock()

    def __bool__(self) -> bool:
        return bool(self._peers)

    def _client(self, peer: Peer, read: float | None) -> httpx.AsyncClient:
        key = {"Authorization": f"Bearer {peer.api_key}"} if peer.api_key else {}
        timeout = httpx.Timeout(read, connect=_CONNECT_S)
        headers = {**key, HOP: "1"}
        return httpx.AsyncClient(timeout=timeout, headers=headers, trust_env=False)

    async def models(self) -> list[dict[str, Any]]:
        """List the models of all servers that answer, as `/v1/models` does."""
        await self._ask()
        return [model for models in self._known.values() for model in models]

    async def holder(self, name: str) -> Peer | None:
        """Find a server that has a model of this name; None: there is none that answers."""
        await self._ask()
        for peer, models in self._known.items():
            names = [each for x in models for each in (x["id"], *x["aliases"])]
            if bare_name(name) in map(bare_name, names):
                return peer
        return None

    async def _ask(self) -> None:
        """Ask all servers what they have, unless that was done a moment ago. Mutates."""
        async with self._asking:
            if time.monotonic() - self._asked_at < _FRESH_S:
                return
            found = await asyncio.gather(*map(self._models_of, self._peers))
            self._known = dict(zip(self._peers, found, strict=True))
            self._asked_at = time.monotonic()

    async def _models_of(self, peer: Peer) -> list[dict[str, Any]]:
        try:
            async with asyncio.timeout(_ANSWER_S), self._client(peer, _CONNECT_S) as client:
                return await _listed(client, f"{peer.url}/v1/models")
        except (httpx.HTTPError, TimeoutError, *_ODD) as error:
            log.warning(
                "%s does not say what it has: %s", peer.url, str(error) or type(error).__name__
            )
            return []

    async def forward(self, request: Request, peer: Peer) -> Response:
        """Have a server answer a request.

        Raises ApiError where it cannot be reached, ClientGone for a client that left before.
        """
        client = self._client(peer, self._timeout)
        kept = {k: v for k, v in request.headers.items() if k.lower() not in _OWN}
        path = quote(request.scope["path"])
        url = httpx.URL(f"{peer.url}{path}", query=request.url.query.encode())
        asked = client.build_request(
            request.method, url, headers=kept, content=await request.body()
        )
        try:
            answer = await until_gone(request, client.send(asked, stream=True), ())
        except httpx.HTTPError as error:
            await client.aclose()
            self._asked_at = -_FRESH_S
            reason = str(error) or type(error).__name__
            raise unavailable(
                f"{peer.url}, which has this model, does not answer: {reason}"
            ) from None
        except ClientGone:
            await client.aclose()
            raise
        headers = {k: v for k, v in answer.headers.items() if k.lower() not in _OWN}
        headers.pop("content-encoding", None)
        body = _body(answer, peer)
        return StreamingResponse(
            body, answer.status_code, headers, background=BackgroundTask(client.aclose)
        )


async def _listed(client: httpx.AsyncClient, url: str) -> list[dict[str, Any]]:
    """Ask a server for its models, and leave out those that are no models.

    Raises httpx.HTTPError for no answer, those of _ODD for an odd one.
    """
    body = bytearray()
    async with client.stream("GET", url) as answer:
        answer.raise_for_status()
        async for part in answer.aiter_bytes():
            body += part
            if len(body) > _MOST_BYTES:
                raise ValueError(f"its list has more than {_MOST_BYTES >> 20} MiB")
    models = json.loads(body)["data"][:_MOST_MODELS]
    found = [x for x in models if isinstance(x, dict) and isinstance(x.get("id"), str)]
    return [{**x, "aliases": _texts(x.get("aliases"))} for x in found]


def _texts(value: Any) -> list[str]:
    """Return the texts of a list, where there is one."""
    return [x for x in value if isinstance(x, str)] if isinstance(value, list) else []


async def _body(answer: httpx.Response, peer: Peer) -> AsyncIterator[bytes]:
    """Yield the body of an answer; where the server breaks off, an error in its form."""
    kind = answer.headers.get("content-type", "")
    try:
        async for part in answer.aiter_bytes():
            yield part
    except httpx.HTTPError as error:
        message = f"{peer.url} broke off: {str(error) or type(error).__name__}"
        log.warning("%s", message)
        body = {"error": {"message": message, "type": "server_error", "code": "peer_gone"}}
        if kind.startswith("text/event-stream"):
            yield b"\n\n" + event(body)
        elif kind.startswith("application/x-ndjson"):
            yield b"\n" + json_bytes({"error": message}) + b"\n"
        else:
            raise
    finally:
        await answer.aclose()
