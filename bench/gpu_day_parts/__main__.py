"""The command line of bench/gpu_day."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from pathlib import Path

from bench.gpu_day_parts.day import MODELS, PARTS, DayOptions, PackedError, run

FOLDER, RESULTS = Path("build/gpu_day"), Path("build/gpu_day_results")
DESCRIPTION = "Measure vkmoe beside llama.cpp on a machine with a GPU and without network."
EPILOG = """after tools/setup on a machine with network, then on that with the GPU:
  bench/gpu_day pack build/gpu_day
  bench/gpu_day run build/gpu_day --out build/gpu_day_results
exit codes: 0 every step went well, 1 one did not, 2 wrong usage"""


def main() -> int:
    """Run `pack` or `run`; returns the exit code."""
    options = _parse()
    if options.command == "pack":
        return _pack(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the steps' processes end
    folder, out = options.folder.resolve(), options.out.resolve()
    seconds = options.minutes * 60
    asked = DayOptions(
        folder, out, options.model, seconds, options.patience, options.device, options.part
    )
    try:
        return 0 if run(asked) else 1
    except PackedError as reason:
        hint = "hint: bench/gpu_day pack makes it on a machine with network"
        print(f"gpu_day: {options.folder} {reason}\n{hint}", file=sys.stderr)
        return 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/gpu_day", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    pack = commands.add_parser("pack", help="gather what `run` needs, at most 60 MB")
    pack.add_argument("folder", nargs="?", type=Path, default=FOLDER, help=f"default: {FOLDER}")
    pack.add_argument(
        "--python", default="3.12", help="of the machine with the GPU (default: 3.12)"
    )
    pack.add_argument(
        "--leave-out", default="", metavar="NAME,...", help="Python packages which that machine has"
    )
    pack.add_argument(
        "--llama-sdist", type=Path, metavar="FILE",
        help="a source distribution of llama-cpp-python, instead of a download of 77 MB",
    )  # fmt: skip
    go = commands.add_parser("run", help="build and measure, in at most 15 minutes")
    go.add_argument("folder", nargs="?", type=Path, default=FOLDER, help=f"default: {FOLDER}")
    go.add_argument("--out", type=Path, default=RESULTS, help=f"default: {RESULTS}")
    go.add_argument(
        "--model", choices=sorted(MODELS), default="qwen3-30b-a3b",
        help="tiny: only to try whether all of it works (default: qwen3-30b-a3b)",
    )  # fmt: skip
    go.add_argument(
        "--part", choices=PARTS, default="all",
        help="checks: self-test, laws, single kernels; decoding: a model beside llama.cpp, whose "
        "llama-bench.xz from the results of checks is not built again where it lies in FOLDER",
    )  # fmt: skip
    go.add_argument("--minutes", type=float, default=15.0, help="of the whole (default: 15)")
    go.add_argument(
        "--patience", type=float, default=1.0, metavar="FACTOR", help="stretches each step's limit"
    )
    go.add_argument("--device", default="", help="Vulkan device, as for vkmoe")
    return parser.parse_args()


def _pack(options: argparse.Namespace) -> int:
    # Only here: `run` starts on a machine that has none of what these import.
    from bench.gpu_day_parts.packing import LimitError, Options, pack
    from tools.debian import ArchiveError

    left_out = frozenset(filter(None, options.leave_out.split(",")))
    try:
        pack(Options(options.folder, options.python, left_out, options.llama_sdist))
    except (LimitError, ArchiveError, OSError) as reason:
        print(f"gpu_day: {reason}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as failed:
        print(f"gpu_day: {failed.cmd[0]} ended with {failed.returncode}\nhint: its own words are "
              "above; what was packed before is kept", file=sys.stderr)  # fmt: skip
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
