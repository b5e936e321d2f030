"""Says how a server is started: its addresses, its keys, and what requests get unasked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vkmoe.choices import Pooling
from vkmoe.errors import UsageError
from vkmoe.option_fields import check_fields, option

Reasoning = Literal["auto", "on", "off"]


def _template_names(text: str) -> dict[str, Any]:
    """Read names for the chat template. Raises UsageError."""
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, dict):
        raise UsageError(f"{text!r} is no JSON object", 'write it as {"enable_thinking": false}')
    return names


def _prefix(text: str) -> str:
    """Check a prefix of all paths. Raises UsageError."""
    if text and (not text.startswith("/") or text.endswith("/") or set(text) & set("{}?#% ")):
        raise UsageError(f"{text!r} is no prefix of paths", "write it as /name")
    return text


def _folder(text: str) -> str:
    """Check that there is such a folder. Raises UsageError."""
    if not Path(text).is_dir():
        raise UsageError(f"{text} is no folder", "make it first")
    return text


def _listed(text: str | None) -> list[str]:
    return [each.strip() for each in (text or "").split(",") if each.strip()]


# ruff: noqa: RUF009  (an option is a field of its own, not a default that instances share)


@dataclass(frozen=True)
class ServerSettings:
    """Holds the options of `vkmoe serve` that are not the engine's."""

    host: str = option(
        "127.0.0.1",
        "The address to listen at, or several, split by commas; 0.0.0.0 is all there are.",
    )
    port: int = option(8080, "The port; 0: a free one.", minimum=0, maximum=65535)
    api_key: str | None = option(
        None, "Ask every client for this key; several are split by commas."
    )
    api_prefix: str = option(
        "", "What all paths begin with, such as /llm.", metavar="PATH", check=_prefix
    )
    cors_origins: str | None = option(
        None,
        "The sites whose pages may use the server: addresses split by commas, localhost for all "
        "pages of this machine, or * for all. Default: localhost; with --api-key *, as other pages "
        "do not know the key.",
        metavar="SITES",
    )
    alias: str | None = option(
        None,
        "The name that clients know the model by; several are split by commas.",
        metavar="NAME",
    )
    tags: str | None = option(
        None, "Words that /v1/models says of the model, split by commas.", metavar="WORDS"
    )
    webui: bool | None = option(True, "Whether / is a page with a chat.", "--webui/--no-webui")
    slots: bool | None = option(True, "Whether /slots says what runs.", "--slots/--no-slots")
    metrics: bool | None = option(
        True, "Whether /metrics has counts for Prometheus.", "--metrics/--no-metrics"
    )
    max_tokens: int = option(
        -1,
        "Most tokens of a reply where a request does not say; -1: until the context is full.",
        "-n",
        "--max-tokens",
        minimum=-1,
    )
    kv_unified: bool = option(
        False, "Let each of --parallel replies use all of --ctx-size, in place of its share."
    )
    max_queue: int = option(64, "Most requests that wait for their turn.", minimum=0)
    timeout: float = option(600.0, "Seconds until a reply is ended; 0: never.", minimum=0)
    pooling: Pooling | None = option(
        None,
        "How the states of a text's tokens become its embedding: their mean, that of the first "
        "token (cls) or of the last, or all of them (none). Default: as the model's file has it.",
    )
    embd_normalize: int = option(
        2,
        "By which norm embeddings are divided: 1: the sum of all values, 2: their length, or that "
        "of a higher order; 0: the largest value becomes 32760; -1: by none.",
        minimum=-1,
        maximum=64,
        metavar="N",
    )
    reasoning: Reasoning = option(
        "auto",
        "Whether the model thinks before it answers, where requests do not say: on, off, or as its "
        "chat template has it (auto).",
    )
    reasoning_format: Literal["auto", "deepseek", "none"] = option(
        "auto",
        "Where thoughts are in an answer: in a field of their own, reasoning_content (auto, "
        "deepseek), or in the text as the model writes them (none).",
    )
    prefill_assistant: bool | None = option(
        True,
        "Whether a reply goes on with the last message of a chat, if that is the assistant's, "
        "where requests do not say.",
        "--prefill-assistant/--no-prefill-assistant",
    )
    chat_template_kwargs: str | None = option(
        None,
        "Further names for the chat template, as a JSON object; those of a request come first.",
        metavar="JSON",
        check=_template_names,
    )
    slot_save_path: str | None = option(
        None,
        "Let clients save the state of a conversation to files in this folder, and restore it "
        "(POST /slots/ID?action=save).",
        metavar="FOLDER",
        check=_folder,
    )
    models: str | None = option(
        None,
        "Serve the models of this folder, or of this TOML file with options for each and with "
        "other servers (docs/server.md). Each is loaded when a request names it, and unloaded when "
        "another one needs its memory.",
        "--models",
        "--models-dir",
        metavar="PATH",
    )
    models_max: int = option(
        0, "Most models that are loaded at once; 0: as many as have room.", minimum=0
    )
    sleep_idle_seconds: int = option(
        -1,
        "Unload the model after so many seconds without a request, which frees the device; the "
        "next request loads it again. -1: never.",
        minimum=-1,
        metavar="SECONDS",
    )
    verbose: bool = option(
        False,
        "Add the prompt and the settings of each reply to answers, as __verbose; requests may ask "
        "for it too.",
        "-v",
        "--verbose",
    )
    log_level: Literal["error", "warning", "info"] = option(
        "info", "What the log says; info: also a line for each request, without its texts."
    )

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def keys(self) -> list[str]:
        """List the keys of which a client needs one."""
        return _listed(self.api_key)

    @property
    def hosts(self) -> list[str]:
        """List the addresses to listen at."""
        return _listed(self.host)

    @property
    def aliases(self) -> list[str]:
        """List the names of the model in order; the first is the one that answers have."""
        return sorted(set(_listed(self.alias)))

    @property
    def all_tags(self) -> list[str]:
        """List what /v1/models says of the model."""
        return sorted(set(_listed(self.tags)))

    @property
    def origins(self) -> list[str]:
        """List the sites whose pages may use the server; "*" is all, "localhost" this machine."""
        return _listed(self.cors_origins) or ["*" if self.keys else "localhost"]

    @property
    def template_names(self) -> dict[str, Any]:
        """Return the names that a chat template gets unless a request has others."""
        names = _template_names(self.chat_template_kwargs) if self.chat_template_kwargs else {}
        asked = {} if self.reasoning == "auto" else {"enable_thinking": self.reasoning == "on"}
        return asked | names

    def address(self, port: int) -> str:
        """Return the address that clients take."""
        host = self.hosts[0]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}{self.api_prefix}"
