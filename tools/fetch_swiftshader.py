"""Gets SwiftShader, a second and quite different Vulkan driver, out of Debian's Chromium.

Owns the folder `.venv/swiftshader`: the library, and an ICD file with its absolute path. Installs
nothing on the system and does not choose the driver: whoever wants SwiftShader sets
`VK_DRIVER_FILES` and `VK_ICD_FILENAMES` (older loaders know only this one) to the path that is
printed.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

from tools.debian import ArchiveError, fetch
from tools.gpu_drivers import whole

FOLDER = Path(__file__).resolve().parent.parent / ".venv" / "swiftshader"
SUITE, PACKAGE = "bookworm", "chromium-common"  # the suite with the oldest C library that is tried
LIBRARY, ICD = "libvk_swiftshader.so", "vk_swiftshader_icd.json"


def fetch_driver(into: Path) -> None:
    """Fill `into` anew. Raises ArchiveError."""
    with tempfile.TemporaryDirectory(prefix="vkmoe-swiftshader-") as scratch:
        fetch(SUITE, (PACKAGE,), Path(scratch), alone=True)
        found = next(Path(scratch).rglob(ICD), None)
        if found is None:
            raise ArchiveError(f"{SUITE}'s {PACKAGE} has no SwiftShader")
        icd = json.loads(found.read_text())
        icd["ICD"]["library_path"] = str(into / LIBRARY)
        with whole(into) as folder:
            folder.mkdir()
            shutil.copy(found.with_name(LIBRARY), folder)
            (folder / ICD).write_text(json.dumps(icd) + "\n")


def is_complete(into: Path) -> bool:
    """Say whether the driver is here, and the folder has not been moved since it was fetched."""
    if not all((into / name).is_file() for name in (LIBRARY, ICD)):
        return False
    icd = json.loads((into / ICD).read_text())
    return bool(icd["ICD"]["library_path"] == str(into / LIBRARY))


def main() -> int:
    """Print the path of the ICD file, after fetching the driver if it is not there yet."""
    try:
        if not is_complete(FOLDER):
            fetch_driver(FOLDER)
    except ArchiveError as reason:
        print(f"no SwiftShader: {reason}", file=sys.stderr)
        return 1
    print(FOLDER / ICD)
    return 0


if __name__ == "__main__":
    sys.exit(main())
