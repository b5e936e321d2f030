"""The files of the page come as they are in the package, openly, and nothing else does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.server.conftest import Served, serving
from tools.vendor_page import VendorError, check
from vkmoe.server.page_files import FOLDER, read_page


def test_every_file_comes_with_its_type_and_may_load_nothing_from_elsewhere() -> None:
    with serving(api_keys=("secret",)) as served:
        paths = read_page()
        assert {"/", "/page/page.css", "/page/js/app.js"} < set(paths)
        for path, file in paths.items():
            answer = served.client.get(path)
            assert answer.status_code == 200 and answer.content == file.data
            assert answer.headers["content-type"].split(";")[0] in (
                *("text/html", "text/css", "text/javascript", "image/svg+xml"),
            )
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert "unsafe" not in answer.headers["content-security-policy"]
            assert answer.headers["cache-control"] == "no-cache"
            again = {"If-None-Match": answer.headers["etag"]}
            assert served.client.get(path, headers=again).status_code == 304
        assert served.client.get("/", headers={"Host": "evil.example"}).status_code == 403


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/index.html",
        "/page/../app.py",
        "/page/%2e%2e/app.py",
        "/page/..%2fapp.py",
        "/page//etc/passwd",
        "/page/vendor/",
        "/page/vendor/vendor.toml",
    ],
)
def test_no_other_file_can_be_had(server: Served, path: str) -> None:
    assert server.client.get(path).status_code == 404


def test_no_file_of_the_page_asks_for_another_server() -> None:
    for file in FOLDER.rglob("*"):
        if file.suffix in (".html", ".css", ".js", ".svg") and "vendor" not in file.parts:
            text = file.read_text().replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in text and "https://" not in text, file


def test_the_scripts_of_others_are_those_of_their_packages(tmp_path: Path) -> None:
    check()
    copied = shutil.copytree(FOLDER / "vendor", tmp_path / "vendor")
    script = copied / "marked.js"
    script.write_bytes(script.read_bytes() + b" ")
    with pytest.raises(VendorError, match=r"marked\.js has the SHA-256"):
        check(copied)
    script.unlink()
    with pytest.raises(VendorError, match="missing or not listed"):
        check(copied)
