"""The command line and the record that all benchmarks of this folder share."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vkmoe.bench.measure import MIN_REPEATS, document
from vkmoe.errors import VkmoeError
from vkmoe.gpu.device import VULKAN

RESULTS = Path(__file__).resolve().parent / "results"


def command_line(doc: str | None, repeats: int = MIN_REPEATS) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        description=(doc or "").split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--device",
        default=os.environ.get("VKMOE_DEVICE", VULKAN),
        help="as for vkmoe (default: VKMOE_DEVICE, else the best Vulkan device)",
    )
    parser.add_argument("--repeats", type=int, default=repeats, help=f"default: {repeats}")
    parser.add_argument("--record", action="store_true", help="also write to bench/results/")
    return parser


def finish(name: str, card: dict[str, Any], results: dict[str, Any], record: bool) -> None:
    """Print the JSON document as the last line; with `record`, also keep it as a file."""
    found = document(name, card, results)
    if record:
        device = re.sub(r"[^a-z0-9]+", "-", card["device"].split("(")[0].lower()).strip("-")
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{card['date'][:10]}-{name}-{device}.json"
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(f"recorded: bench/results/{path.name}")
    print(json.dumps(found), flush=True)


def run_main(main: Callable[[], None]) -> None:
    """Run a benchmark; what the user can mend becomes one line and a hint."""
    try:
        main()
    except VkmoeError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
