"""Asks a hub which files a repository has, and reads parts of them over HTTP.

Hugging Face's library says where the hub is, whether it may be asked, and which token to send
(HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN). Nothing here writes a file. What the hub replies is checked
before use: names of files lead nowhere but below the repository, sizes and digests are sound.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx2 as http
from huggingface_hub import constants, get_session, get_token
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from vkmoe.errors import DownloadError

REVISION = "main"
_MOST_LISTING_BYTES = 16 << 20  # repositories with thousands of files take 1 MiB
_MOST_REDIRECTS = 5
_LARGEST_FILE = 1 << 44
_LONGEST_NAME = 255  # bytes of a file's or a folder's name, as file systems have it
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-\d+/(\d+|\*)")
_ODD_HINT = "ask for another repository, or see whether HF_ENDPOINT names the hub that you mean"
_BAD_TOKEN = "Invalid credentials in Authorization header"  # as the hub writes it
_LOGIN = "give a token: run `hf auth login`, or set HF_TOKEN"


class HubFile(NamedTuple):
    """Describes a file of a repository."""

    name: str  # with folders, separated by "/"
    n_bytes: int
    digest: str  # SHA-256 with 64 digits; with 40 the SHA-1 that git has


class Repository(NamedTuple):
    """Describes a repository at one commit."""

    name: str  # "owner/repo"
    commit: str
    files: tuple[HubFile, ...]  # those in the GGUF format
    others: tuple[str, ...]  # the names of the others, as the hub writes them


class Broken(DownloadError):
    """Says that a transfer broke off, which may go better the next time."""


def read_repository(name: str) -> Repository:
    """Ask the hub for a repository's files.

    Raises DownloadError if the hub cannot be reached, has no such repository or gives it to
    others only, and for a reply that is no list of files.
    """
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise DownloadError(
            f"{name} cannot be the name of a repository", "names are like owner/repo"
        ) from None
    url = f"{constants.ENDPOINT}/api/models/{name}/revision/{REVISION}?blobs=true"
    body = bytearray()
    with _reply(url, name) as reply:
        for chunk in reply.iter_bytes():
            body += chunk
            if len(body) > _MOST_LISTING_BYTES:
                raise _odd(name, f"a list of files of more than {_MOST_LISTING_BYTES >> 20} MiB")
    try:
        return _repository(name, json.loads(body))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise _odd(name, "no list of files that can be understood") from None


@contextmanager
def reading(
    repository: Repository, file: HubFile, start: int, end: int
) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Read the bytes of a file from `start` up to `end`, without it.

    Yields the byte that the reply begins at, which is 0 where a server knows no ranges, and the
    reply's chunks. Raises Broken for what may go better the next time, DownloadError for the rest.
    """
    path = quote(file.name)
    url = f"{constants.ENDPOINT}/{repository.name}/resolve/{repository.commit}/{path}"
    ranges = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    with _reply(url, repository.name, ranges) as reply:
        begins = 0
        if reply.status_code == 206:
            found = _CONTENT_RANGE.fullmatch(reply.headers.get("Content-Range", ""))
            if found is None or int(found[1]) != start or found[2] not in ("*", str(file.n_bytes)):
                raise _odd(repository.name, f"other bytes of {file.name} than were asked for")
            begins = start
        yield begins, reply.iter_raw()


# ----- what a hub replies -----


def _repository(name: str, listing: Any) -> Repository:
    """Check what a hub says of a repository. Raises DownloadError for names that lead elsewhere."""
    files, others = [], []
    for each in listing["siblings"]:
        path = each["rfilename"]
        if not path.endswith(".gguf"):
            others.append(path)
            continue
        if not _is_safe(path):
            raise _odd(name, f"a file's name that is refused: {ascii(path)[:200]}")
        digest = each["lfs"]["sha256"] if each.get("lfs") else each["blobId"]
        n_bytes = each["size"]
        if _DIGEST.fullmatch(digest) is None or not (
            type(n_bytes) is int and 0 < n_bytes <= _LARGEST_FILE
        ):
            raise ValueError
        files.append(HubFile(path, n_bytes, digest))
    if _COMMIT.fullmatch(listing["sha"]) is None:
        raise ValueError
    return Repository(name, listing["sha"], tuple(sorted(files)), tuple(sorted(others)))


def _is_safe(path: str) -> bool:
    """Say whether a file's name is one below the folder that it is put in, in any system."""
    parts = path.split("/")
    return (
        path.isprintable()
        and not any(sign in path for sign in '\\:*?"<>|')
        and all(part.strip(". ") and len(part.encode()) <= _LONGEST_NAME for part in parts)
    )


