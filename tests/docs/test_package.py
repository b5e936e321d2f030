"""What an index and a lawyer look for in the package: metadata, licence, notices."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

from tools.vendor_page import packages

ROOT = Path(__file__).resolve().parent.parent.parent
NOTICE = (ROOT / "NOTICE").read_text()
# Every wheel gets its metadata from the same function; test_readme.py builds a whole one.
BUILD = (
    "import sys, scikit_build_core.build as build\n"
    "build.build_sdist(sys.argv[1])\n"
    "build.prepare_metadata_for_build_wheel(sys.argv[1])\n"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and what a wheel says of itself."""
    folder = tmp_path_factory.mktemp("package")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, folder], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.full
def test_the_metadata_says_what_it_is(built: Path) -> None:
    (file,) = built.glob("*.dist-info/METADATA")
    metadata = Metadata.from_email(file.read_bytes())  # raises where a field is not as it must be
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.license_files == ["LICENSE", "NOTICE"]
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text()
    assert set(metadata.project_urls or ()) == {"Source", "Documentation", "Changelog", "Issues"}
    systems = {each.split(" :: ")[-1] for each in metadata.classifiers or ()}
    assert {"Linux", "3.11", "3.13", "3.14"} <= systems


@pytest.mark.full
def test_wheel_and_source_distribution_hold_the_licences(built: Path) -> None:
    (info,) = built.glob("*.dist-info")
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as members:
        names = {name.partition("/")[2] for name in members.getnames()}
    assert {"LICENSE", "NOTICE", "CONTRIBUTING.md", "SECURITY.md", "README.md"} <= names
    for name in ("LICENSE", "NOTICE"):
        assert (info / "licenses" / name).read_text() == (ROOT / name).read_text()


def test_the_licence_is_whole() -> None:
    """The text is the one that DOMPurify ships, which has the same licence."""
    texts = [ROOT / "LICENSE", ROOT / "vkmoe/server/page/vendor/purify.LICENSE"]
    ours, theirs = (each.read_text().partition("END OF TERMS")[0].split() for each in texts)
    assert ours == theirs


@pytest.mark.parametrize("name", [each["name"] for each in packages()])
def test_the_notice_names_the_scripts_of_the_page(name: str) -> None:
    assert f"\n{name}: " in NOTICE.lower()
