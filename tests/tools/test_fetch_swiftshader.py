"""tools/fetch_swiftshader.py with packages made for the test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools import fetch_swiftshader as tool
from tools.debian import ArchiveError
from tools.fetch_swiftshader import ICD, LIBRARY, fetch_driver, is_complete


def offer(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let Debian's package have these files, where Chromium has them."""

    def fetch(suite: str, packages: Sequence[str], into: Path, alone: bool = False) -> None:
        assert (*packages,) == ("chromium-common",) and alone
        folder = into / "usr/lib/chromium"
        folder.mkdir(parents=True)
        for name in names:
            icd = {"file_format_version": "1.0.0", "ICD": {"library_path": f"./{LIBRARY}"}}
            (folder / name).write_text(json.dumps(icd) if name == ICD else "library")

    monkeypatch.setattr(tool, "fetch", fetch)


def test_the_icd_file_names_the_library_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, LIBRARY, ICD, "other")
    into = tmp_path / "into"
    assert not is_complete(into)
    fetch_driver(into)
    assert is_complete(into) and {file.name for file in into.iterdir()} == {LIBRARY, ICD}
    assert json.loads((into / ICD).read_text())["ICD"]["library_path"] == str(into / LIBRARY)
    assert (into / LIBRARY).read_text() == "library"
    moved = into.rename(tmp_path / "moved")
    assert not is_complete(moved), "it points to where the library was"


def test_a_package_without_the_driver_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing half made is left."""
    offer(monkeypatch, "other")
    monkeypatch.setattr(tool, "FOLDER", tmp_path / "into")
    with pytest.raises(ArchiveError):
        fetch_driver(tmp_path / "into")
    assert tool.main() == 1 and not (tmp_path / "into").exists()
    reason = "bookworm's chromium-common has no SwiftShader"
    assert capsys.readouterr().err == f"no SwiftShader: {reason}\n"