def _odd(name: str, what: str) -> DownloadError:
    return DownloadError(f"the hub's reply about {name} is {what}", _ODD_HINT)


# ----- requests -----


@contextmanager
def _reply(url: str, name: str, more: dict[str, str] | None = None) -> Iterator[http.Response]:
    """Send a request and yield the reply with its body unread. Errors are those of `reading`."""
    headers, token = {"User-Agent": "vkmoe"} | (more or {}), _token()
    try:
        for _ in range(_MOST_REDIRECTS + 1):
            # A token is for the hub alone, not for those that it redirects to.
            secret = {"Authorization": f"Bearer {token}"} if _is_hub(url) and token else {}
            with get_session().stream(
                "GET",
                url,
                headers=headers | secret,
                follow_redirects=False,
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            ) as reply:
                if not reply.has_redirect_location:
                    _check(reply, name)
                    yield reply
                    return
                url = _redirected(reply, name)
        raise _odd(name, "a chain of redirects without an end")
    except OfflineModeIsEnabled:
        raise DownloadError(
            f"{name} is not on this machine, and HF_HUB_OFFLINE forbids to download it",
            "unset HF_HUB_OFFLINE; `vkmoe models` lists what is on this machine",
        ) from None
    except http.TransportError as error:
        reason = str(error) or type(error).__name__
        raise Broken(
            f"{_host(url)} does not answer as it should: {reason}",
            "see whether this machine is online; `vkmoe models` lists what is on it",
        ) from None
    except (http.HTTPError, http.InvalidURL, http.StreamError) as error:
        raise _odd(name, f"one that cannot be used ({error})") from None


def _token() -> str | None:
    """Return the token that a user has for the hub. Raises DownloadError for one that is none."""
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    if token and not (token.isascii() and token.isprintable()):
        raise DownloadError("the token for the hub has letters that none can have", _LOGIN)
    return token


def _redirected(reply: http.Response, name: str) -> str:
    """Return where a reply redirects to. Raises DownloadError if that is no web address.

    Nor may it lead from an encrypted connection to an open one.
    """
    here, target = reply.url, reply.url.join(reply.headers["Location"])
    if target.scheme not in ("http", "https") or (here.scheme, target.scheme) == ("https", "http"):
        raise _odd(name, f"a redirect that is refused: {ascii(str(target))[:200]}")
    return str(target)


def _is_hub(url: str) -> bool:
    """Say whether an address is the hub's. Raises DownloadError if HF_ENDPOINT is no address."""
    try:
        hub = http.URL(constants.ENDPOINT)
    except http.InvalidURL:
        hub = http.URL("")
    if hub.scheme not in ("http", "https") or not hub.host:
        raise DownloadError(
            f"HF_ENDPOINT is {constants.ENDPOINT!a}, which is no web address",
            "write it as https://HOST, or unset it",
        )
    asked = http.URL(url)
    return (hub.scheme, hub.host, hub.port) == (asked.scheme, asked.host, asked.port)


def _host(url: str) -> str:
    return http.URL(url).host


def _check(reply: http.Response, name: str) -> None:
    """Raise for a reply that is none: Broken where the server may be better later."""
    status, code = reply.status_code, reply.headers.get("X-Error-Code", "")
    host, hub = _host(str(reply.url)), constants.ENDPOINT
    if status in (200, 206):
        return
    if reply.headers.get("X-Error-Message") == _BAD_TOKEN:
        raise DownloadError(
            f"{host} refuses the token: it is wrong, or valid no more ({status})",
            f"{_LOGIN}; a public repository needs none",
        )
    if code == "GatedRepo":
        raise DownloadError(
            f"{name} is gated: its terms have to be accepted first",
            f"accept them at {hub}/{name}, then {_LOGIN}",
        )
    if status in (401, 403):
        raise DownloadError(
            f"{host} gives no {name}: it is private, or not there ({status})",
            f"check the name, or the path if a file is meant; for a private repository {_LOGIN}",
        )
    if status == 404:
        raise DownloadError(
            f"{host} has no repository {name}, or no more the file that it listed",
            "check the name, or the path if a file is meant; `vkmoe models` lists what is here",
        )
    if status in (408, 425, 429) or status >= 500:
        raise Broken(f"{host} has no time for {name} ({status})", "try again in a few minutes")
    raise _odd(name, f"a refusal, {status}")
