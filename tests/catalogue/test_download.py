"""A model that no cache has is downloaded: whole, once, and on from where a transfer broke off."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import huggingface_hub
import pytest
from huggingface_hub import constants

from tests.catalogue.conftest import NAME
from tests.catalogue.hub_server import COMMIT, FakeHub, digest
from tests.engine.tiny import model_path, rewrite
from vkmoe.catalogue import KeptModel, fetcher, find_model, kept_models
from vkmoe.config import EngineConfig
from vkmoe.errors import DownloadError
from vkmoe.gguf_file import open_gguf
from vkmoe.llm import LLM

CACHE = ".cache/huggingface/hub"
REPOSITORY = f"{CACHE}/models--some-one--Tiny-MoE-GGUF"
Q8 = "Tiny-MoE-Q8_0.gguf"


def got(wanted: str = f"{NAME}:Q8_0", progress: Callable[[int, int], None] | None = None) -> Path:
    """The file of a model, which is downloaded where it is not there."""

    def choose(models: object) -> KeptModel:
        raise AssertionError(f"there was nothing to choose: {models}")

    return find_model(wanted, choose, fetcher(EngineConfig(device="cpu"), progress))


def stop_at(n_bytes: int) -> Callable[[int, int], None]:
    """Ctrl-C once so many bytes are there."""

    def progress(done: int, total: int) -> None:
        if done >= n_bytes:
            raise KeyboardInterrupt

    return progress


def test_a_model_is_downloaded_once_and_lies_where_other_programs_find_it(
    hub: FakeHub, home: Path
) -> None:
    steps: list[tuple[int, int]] = []
    with LLM(f"{NAME}:q8_0", device="cpu", ctx_size=32, progress=lambda *x: steps.append(x)) as llm:
        path = Path(llm.engine.model.file.path)
        assert llm.generate("a", max_tokens=1).token_ids
    size = len(hub.files[Q8])
    assert path == home / REPOSITORY / "snapshots" / COMMIT / Q8
    assert path.read_bytes() == hub.files[Q8]
    assert path.resolve() == home / REPOSITORY / "blobs" / digest(hub.files[Q8])
    assert (size, size) in steps and steps[0][0] < size
    n_asked = len(hub.asked)
    assert got() == got(NAME) == path
    assert len(hub.asked) == n_asked, "what is there is not asked for"
    (repository,) = huggingface_hub.scan_cache_dir(home / CACHE).repos
    assert (repository.repo_id, repository.nb_files) == (NAME, 1)
    # Hugging Face's library asks whether it is current, and takes it as it is.
    asked = huggingface_hub.hf_hub_download(NAME, Q8, cache_dir=home / CACHE, endpoint=hub.url)
    assert asked == str(path)
    assert len(hub.starts()) == 2, "the header, and the file"


def test_a_broken_transfer_goes_on(hub: FakeHub) -> None:
    """The first reply about the file is for its header; the next two break off."""
    size = len(hub.files[Q8])
    hub.cuts = [size, 100_000, 0, 50_000]
    assert got().read_bytes() == hub.files[Q8]
    assert hub.starts() == [0, 0, 100_000, 100_000, 150_000]


def test_a_later_download_goes_on_after_ctrl_c(
    hub: FakeHub, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vkmoe")
    with pytest.raises(KeyboardInterrupt):
        got(progress=stop_at(100_000))
    assert "what came is kept" in caplog.text
    assert list(kept_models()) == []
    (left,) = (home / REPOSITORY / "blobs").iterdir()
    there = left.stat().st_size
    assert left.name.endswith(".incomplete") and there >= 100_000
    del hub.asked[:]
    assert got().read_bytes() == hub.files[Q8]
    assert hub.starts() == [0, there]
    assert len([*left.parent.iterdir()]) == 1


def test_a_server_without_ranges_gives_all_again(hub: FakeHub) -> None:
    hub.knows_ranges = False
    hub.cuts = [len(hub.files[Q8]), 100_000]
    assert got().read_bytes() == hub.files[Q8]
    assert hub.starts() == [0, 0, 100_000]


def test_a_transfer_that_stays_broken_ends(hub: FakeHub) -> None:
    hub.cuts = [len(hub.files[Q8]), 1000, *[0] * 20]
    with pytest.raises(DownloadError, match="does not answer as it should") as caught:
        got()
    assert "goes on from what is there" in caught.value.hint
    assert hub.starts() == [0, 0, *[1000] * 4], "three more tries without a byte"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda body: body[:-1] + b"?", "another checksum"),
        (lambda body: body[:-10], "sends nothing"),
        (lambda body: body + b"?", "is longer than the"),
    ],
)
def test_another_content_is_not_kept(
    change: Callable[[bytes], bytes], complaint: str, hub: FakeHub
) -> None:
    hub.knows_ranges = complaint != "is longer than the"
    hub.change_body = change
    with pytest.raises(DownloadError, match=complaint):
        got()
    assert list(kept_models()) == []
    hub.change_body = bytes
    hub.knows_ranges = True
    assert got().read_bytes() == hub.files[Q8]


@pytest.mark.parametrize("said", ["bytes 7-9/{size}", "bytes 0-9/10", "bytes 0-9/", "pages 1-2/3"])
def test_a_reply_with_other_bytes_than_asked_for_is_refused(said: str, hub: FakeHub) -> None:
    hub.headers = {"Content-Range": said.format(size=len(hub.files[Q8]))}
    with pytest.raises(DownloadError, match="other bytes of Tiny-MoE-Q8_0"):
        got()


def test_a_disk_without_room_is_said_before(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage("/")._replace(free=len(hub.files[Q8]) - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(DownloadError, match=r"needs 0.0 GB more, and the disk of .* has") as caught:
        got()
    assert "HF_HOME" in caught.value.hint
    assert hub.starts() == [0], "the header alone"


def test_a_full_disk_is_said(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DownloadError, match="is full") as caught:
        got()
    assert "free some space" in caught.value.hint


def test_a_process_waits_for_another_that_downloads_the_same(
    hub: FakeHub, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vkmoe")
    name = digest(hub.files[Q8])
    lock = home / CACHE / ".locks/models--some-one--Tiny-MoE-GGUF" / f"{name}.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        thread = Thread(target=got)
        thread.start()
        while "waiting for it" not in caplog.text and thread.is_alive():
            thread.join(0.01)
        (home / REPOSITORY / "blobs" / name).write_bytes(hub.files[Q8])  # the other is done
    thread.join()
    assert hub.starts() == [0], "the header alone"
    assert [model.full_name for model in kept_models()] == [f"{NAME}:Q8_0"]


def test_threads_of_one_process_may_download_the_same(hub: FakeHub, home: Path) -> None:
    """A server asks whether a model has room on one thread, and loads it on another."""
    with ThreadPoolExecutor(4) as threads:
        (path,) = {x.result() for x in [threads.submit(got) for _ in range(4)]}
    assert path.read_bytes() == hub.files[Q8]
    files = [x.name for x in (home / REPOSITORY).rglob("*") if not x.is_dir()]
    assert sorted(files) == sorted([Q8, "main", digest(hub.files[Q8])]), "nothing is left over"


# ----- models in parts -----


@pytest.fixture
def parts(hub: FakeHub, tmp_path: Path) -> list[str]:
    """The hub has a model in several parts, within a folder; their names."""
    folder = tmp_path / "made"
    folder.mkdir()
    rewrite(model_path("moe_plain"), folder / "Big-Q6_K.gguf", lambda *_: None, per_part=12)
    hub.files |= {f"Q6_K/{path.name}": path.read_bytes() for path in folder.glob("*")}
    return sorted(name for name in hub.files if name.startswith("Q6_K/"))


def test_all_parts_of_a_model_are_downloaded(hub: FakeHub, parts: list[str], home: Path) -> None:
    steps: list[int] = []
    path = got(f"{NAME}:Q6_K", lambda done, total: steps.append(done))
    assert path == home / REPOSITORY / "snapshots" / COMMIT / parts[0] and len(parts) > 2
    with open_gguf(path) as file, open_gguf(model_path("moe_plain")) as source:
        assert file.tensors.keys() == source.tensors.keys()
    assert steps == sorted(steps)
    assert steps[-1] == sum(len(hub.files[name]) for name in parts)


def test_a_model_without_its_last_parts_is_none_yet(hub: FakeHub, parts: list[str]) -> None:
    """Ctrl-C while the second part comes; the first one is not downloaded again."""
    with pytest.raises(KeyboardInterrupt):
        got(f"{NAME}:Q6_K", stop_at(len(hub.files[parts[0]]) + 1))
    assert list(kept_models()) == []
    del hub.asked[:]
    got(f"{NAME}:Q6_K")
    assert hub.starts(parts[0]) == [0], "the header alone"
    assert len(hub.starts(parts[2])) == 2


def test_what_another_program_left_in_part_is_completed(
    hub: FakeHub, parts: list[str], home: Path
) -> None:
    first = home / REPOSITORY / "snapshots" / COMMIT / parts[0]
    first.parent.mkdir(parents=True)
    first.write_bytes(hub.files[parts[0]])
    (model,) = kept_models()
    assert got(f"{NAME}:Q6_K") == first
    assert [x.n_bytes for x in kept_models()] > [model.n_bytes]
    assert first.with_name(Path(parts[2]).name).read_bytes() == hub.files[parts[2]]


def test_a_repository_lacks_a_part(hub: FakeHub, parts: list[str]) -> None:
    del hub.files[parts[1]]
    with pytest.raises(DownloadError, match="has no Q6_K") as caught:
        got(f"{NAME}:Q6_K")
    assert caught.value.hint == "it has Q4_K_M, Q8_0"


# ----- who may download what -----


def test_a_token_is_sent_to_the_hub_alone(
    hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the variable, else that of the file; hubs redirect to other addresses."""
    (home / "token").write_text("in-the-file")
    got(f"{NAME}:Q4_K_M")
    monkeypatch.setenv("HF_TOKEN", "in-the-variable")
    got()
    of_hub = [x.token for x in hub.asked if not x.path.startswith("/kept/")]
    assert of_hub == ["Bearer in-the-file"] * 3 + ["Bearer in-the-variable"] * 3
    assert {x.token for x in hub.asked if x.path.startswith("/kept/")} == {None}


