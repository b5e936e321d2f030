"""Free host memory, read from invented folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from vkmoe.cpu.host_memory import FALLBACK_BYTES, available_bytes

MIB, GIB = 1 << 20, 1 << 30
UNLIMITED_V1 = 9223372036854771712  # what version 1 says where there is no limit


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 32 GiB available and no cgroups."""
    (tmp_path / "meminfo").write_text(
        f"MemTotal: {64 * MIB} kB\nMemFree: 77 kB\nMemAvailable: {32 * MIB} kB\n"
    )
    (tmp_path / "cgroup").mkdir()
    return tmp_path


def available(root: Path) -> int:
    return available_bytes(root / "meminfo", root / "cgroup", root / "self")


def join(root: Path, *lines: str) -> None:
    """What /proc/self/cgroup says."""
    (root / "self").write_text("".join(line + "\n" for line in lines))


def v2(root: Path, path: str, limit: int | str, used: int, cache: int = 0) -> None:
    """A cgroup of version 2, with half of `cache` active."""
    folder = root / "cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    stat = f"anon 12345\nfile 99\ninactive_file {cache // 2}\nactive_file {cache // 2}\n"
    (folder / "memory.stat").write_text(stat)


def v1(root: Path, path: str, limit: int, used: int, cache: int = 0) -> None:
    folder = root / "cgroup" / "memory" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    own = "inactive_file 1\nactive_file 2\n"  # without its children: not what counts
    total = f"total_inactive_file {cache // 2}\ntotal_active_file {cache // 2}\n"
    (folder / "memory.stat").write_text(own + total)


def test_without_cgroups_what_is_available_counts(root: Path) -> None:
    assert available(root) == 32 * GIB


def test_without_meminfo_little_is_assumed(root: Path) -> None:
    (root / "meminfo").unlink()
    assert available(root) == FALLBACK_BYTES


def test_a_container_s_own_root_limits(root: Path) -> None:
    join(root, "0::/")
    v2(root, "", 8 * GIB, 3 * GIB)
    assert available(root) == 5 * GIB


def test_page_cache_is_not_in_use(root: Path) -> None:
    """A model file that was read just now fills the page cache of the cgroup."""
    join(root, "0::/")
    v2(root, "", 8 * GIB, 8 * GIB, cache=6 * GIB)
    assert available(root) == 6 * GIB


def test_no_limit_is_no_limit(root: Path) -> None:
    join(root, "0::/user.slice")
    v2(root, "user.slice", "max", 40 * GIB)
    assert available(root) == 32 * GIB


@pytest.mark.parametrize("tight", ["user.slice", "user.slice/app.slice", "user.slice/app.slice/x"])
def test_the_tightest_of_nested_limits_binds(root: Path, tight: str) -> None:
    join(root, "0::/user.slice/app.slice/x")
    for path in ("user.slice", "user.slice/app.slice", "user.slice/app.slice/x", "other"):
        v2(root, path, {tight: 4 * GIB, "other": GIB}.get(path, 20 * GIB), GIB)
    assert available(root) == 3 * GIB


def test_a_full_cgroup_leaves_nothing(root: Path) -> None:
    join(root, "0::/x")
    v2(root, "x", 4 * GIB, 5 * GIB)
    assert available(root) == 0


@pytest.mark.parametrize("path", ["", "docker", "docker/abc"])
def test_version_1(root: Path, path: str) -> None:
    join(root, "11:cpu,cpuacct:/docker/abc", "4:memory:/docker/abc", "1:name=systemd:/other")
    for folder in ("", "docker", "docker/abc"):
        v1(root, folder, UNLIMITED_V1, 40 * GIB)
    v1(root, "other", GIB, 0)
    assert available(root) == 32 * GIB
    v1(root, path, 10 * GIB, 9 * GIB, cache=4 * GIB)
    assert available(root) == 5 * GIB


def test_memory_beside_other_controllers(root: Path) -> None:
    join(root, "3:cpu,memory:/x")
    v1(root, "x", 2 * GIB, GIB)
    assert available(root) == GIB


@pytest.mark.parametrize("line", ["0::/../../elsewhere", "4:memory:/gone/away", "nonsense", "0::"])
def test_a_path_that_is_not_mounted_leaves_the_root(root: Path, line: str) -> None:
    """In a container the path can be the host's, while only the container's cgroup is mounted."""
    join(root, line)
    v2(root, "", 8 * GIB, GIB)
    v1(root, "", 6 * GIB, GIB)
    assert available(root) == 5 * GIB


def test_damaged_files_are_ignored(root: Path) -> None:
    join(root, "0::/x")
    v2(root, "x", 8 * GIB, GIB)
    (root / "cgroup" / "x" / "memory.stat").write_bytes(b"\xff\nactive_file\ninactive_file many\n")
    assert available(root) == 7 * GIB
