"""Saving the state of a conversation to a file, and restoring it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Served, serving

PROMPT = "def main():\n    import os\n    import sys\n    print(os.path)\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with serving(parallel=1, settings={"slot_save_path": str(folder)}) as served:
        served.wait()
        yield served


def ask(served: Served) -> Any:
    return served.post("/completion", {"prompt": PROMPT, "n_predict": 4, "temperature": 0}).json()


def act(served: Served, action: str, slot: str = "0", **body: Any) -> Any:
    return served.post(f"/slots/{slot}?action={action}", body)


def test_a_state_is_saved_forgotten_and_restored(server: Served, folder: Path) -> None:
    first = ask(server)
    saved = act(server, "save", filename="a.bin").json()
    assert saved["n_saved"] == first["timings"]["prompt_n"] + 3
    assert saved["n_written"] == (folder / "a.bin").stat().st_size
    assert act(server, "erase").json() == {"id_slot": 0, "n_erased": saved["n_saved"]}
    assert ask(server)["timings"]["cache_n"] == 0
    act(server, "erase")
    restored = act(server, "restore", filename="a.bin").json()
    assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
    again = ask(server)
    assert again["content"] == first["content"] and again["timings"]["prompt_n"] == 1


@pytest.mark.parametrize(
    ("action", "slot", "body", "status"),
    [
        ("save", "0", {"filename": "../a"}, 400),
        ("save", "0", {"filename": "/etc/a"}, 400),
        ("save", "0", {"filename": ".."}, 400),
        ("save", "0", {"filename": ""}, 400),
        ("save", "0", {}, 400),
        ("restore", "0", {"filename": "none.bin"}, 400),
        ("restore", "0", {"filename": "text"}, 400),
        ("save", "1", {"filename": "a"}, 400),
        ("save", "-1", {"filename": "a"}, 400),
        ("copy", "0", {"filename": "a"}, 400),
    ],
)
def test_what_cannot_be_is_refused(
    server: Served, folder: Path, action: str, slot: str, body: dict[str, Any], status: int
) -> None:
    (folder / "text").write_text("no state")
    before = sorted(folder.parent.rglob("*"))
    answer = act(server, action, slot, **body)
    assert answer.status_code == status and answer.json()["error"]["message"]
    assert sorted(folder.parent.rglob("*")) == before


def test_without_a_folder_nothing_is_saved() -> None:
    with serving() as served:
        served.wait()
        assert act(served, "save", filename="a").status_code == 501
        assert act(served, "erase").status_code == 200