def test_a_repository_is_found_by_its_old_name(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hub redirects within itself, and gets the token there too."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.old_name = "someone/Old"
    path = got("someone/Old:Q8_0")
    assert path.read_bytes() == hub.files[Q8] and "models--someone--Old" in path.parts
    of_hub = [x for x in hub.asked if not x.path.startswith("/kept/")]
    assert {x.token for x in of_hub} == {"Bearer secret"} and len(of_hub) == 6


@pytest.mark.parametrize(
    ("status", "code", "message", "hint"),
    [
        (403, "GatedRepo", f"{NAME} is gated", "accept them at http://127.0.0.1"),
        (401, "GatedRepo", f"{NAME} is gated", "HF_TOKEN"),
        (401, "RepoNotFound", "private, or not there", "hf auth login"),
        (403, "", "private, or not there", "HF_TOKEN"),
        (404, "RepoNotFound", f"no repository {NAME}", "check the name"),
        (503, "", "has no time", "try again"),
        (429, "", "has no time", "try again"),
        (418, "", "a refusal, 418", "HF_ENDPOINT"),
    ],
)
def test_refusals_say_what_to_do(
    status: int, code: str, message: str, hint: str, hub: FakeHub
) -> None:
    """Of the list of files, or of a file; files of gated repositories are listed to all."""
    hub.refusals = [(status, code)]
    with pytest.raises(DownloadError, match=message) as caught:
        got()
    assert hint in caught.value.hint and "\n" not in str(caught.value)
    hub.refuses_files = (status, code)
    with pytest.raises(DownloadError, match=message):
        got(f"{NAME}:Q4_K_M")


def test_a_token_that_is_none_is_said_and_not_shown(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for token in ("se\u0441ret", "sec\x01ret"):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(DownloadError, match="letters that none can have") as caught:
            got()
        assert "ret" not in f"{caught.value}" and "HF_TOKEN" in caught.value.hint
    assert hub.asked == []
    monkeypatch.setenv("HF_TOKEN", "of-last-year")
    hub.refusals = [(401, "")]
    hub.headers = {"X-Error-Message": "Invalid credentials in Authorization header"}
    with pytest.raises(DownloadError, match="refuses the token") as caught:
        got()
    assert "a public repository needs none" in caught.value.hint


@pytest.mark.parametrize("address", ["", "hub", "ftp://hub", "http://", "http://[::1"])
def test_a_hub_without_an_address_is_said(
    address: str, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", address)
    with pytest.raises(DownloadError, match="which is no web address"):
        got()


def test_no_network_and_offline_mode_are_said(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE forbids") as caught:
        got()
    assert "unset HF_HUB_OFFLINE" in caught.value.hint and hub.asked == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1 does not answer") as caught:
        got()
    assert "online" in caught.value.hint


def test_without_the_library_the_command_to_install_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sys

    for name in [*sys.modules]:
        if name.startswith(("vkmoe.catalogue.download", "vkmoe.catalogue.hub")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DownloadError, match="needs huggingface_hub") as caught:
        got()
    assert caught.value.hint == 'pip install "vkmoe[hub]"'
