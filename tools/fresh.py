"""Run the README's commands on a bare Debian, as a new user would, and say what took how long.

Makes a root of Debian's minimal packages with debootstrap, from the archive that this machine's apt
uses, with a user who has sudo; copies the checkout into it, and the folder shared/ beside it where
there is one; runs the commands; deletes the root. Needs root privileges. Mounts are made in a
namespace of their own, so nothing outside the root changes and no mount is left behind.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from tools.debian import ArchiveError, mirror

ROOT = Path(__file__).resolve().parent.parent
SUITES = {"12": "bookworm", "13": "trixie"}
COMMANDS = ("tools/demo", "tools/test")
USER = "newcomer"
HOME = Path("/home") / USER
PROGRAMS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What a machine needs to reach the network, and what tests and setup go by.
NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts")
NETWORK_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "PIP_INDEX_URL", "PIP_CERT",
                     "SSL_CERT_FILE")  # fmt: skip
PASSED_ON = (*NETWORK_VARIABLES, "CI")
FREE_BYTES = 6 << 30  # the root, the packages of a build, the environment, the models of the tests
CANNOT = 77  # exit code: this machine cannot make roots; test runners know it as "skipped"


class CannotError(Exception):
    """Why this machine cannot make a root, in one line for the user."""


class Phase(NamedTuple):
    """A part of the run: one line of the report."""

    name: str
    seconds: float
    exit_code: int

    def __str__(self) -> str:
        failed = f"  FAILED with exit code {self.exit_code}" if self.exit_code else ""
        return f"{self.seconds:7.0f} s  {self.name}{failed}"


def require_privileges() -> None:
    """Raise CannotError unless roots can be made here; installs debootstrap if need be."""
    if os.geteuid() != 0:
        raise CannotError("this needs root: debootstrap and chroot do (try sudo)")
    if shutil.which("unshare") is None or shutil.which("chroot") is None:
        raise CannotError("this needs unshare and chroot")
    if shutil.which("debootstrap") is None:
        say("installing debootstrap")
        apt = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "debootstrap"]
        for command in (apt, ["apt-get", "update", "-qq"], apt):
            if subprocess.run(command, capture_output=True).returncode == 0 and command is apt:
                return
        raise CannotError("apt-get could not install debootstrap")


@contextmanager
def new_root(keep: bool) -> Iterator[Path]:
    """Make an empty folder for a root; delete it in the end unless it is to be kept."""
    place = Path(tempfile.mkdtemp(prefix="vkmoe-fresh-", dir="/var/tmp"))
    try:
        place.chmod(0o755)
        if (free := shutil.disk_usage(place).free) < FREE_BYTES:
            raise CannotError(
                f"{place.parent} has {free / 2**30:.1f} GiB free, and {FREE_BYTES >> 30} are needed"
            )
        yield place
    finally:
        if keep:
            say(f"kept: {place}")
        else:
            shutil.rmtree(place, ignore_errors=True)


def run_in_group(command: Sequence[str | Path], output: IO[str] | None = None) -> int:
    """Run a command and return its exit code; Ctrl-C and SIGTERM end all its processes first."""
    started = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    try:
        return started.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def make_root(root: Path, options: argparse.Namespace) -> None:
    """Make a bare Debian whose one user may use sudo. Raises CannotError where that fails."""
    command = ["unshare", "--mount", "debootstrap", "--variant=minbase",
               "--include=ca-certificates,sudo"]  # fmt: skip
    if options.arch is not None:
        command.append(f"--arch={options.arch}")
    site = mirror()
    with tempfile.TemporaryFile("w+") as log:
        if run_in_group([*command, options.suite, root, site], log) != 0:
            log.seek(0)
            raise CannotError(f"debootstrap failed: {'; '.join(log.read().splitlines()[-2:])}")
    certificates = [os.environ.get(name, "") for name in ("PIP_CERT", "SSL_CERT_FILE")]
    for name in (*NETWORK_FILES, *certificates):
        if Path(name).is_file():
            target = root / name.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            shutil.copyfile(name, target)
    if options.also is not None:
        sources, preferences = root / "etc/apt/sources.list.d", root / "etc/apt/preferences.d"
        (sources / "also.list").write_text(f"deb {site} {options.also} main\n")
        lower = f"Package: *\nPin: release n={options.also}\nPin-Priority: 100\n"
        (preferences / "also").write_text(lower)
    subprocess.run(["chroot", root, "useradd", "--create-home", USER], check=True)
    (root / "etc" / "sudoers.d" / USER).write_text(f"{USER} ALL=(ALL) NOPASSWD: ALL\n")


def copy_checkout(root: Path, more: Sequence[str]) -> None:
    """Copy what a clone would hold, uncommitted changes, the files `more`, and shared/."""
    home = root / HOME.relative_to("/")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in (*filter(None, listed.split("\0")), *more):
        if (ROOT / name).exists():  # a deleted file is listed until the deletion is committed
            target = home / "vkmoe" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
    if (ROOT.parent / "shared").is_dir():
        shutil.copytree(ROOT.parent / "shared", home / "shared")
    subprocess.run(["chroot", root, "chown", "-R", f"{USER}:{USER}", HOME], check=True)


def run_inside(root: Path, user: str, command: str, variables: Mapping[str, str]) -> int:
    """Run a shell command in the checkout of a root; its output goes where ours goes."""
    environment = {"HOME": str(HOME), "USER": user, "PATH": PROGRAMS, "LANG": "C.UTF-8"}
    environment |= {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    environment |= variables
    inside = ["chroot", f"--userspec={user}:{user}", str(root), "/usr/bin/env", "-i",
              *(f"{name}={value}" for name, value in environment.items()),
              "/bin/bash", "-c", f"cd {HOME}/vkmoe && {command}"]  # fmt: skip
    mounted = f'mount --rbind /dev "{root}/dev" && mount -t sysfs none "{root}/sys" && exec "$@"'
    return run_in_group(
        ["unshare", "--mount", "--pid", "--fork", f"--mount-proc={root}/proc",
         "sh", "-c", mounted, "sh", *inside]
    )  # fmt: skip


def take(root: Path, names: Sequence[str]) -> None:
    """Copy files or folders out of the root's checkout to the same place in this one."""
    for name in names:
        source = root / HOME.relative_to("/") / "vkmoe" / name
        if source.is_dir():
            shutil.copytree(source, ROOT / name, dirs_exist_ok=True)
        else:
            shutil.copy2(source, ROOT / name)


