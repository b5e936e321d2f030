"""A hub on this machine: it lists a repository and gives files in ranges, as badly as asked.

Files come by a redirect to another address, as a hub's do: `localhost` instead of 127.0.0.1.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


class Asked(NamedTuple):
    """A request that came."""

    path: str
    token: str | None
    start: int | None  # of the range that was asked for
    end: int | None


class FakeHub(ThreadingHTTPServer):
    """A hub with one repository. Attributes may be set at any time."""

    daemon_threads = True

    def __init__(self, name: str, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self.files = name, files
        self.asked: list[Asked] = []
        self.n_sent = 0  # bytes of files
        self.knows_ranges = True
        self.cuts: list[int] = []  # after so many bytes replies about files break off, one each
        self.refusals: list[tuple[int, str]] = []  # status and X-Error-Code of the next replies
        self.refuses_files: tuple[int, str] | None = None  # instead of files
        self.old_name = ""  # by which the repository is asked for, too
        self.location: str | None = None  # where files are redirected to, instead
        self.change_listing: Callable[[dict[str, Any]], Any] = lambda listing: listing
        self.change_body: Callable[[bytes], bytes] = lambda body: body
        self.headers: dict[str, str] = {}  # of replies with files and of refusals, besides
        self.pause_s = 0.0  # after each 64 KiB of a file
        Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def starts(self, name: str = "") -> list[int | None]:
        """The bytes from which on files were asked for, where they are kept."""
        return [x.start for x in self.asked if x.path.startswith("/kept/") and name in x.path]

    def listing(self) -> Any:
        siblings = [
            {"rfilename": name, "size": len(data), "blobId": git_digest(data)}
            | ({"lfs": {"sha256": digest(data)}} if name.endswith(".gguf") else {})
            for name, data in self.files.items()
        ]
        return self.change_listing({"id": self.name, "sha": COMMIT, "siblings": siblings})

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error."""


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_digest(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def do_GET(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, end = (int(x) if x else None for x in found.groups()) if found else (None, None)
        hub.asked.append(Asked(path, self.headers.get("Authorization"), start, end))
        if path.startswith("/kept/"):
            self.send_file(path.removeprefix("/kept/"), start, end)
        elif hub.old_name and hub.old_name in path:
            # Relative, as a hub's are for repositories that were given another name.
            self.reply(307, b"", {"Location": self.path.replace(hub.old_name, hub.name)})
        elif hub.refusals:
            self.refuse(*hub.refusals.pop(0))
        elif path == f"/api/models/{hub.name}/revision/main":
            self.reply(200, json.dumps(hub.listing()).encode())
        elif path.startswith(f"/{hub.name}/resolve/"):
            self.send_to_file(path)
        else:
            self.refuse(404, "RepoNotFound")

    do_HEAD = do_GET

    def send_to_file(self, path: str) -> None:
        hub, name = self.server, path.split("/", 5)[5]
        if hub.refuses_files:
            self.refuse(*hub.refuses_files)
            return
        data, elsewhere = hub.files[name], f"http://localhost:{hub.server_port}/kept/{name}"
        linked = {"X-Linked-Etag": f'"{digest(data)}"', "X-Linked-Size": str(len(data))}
        headers = {"Location": hub.location or elsewhere, "X-Repo-Commit": COMMIT} | linked
        self.reply(302, b"", headers)

    def send_file(self, name: str, start: int | None, end: int | None) -> None:
        hub, data = self.server, self.server.files[name]
        whole, status, headers = len(data), 200, {"ETag": f'"{digest(data)}"'} | hub.headers
        data = hub.change_body(data)
        if start is not None and hub.knows_ranges:
            data = data[start : None if end is None else end + 1]
            ranges = f"bytes {start}-{start + len(data) - 1}/{whole}"
            status, headers = 206, {"Content-Range": ranges} | headers
        cut = hub.cuts.pop(0) if hub.cuts else None
        self.reply(status, data, headers, cut)

    def refuse(self, status: int, code: str) -> None:
        self.reply(status, b"no", self.server.headers | ({"X-Error-Code": code} if code else {}))

    def reply(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        """Send a reply, or its first bytes, after which the connection ends."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        for at in range(0, len(body[:cut]), 1 << 16):
            part = body[:cut][at : at + (1 << 16)]
            self.wfile.write(part)
            if self.path.startswith("/kept/"):
                self.server.n_sent += len(part)
                time.sleep(self.server.pause_s)
        if cut is not None:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
