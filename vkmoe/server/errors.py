"""This module says what went wrong with a request, in the form of the API that it is for."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from vkmoe.errors import (
    PromptError,
    StateFileError,
    UnavailableError,
    UnsupportedModelError,
    UsageError,
    VkmoeError,
)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
_ANTHROPIC = "/v1/messages"  # and what is below: paths of Anthropic's API
OLLAMA = "/api/"  # what the paths of Ollama's API begin with
_ANTHROPIC_TYPES = _TYPES | {
    413: "request_too_large",
    500: "api_error",
    501: "api_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """Describes why a request gets no answer: an HTTP status, and an object for its body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
        **more: Any,
    ) -> None:
        """`kind` follows from the status if it is not given; `retry_after` counts seconds."""
        super().__init__(message)
        self.status, self.retry_after = status, retry_after
        self.error: dict[str, Any] = {
            "message": message,
            "type": kind or _TYPES[status],
            "code": code,
            "param": param,
            **more,
        }

    def body(self, path: str) -> dict[str, Any]:
        """Return what a client of the API that has this path is sent."""
        if path.startswith(OLLAMA):
            return {"error": self.error["message"]}
        if not (path == _ANTHROPIC or path.startswith(f"{_ANTHROPIC}/")):
            return {"error": self.error}
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
        error = {"type": kind, "message": self.error["message"]}
        return {"type": "error", "error": error, "request_id": f"req_{secrets.token_hex(12)}"}

    @property
    def headers(self) -> dict[str, str]:
        """Say when to try again, or not to: clients of OpenAI and Anthropic do so by themselves."""
        if self.retry_after is not None:
            return {"Retry-After": str(self.retry_after)}
        return {"X-Should-Retry": "false"} if self.status >= 500 else {}


def context_exceeded(n_prompt_tokens: int, n_ctx: int, is_least: bool = False) -> ApiError:
    """Say that a prompt does not fit, as llama-server does; `is_least`: it may have more tokens."""
    number = f"{'at least ' * is_least}{n_prompt_tokens}"
    return ApiError(
        400,
        f"the prompt has {number} tokens, the context holds {n_ctx}: shorten it, or "
        "start the server with a larger --ctx-size",
        kind="exceed_context_size_error",
        code="context_length_exceeded",
        n_prompt_tokens=n_prompt_tokens,
        n_ctx=n_ctx,
    )


def unknown_model(name: str, there: Iterable[str]) -> ApiError:
    """Say that no model has this name, and which are there."""
    message = f"there is no model {name!r}: there is {', '.join(there)}"
    return ApiError(404, message, code="model_not_found", param="model")


def unavailable(message: str, retry_after: int = 1, code: str | None = None) -> ApiError:
    """Say that the same request may be answered later."""
    return ApiError(503, message, code=code, retry_after=retry_after)


def api_error(error: VkmoeError) -> ApiError:
    """Say what an error of the model, or of a request, means to a client."""
    message = f"{error}: {error.hint}" if error.hint else str(error)
    if isinstance(error, UnavailableError):
        return unavailable(message, error.seconds, error.code)
    if isinstance(error, UsageError | PromptError | UnsupportedModelError | StateFileError):
        return ApiError(400, message)
    return ApiError(500, message)
