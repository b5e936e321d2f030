"""Serves the files of the page: index.html at /, the others below /page/, and nothing else.

All of them are read when the server starts, so no path of a request reaches the file system.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent / "page"
# What a browser may do for the page: nothing that is written into it runs, nothing leaves for
# another server.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class PageFile:
    """Holds one file as it is sent."""

    data: bytes
    media_type: str
    tag: str  # changes with the data

    async def send(self, request: Request) -> Response:
        """Send it, or nothing where the browser has the same already."""
        headers = {
            "Cache-Control": "no-cache",
            "ETag": self.tag,
            "Content-Security-Policy": _POLICY,
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        known = request.headers.get("if-none-match", "")
        if self.tag in (each.strip().removeprefix("W/") for each in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(self.data, headers=headers, media_type=self.media_type)


def read_page() -> dict[str, PageFile]:
    """Read all files of the page that browsers take; the key is the path of their address."""
    found = {}
    for file in sorted(FOLDER.rglob("*")):
        if file.suffix in _TYPES:
            data = file.read_bytes()
            tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
            name = file.relative_to(FOLDER).as_posix()
            path = "/" if name == "index.html" else f"/page/{name}"
            found[path] = PageFile(data, _TYPES[file.suffix], tag)
    return found