def describe(root: Path) -> str:
    """Read the name of the system in a root."""
    release = dict(
        line.split("=", 1) for line in (root / "etc/os-release").read_text().splitlines() if line
    )
    return release["PRETTY_NAME"].strip('"')


def say(text: str) -> None:
    print(f"fresh: {text}", file=sys.stderr, flush=True)


def run(options: argparse.Namespace) -> list[Phase]:
    """Run all phases, up to the first that fails."""
    phases: list[Phase] = []
    variables = {"VKMOE_NEWEST": "1"} if options.newest else {}
    user = USER if options.arch is None else "root"  # sudo does not work under qemu-user

    def timed(name: str, exit_code: int, started: float) -> None:
        phases.append(Phase(name, time.monotonic() - started, exit_code))

    with new_root(options.keep) as root:
        started = time.monotonic()
        say(f"making a bare root of {options.suite}")
        make_root(root, options)
        copy_checkout(root, options.give)
        say(describe(root))
        timed(f"a bare root of {describe(root)}, and the checkout", 0, started)
        for command in options.commands:
            started = time.monotonic()
            say(f"$ {command}")
            timed(command, run_inside(root, user, command, variables), started)
            if phases[-1].exit_code:
                return phases
        take(root, options.take)
    return phases


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/fresh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  tools/fresh trixie                          the README's two commands on Debian 13\n"
        "  tools/fresh 12 tools/demo                   one of them, on Debian 12\n"
        "  tools/fresh testing 'tools/test tests/gpu'  a command with arguments is one word\n"
        "exit codes: 0 all went well, 1 a command failed, 2 wrong usage, 77 this machine cannot",
    )
    parser.add_argument("suite", help="bookworm or 12, trixie or 13, testing, or another suite")
    parser.add_argument(
        "commands", nargs="*", metavar="COMMAND", default=COMMANDS,
        help="run in the checkout by a shell; default: " + ", then ".join(COMMANDS),
    )  # fmt: skip
    parser.add_argument(
        "--newest", action="store_true",
        help="the newest releases of all Python packages instead of those of tools/constraints.txt",
    )  # fmt: skip
    parser.add_argument(
        "--take", action="append", default=[], metavar="PATH",
        help="copy this file or folder out of the root's checkout into this one in the end",
    )  # fmt: skip
    parser.add_argument(
        "--give", action="append", default=[], metavar="FILE",
        help="copy this file of the checkout too, though git ignores it",
    )  # fmt: skip
    parser.add_argument(
        "--also", metavar="SUITE",
        help="apt knows this suite's packages too, for those that the root's own suite lacks",
    )  # fmt: skip
    parser.add_argument("--arch", help="another architecture (arm64), run by qemu-user-static")
    parser.add_argument("--keep", action="store_true", help="do not delete the root in the end")
    options = parser.parse_intermixed_args(arguments)
    options.suite = SUITES.get(options.suite, options.suite)
    return options


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through all `finally` clauses
    try:
        require_privileges()
        phases = run(options)
    except (CannotError, ArchiveError) as reason:
        say(str(reason))
        return CANNOT
    except KeyboardInterrupt:
        return 130
    print("\n".join(map(str, phases)))
    return 1 if any(phase.exit_code for phase in phases) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
