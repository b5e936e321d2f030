"""Run the checks of one library: `python -m tools.clients openai_package http://127.0.0.1:8080`.

The last line that it prints is a JSON object. For each check of the library it has a text: why the
check failed, or "" if it passed.
"""

from __future__ import annotations

import json
import sys
import traceback
from importlib import import_module

CHECKS = ("chat", "stream", "tools", "structured")


def main() -> None:
    """Run all checks that the library has, also after one that fails."""
    name, address = sys.argv[1:]
    library = import_module(f"tools.clients.{name}")
    found = {}
    for check in CHECKS:
        if hasattr(library, check):
            try:
                getattr(library, check)(address)
                found[check] = ""
            except Exception as error:
                traceback.print_exc()
                found[check] = f"{type(error).__name__}: {error}"
    print(f"\n{json.dumps(found)}")


if __name__ == "__main__":
    main()
