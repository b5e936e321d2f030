"""This module asks a server for replies: `vkmoe serve`, or any that has /v1/chat/completions.

It owns the address, the request and what comes back as server-sent events. It loads no model, and
needs the standard library alone.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from vkmoe.cli.notes import note
from vkmoe.errors import ServerError, UsageError

if TYPE_CHECKING:
    from vkmoe.generate.tools import ReplyEvent

_CONNECT_S = 10.0
_RETRY_S, _LONGEST_RETRY_S = 1.0, 5.0  # a server that asks for more patience has another problem
_LONGEST_LINE, _LONGEST_BODY = 4 << 20, 4 << 20  # bytes
_LOST = "run the message again, or see what the server says"


class RemoteModel:
    """Gives the replies of a model that a server runs."""

    def __init__(
        self, address: str, api_key: str | None, options: dict[str, Any], quiet: bool = False
    ) -> None:
        """Wait until the server is there. `options` are fields of every request.

        Raises UsageError for an address or a key that is none, ServerError where no server answers.
        """
        self.address = address
        self._split = _checked(address)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise UsageError(
                "--api-key (VKMOE_API_KEY) has characters that no key has",
                "give it without spaces or line ends around it",
            )
        self._key, self._quiet = api_key, quiet
        self._options = dict(options)
        self._timings: dict[str, Any] | None = None  # of the last reply
        self._has_ended = False  # a reason for the end has come
        if (model := self._first_model()) is not None:
            self._options["model"] = model

    def reply(self, messages: list[dict[str, str]]) -> Generator[ReplyEvent, None, None]:
        """Yield the reply as it comes; closing the iterator closes the connection.

        That ends the reply at the server too. Raises ServerError.
        """
        self._timings, self._has_ended = None, False
        body = {"messages": messages, "stream": True, **self._options}
        with self._answer("POST", "/chat/completions", body) as answer:
            yield from self._events(answer)

    def note_statistics(self) -> None:
        """Say what the last reply took, as far as the server says it."""
        found = self._timings or {}
        names = ("prompt_n", "prompt_per_second", "predicted_n", "predicted_per_second")
        figures = [found.get(name) for name in names]
        if all(isinstance(each, int | float) for each in figures):
            n_prompt, prompt_rate, n_reply, reply_rate = figures
            note(
                f"prompt {n_prompt} tokens, {prompt_rate:.1f} tok/s | "
                f"reply {n_reply} tokens, {reply_rate:.1f} tok/s"
            )

    # ----- one request -----

    @contextmanager
    def _answer(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request, again as long as the server loads its model. Raises ServerError.

        Where something can be done without, so that it has no body, 404 is no error.
        """
        is_noted = False
        while True:
            connection = self._connect()
            answer: http.client.HTTPResponse | None = None
            try:
                answer = self._sent(connection, method, path, body)
                if answer.status == 200 or (body is None and answer.status == 404):
                    yield answer
                    return
                error, patience = self._refused(answer), _patience(answer)
            finally:
                if answer is not None:
                    answer.close()
                connection.close()
            if patience is None:
                raise error
            if not (is_noted or self._quiet):
                note(f"waiting for {self.address}: {error}")
                is_noted = True
            time.sleep(patience)

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._split.hostname or "", self._split.port
        # Without a port, http.client would look for one in an IPv6 address.
        if self._split.scheme == "https":
            return http.client.HTTPSConnection(host, port or 443, timeout=_CONNECT_S)
        return http.client.HTTPConnection(host, port or 80, timeout=_CONNECT_S)

    def _sent(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: dict[str, Any] | None,
    ) -> http.client.HTTPResponse:
        """Send a request and return the head of its answer. Raises ServerError."""
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.connect()
            if connection.sock is not None:
                connection.sock.settimeout(None)  # a long prompt takes its time
            connection.request(method, f"{self._split.path}/v1{path}", data, headers)
            return connection.getresponse()
        except (OSError, UnicodeError, http.client.HTTPException) as error:  # a name such as a..b
            raise ServerError(
                f"{self.address} does not answer: {_reason(error)}",
                "is `vkmoe serve` running there? --server takes an address such as "
                "http://127.0.0.1:8080",
            ) from error

    def _refused(self, answer: http.client.HTTPResponse) -> ServerError:
        """Return the error that an answer is."""
        try:
            found = _message(json.loads(answer.read(_LONGEST_BODY)))
        except (OSError, ValueError, RecursionError, http.client.HTTPException):
            found = None
        message = found or f"{answer.status} {answer.reason}"
        hints = {
            401: "give the server's key: --api-key KEY",
            403: "give the server's key: --api-key KEY",
            404: "is this the address of a server with /v1/chat/completions?",
        }
        return ServerError(f"the server refuses: {message}", hints.get(answer.status, ""))

    def _first_model(self) -> str | None:
        """Return the name of the server's first model; None where it does not list them."""
        try:
            with self._answer("GET", "/models") as answer:
                if answer.status == 404:
                    return None
                listed = json.loads(answer.read(_LONGEST_BODY))
        except (OSError, ValueError, RecursionError, http.client.HTTPException):
            return None
        data = listed.get("data") if isinstance(listed, dict) else None
        first = data[0] if isinstance(data, list) and data else None
        name = first.get("id") if isinstance(first, dict) else None
        return name if isinstance(name, str) else None

    # ----- the stream of a reply -----

    def _events(self, answer: http.client.HTTPResponse) -> Iterator[ReplyEvent]:
        """Yield what is new in each event of a stream, until it ends. Raises ServerError."""
        from vkmoe.generate.tools import Content, Thought

        for data in self._data(answer):
            if (error := _message(data)) is not None:
                raise ServerError(f"the server ended the reply: {error}", _LOST)
            if isinstance(timings := data.get("timings"), dict):
                self._timings = timings
            choices = data.get("choices")
            choice = choices[0] if isinstance(choices, list) and choices else None
            delta = choice.get("delta") if isinstance(choice, dict) else None
            if isinstance(choice, dict) and choice.get("finish_reason"):
                self._has_ended = True
            if isinstance(delta, dict):
                thought = delta.get("reasoning_content") or delta.get("reasoning")
                if isinstance(thought, str) and thought:
                    yield Thought(thought)
                if isinstance(content := delta.get("content"), str) and content:
                    yield Content(content)

    def _data(self, answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """Yield the data of each event before the last, [DONE]. Raises ServerError."""
        while True:
            try:
                line = answer.readline(_LONGEST_LINE + 1)
            except (OSError, http.client.HTTPException) as error:
                reason = _reason(error)
                raise ServerError(f"the connection was lost: {reason}", _LOST) from error
            if not line and self._has_ended:  # some servers send no more
                return
            if not line:
                raise ServerError("the connection was lost before the reply ended", _LOST)
            name, _, value = line.strip().partition(b":")
            if name != b"data":
                continue
            if value.strip() == b"[DONE]":
                return
            found = None
            with suppress(ValueError, RecursionError):
                found = json.loads(value)
            if len(line) > _LONGEST_LINE or not isinstance(found, dict):
                raise ServerError(
                    "the answer is none of /v1/chat/completions",
                    "is this the address of such a server?",
                )
            yield found


def _checked(address: str) -> SplitResult:
    """Split an address, http:// if it names no scheme, /v1 left out. Raises UsageError."""
    whole = address if "://" in address else f"http://{address}"
    try:
        found = urlsplit(whole)
        is_known = found.scheme in ("http", "https") and bool(found.hostname)
        is_known = is_known and found.username is None and found.path.isascii()
        _ = found.port
    except ValueError:
        is_known = False
    if not is_known or found.query or found.fragment or not whole.isprintable() or " " in whole:
        raise UsageError(
            f"--server (VKMOE_SERVER) is {address!r}, not an address",
            "give one such as http://127.0.0.1:8080",
        )
    return found._replace(path=found.path.rstrip("/").removesuffix("/v1"))


def _patience(answer: http.client.HTTPResponse) -> float | None:
    """Return after how many seconds to ask again; None: it would be in vain."""
    if answer.status != 503:
        return None
    try:
        seconds = float(answer.getheader("Retry-After", str(_RETRY_S)))
    except ValueError:
        seconds = _RETRY_S
    return max(seconds, _RETRY_S) if seconds <= _LONGEST_RETRY_S else None


def _message(data: Any) -> str | None:
    """Return the message of an error in a body or an event; None where it is none."""
    error = data.get("error") if isinstance(data, dict) else None
    if not error:
        return None
    message = error.get("message") if isinstance(error, dict) else error
    words = " ".join(str(message).split())
    return "".join(char if char.isprintable() else "?" for char in words)


def _reason(error: Exception) -> str:
    """Say in a few words what became of a connection."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
