"""What a hub replies decides no path outside the cache, and takes no unbounded memory or time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.catalogue.conftest import NAME
from tests.catalogue.hub_server import COMMIT, FakeHub
from tests.catalogue.test_download import CACHE, REPOSITORY, got
from vkmoe.catalogue import download
from vkmoe.catalogue import hub as hub_module
from vkmoe.errors import DownloadError, ModelFileError, UnsupportedModelError

Listing = dict[str, Any]


def written(home: Path) -> list[Path]:
    """The files and links below a folder, but for what vkmoe remembers of devices."""
    return [x for x in home.rglob("*") if not x.is_dir() and "vkmoe" not in x.parts]


def changed(change: Callable[[Listing, Listing], None]) -> Callable[[Listing], Any]:
    """A change of the listing and of what it says of the wanted file."""

    def listing(said: Listing) -> Listing:
        (model,) = (x for x in said["siblings"] if x["rfilename"].endswith("Q8_0.gguf"))
        change(said, model)
        return said

    return listing


@pytest.mark.parametrize(
    "name",
    [
        *("../out-Q8_0.gguf", "a/../../out-Q8_0.gguf", "/tmp/out-Q8_0.gguf", "./out-Q8_0.gguf"),
        *("..\\out-Q8_0.gguf", "C:out-Q8_0.gguf", "a//out-Q8_0.gguf", "a\nout-Q8_0.gguf"),
        *("\x1b[2Jout-Q8_0.gguf", "x" * 250 + "-Q8_0.gguf", ".../out-Q8_0.gguf"),
    ],
)
def test_names_that_lead_elsewhere_are_refused(name: str, hub: FakeHub, home: Path) -> None:
    hub.change_listing = changed(lambda said, model: model.update(rfilename=name))
    with pytest.raises(DownloadError, match="a file's name that is refused") as caught:
        got()
    assert str(caught.value).isprintable()
    assert written(home) == [] and len(hub.asked) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda said, model: said.update(sha="../../../out"),
        lambda said, model: said.update(sha=None),
        lambda said, model: model.update(lfs={"sha256": "../../../../out"}),
        lambda said, model: model.update(lfs={"sha256": "A" * 64}),
        lambda said, model: model.update(lfs=None, blobId="../out"),
        lambda said, model: model.update(size=-1),
        lambda said, model: model.update(size="9"),
        lambda said, model: model.update(size=1 << 60),
        lambda said, model: model.update(rfilename=["x.gguf"]),
        lambda said, model: said.update(siblings={}, sha=7),
        lambda said, model: said.update(siblings=[7]),
        lambda said, model: said.clear(),
    ],
)
def test_a_list_of_files_that_makes_no_sense_is_refused(
    change: Callable[[Listing, Listing], None], hub: FakeHub, home: Path
) -> None:
    hub.change_listing = changed(change)
    with pytest.raises(DownloadError, match="no list of files that can be understood"):
        got()
    assert written(home) == []


def test_a_list_of_files_without_an_end_is_not_read(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "_MOST_LISTING_BYTES", 1 << 20)
    hub.change_listing = lambda said: said | {"padding": "x" * (2 << 20)}
    with pytest.raises(DownloadError, match="more than 1 MiB"):
        got()


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "ftp://localhost/x", "http://[::1", "SELF"],
)
def test_odd_redirects_are_refused(location: str, hub: FakeHub, home: Path) -> None:
    itself = f"{hub.url}/{NAME}/resolve/{COMMIT}/Tiny-MoE-Q8_0.gguf"
    hub.location = itself if location == "SELF" else location
    with pytest.raises(DownloadError, match=r"the hub's reply about") as caught:
        got()
    assert ("without an end" if location == "SELF" else "re") in str(caught.value)
    assert written(home) == [] and len(hub.asked) <= 8


def test_an_encrypted_connection_stays_encrypted() -> None:
    import httpx2

    request = httpx2.Request("GET", "https://hub.invalid/x")
    reply = httpx2.Response(302, headers={"Location": "http://hub.invalid/x"}, request=request)
    with pytest.raises(DownloadError, match="a redirect that is refused"):
        hub_module._redirected(reply, NAME)


def test_links_in_the_cache_lead_nowhere_else(hub: FakeHub, home: Path) -> None:
    outside = home / "outside"
    outside.mkdir()
    snapshots = home / REPOSITORY / "snapshots"
    snapshots.mkdir(parents=True)
    (snapshots / COMMIT).symlink_to(outside)
    hub.files["made/by/Tiny-MoE-Q6_K.gguf"] = hub.files["Tiny-MoE-Q8_0.gguf"]
    for quant in ("Q6_K", "Q8_0"):
        with pytest.raises(DownloadError, match="a link that leads out of the cache"):
            got(f"{NAME}:{quant}")
    (snapshots / COMMIT).unlink()
    (blob,) = (home / REPOSITORY / "blobs").iterdir()
    target = home / "target"
    target.write_text("keep")
    blob.with_name(f"{blob.name}.incomplete").symlink_to(target)
    blob.unlink()
    with pytest.raises(DownloadError, match="cannot be written"):
        got()
    assert target.read_text() == "keep" and [*outside.iterdir()] == []


@pytest.mark.parametrize("name", ["../some/repo", "some/..", "a--b/c", "some/-x"])
def test_names_that_no_repository_can_have_are_not_asked_for(name: str, hub: FakeHub) -> None:
    from vkmoe.catalogue.hub import read_repository

    with pytest.raises(DownloadError, match="cannot be the name of a repository"):
        read_repository(name)
    assert hub.asked == []


# ----- headers, which are read before the rest -----


def test_what_cannot_be_run_is_not_downloaded(hub: FakeHub, home: Path) -> None:
    """A header with an architecture of its own, and a file that is none."""
    model = hub.files["Tiny-MoE-Q8_0.gguf"]
    unknown = model.replace(b"qwen3moe", b"qwen9moe") + bytes(48 << 20)
    hub.files["Tiny-MoE-Q8_0.gguf"] = unknown
    with pytest.raises(UnsupportedModelError, match="qwen9moe"):
        got()
    assert hub.n_sent < len(unknown) / 2, "a part of the file, whatever sockets hold"
    hub.files["Tiny-MoE-Q8_0.gguf"] = b"<html>" + bytes(1 << 20)
    with pytest.raises(ModelFileError, match=r"Tiny-MoE-Q8_0\.gguf: is not a GGUF file"):
        got()
    assert written(home / CACHE) == []


def test_a_header_without_an_end_is_not_read(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of empty words that a sound file of this size could have, most of it not there yet."""
    monkeypatch.setattr(download, "_MOST_HEADER_BYTES", 1 << 20)
    key = b"\x01" + bytes(7) + b"x"
    words = (9).to_bytes(4, "little") + (8).to_bytes(4, "little") + (1 << 36).to_bytes(8, "little")
    start = b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little")
    hub.files["Tiny-MoE-Q8_0.gguf"] = start + key + words + bytes(2 << 20)
    hub.change_listing = changed(lambda said, model: model.update(size=1 << 43))
    hub.headers = {"Content-Range": f"bytes 0-{(1 << 20) - 1}/{1 << 43}"}
    with pytest.raises(ModelFileError, match="array"):
        got()


def test_a_header_that_breaks_off_is_an_error(
    hub: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vkmoe")
    hub.cuts = [1000]
    with pytest.raises(DownloadError, match="does not answer as it should"):
        got()
    assert caplog.text == ""
