"""Keeps out what did not come from where it may, and what is too large, before anything reads it.

A page of another site may make a browser send requests here: the Host of a rebound name and the
Origin of that page tell (the Fetch standard; "DNS rebinding", Jackson et al., 2007).
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vkmoe.server.errors import ApiError, unavailable
from vkmoe.server.transport.sse import json_bytes

_LOCAL = ("localhost", "127.0.0.1", "::1")
_METHODS = "GET, POST, DELETE, OPTIONS"  # for pages of other addresses
_MOST_BODY = 32 << 20  # bytes
_MOST_BODIES = 256 << 20  # bytes of all requests that have not been answered


def error_response(error: ApiError, path: str) -> Response:
    """Make the answer that says what went wrong with a request for this path."""
    body = error.body(path)
    headers = error.headers | ({"Request-Id": body["request_id"]} if "request_id" in body else {})
    return Response(json_bytes(body), error.status, headers, media_type="application/json")


class Guard:
    """Lets requests through that name this server, come from it or from no page, and have a key."""

    def __init__(
        self,
        app: ASGIApp,
        hosts: Iterable[str],
        api_keys: Iterable[str],
        open_paths: Iterable[str],
        origins: Iterable[str] = ("localhost",),
        most_body: int = _MOST_BODY,
        most_bodies: int = _MOST_BODIES,
    ) -> None:
        """Guard `app`, served at `hosts`. Without keys, none is asked for.

        `open_paths` need none: those that end in / with all below them. `origins` are the sites
        whose pages may ask: "*" are all, "localhost" all of this machine.
        """
        self._app, self._names = app, {*_LOCAL, *(host.lower() for host in hosts)}
        self._origins = {origin.lower() for origin in origins}
        self._keys = [key.encode() for key in api_keys]
        self._open, self._most_body = tuple(open_paths), most_body
        self._most_bodies, self._n_held = most_bodies, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        may_ask = origin is None or self._may_ask(origin, headers)
        try:
            has_key = self._has_key(headers)
            self._check_host(headers, has_key)
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                # A page may use clients that add headers of their own; its origin is known.
                asked = headers.get("access-control-request-headers", "Authorization")
                answer = Response(None, 200, {"Access-Control-Allow-Headers": asked})
                origin = origin if may_ask else None
            elif not may_ask:
                raise ApiError(
                    403, "pages of other sites may not use this server: see --cors-origins"
                )
            else:
                if not (has_key or self._is_open(scope["path"])):
                    raise ApiError(401, "Invalid API Key", code="invalid_api_key")
                self._check_length(headers)
                await self._counted(scope, receive, _with_origin(send, origin))
                return
        except ApiError as error:
            answer = error_response(error, scope["path"])
            origin = origin if error.status != 403 else None
        await answer(scope, receive, _with_origin(send, origin))

    def _check_host(self, headers: Headers, has_key: bool) -> None:
        """Refuse a name that is not this server's: it may be another site's, bound to our address.

        An address cannot be, and pages of that site have no key. Raises ApiError.
        """
        found = headers.getlist("host")
        name = _host_name(found[0]) if len(found) == 1 else None
        if name is None or not (has_key or name in self._names or _is_address(name)):
            hint = "send its key" if self._keys else "start it with --host NAME, or with --api-key"
            raise ApiError(403, f"the Host of this request is not this server: {hint}")

    def _may_ask(self, origin: str, headers: Headers) -> bool:
        """Say whether pages of this origin may use the server."""
        try:
            parts = urlsplit(origin)
            name = parts.hostname
        except ValueError:
            parts, name = None, None
        is_own = parts is not None and parts.netloc.lower() == headers.get("host", "").lower()
        is_local = name in _LOCAL and "localhost" in self._origins
        return is_own or is_local or not self._origins.isdisjoint(("*", origin.lower()))

    def _is_open(self, path: str) -> bool:
        return not self._keys or any(
            path == each or (each.endswith("/") and len(each) > 1 and path.startswith(each))
            for each in self._open
        )

    def _has_key(self, headers: Headers) -> bool:
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        asked = given.encode("utf-8", "replace")
        return any([hmac.compare_digest(asked, key) for key in self._keys])

    def _check_length(self, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()):
            raise ApiError(400, "the Content-Length of this request is no number")
        if len(length) > 18 or int(length) > self._most_body:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"a request may have {self._most_body >> 20} MiB at most")

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through; the bytes of its body count until it is answered. Mutates.

        They count as they arrive, with or without a length in the head. Raises ApiError for too
        large a body, or too many.
        """
        n_bytes = 0

        async def receiving() -> Message:
            nonlocal n_bytes
            message = await receive()
            n_more = len(message.get("body", b""))
            n_bytes, self._n_held = n_bytes + n_more, self._n_held + n_more
            if n_bytes > self._most_body:
                raise self._too_large()
            if self._n_held > self._most_bodies:
                most = self._most_bodies >> 20
                raise unavailable(f"unanswered requests have more than {most} MiB")
            return message

        try:
            await self._app(scope, receiving, send)
        finally:
            self._n_held -= n_bytes


def _with_origin(send: Send, origin: str | None) -> Send:
    """Let the page that asked read the answer, which is neither kept nor taken for another type."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.setdefault("Cache-Control", "no-store")
            headers["X-Content-Type-Options"] = "nosniff"
            if origin is not None:
                headers["Access-Control-Allow-Origin"] = origin
                headers["Access-Control-Allow-Methods"] = _METHODS
                headers["Access-Control-Allow-Credentials"] = "true"
                headers["Vary"] = "Origin"
            # As clients are used to: some compare these names letter by letter.
            message["headers"] = [(name.title(), value) for name, value in message["headers"]]
        await send(message)

    return sending


def _host_name(host: str) -> str | None:
    """Return the name or address of a Host header, without its port; None where it is none."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return None
    if parts.path or parts.query or parts.fragment or "@" in host:
        return None
    return parts.hostname


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
