"""`bench/gpu_day run`: builds what was packed, then measures, in a fixed order.

Owns which steps there are, their order, limits and commands. Builds run beside each other and
beside what is not timed; nothing runs beside what is. Runs on Python's own library alone.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from ctypes.util import find_library
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.gpu_day_parts import KOMPUTE, LLAMA, PACKED, SDK, WHEELS, WINDOWS
from bench.gpu_day_parts.steps import OK, Day, Record, Step, last_json
from bench.gpu_day_parts.tables import write_tables
from tools.archives import unpack

ROOT = Path(__file__).resolve().parent.parent.parent
# The least memory that a model's file and the experts of a run may take, to keep it in memory.
MODELS = {"tiny": 1 << 30, "qwen3-30b-a3b": 48 << 30}
SHARED_MEMORY = Path("/dev/shm")
DRIVER_FOLDERS = ("/usr/share", "/usr/local/share", "/etc", str(Path.home() / ".local/share"))
CONTAINER_DRIVERS = Path("/usr/local/nvidia/share/vulkan/icd.d")  # the loader does not look there
LIBRARIES = Path("usr/lib/x86_64-linux-gnu")
FAMILIES = "matvec,matvec_residual,expert_gate_up,expert_down"
TYPES = ("Q4_K", "Q6_K", "Q8_0", "MXFP4", "F16")  # those of the model come first
TOKENS, REPEATS = 64, 4
PROMPT = "def add a list of numbers"
PROMPT_LENGTHS = "32,128,512"
SHARES = (50, 25)


class PackedError(Exception):
    """What is wrong with the folder that was packed."""


class DayOptions(NamedTuple):
    """What the user asked of `run`."""

    packed: Path
    out: Path
    model: str
    seconds: float
    patience: float
    device: str


class Place(NamedTuple):
    """Where the things of the day lie on this machine."""

    packed: Path
    scratch: Path
    model_file: Path

    @property
    def sdk(self) -> Path:
        return self.scratch / "sdk"

    @property
    def packages(self) -> Path:
        return self.scratch / "packages"

    @property
    def vkmoe(self) -> Path:
        return self.scratch / "vkmoe"

    @property
    def llama_bench(self) -> Path:
        return self.scratch / "llama-build/bin/llama-bench"


def run(options: DayOptions) -> bool:
    """Do all of it; returns whether every step went well.

    Raises PackedError; then the results of an earlier day are as they were.
    """
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="vkmoe-gpu-day-") as scratch,
        tempfile.TemporaryDirectory(prefix="vkmoe-gpu-day-", dir=_model_parent(options)) as models,
    ):
        place = Place(options.packed, Path(scratch), Path(models) / f"{options.model}.gguf")

        def write(records: Sequence[Record]) -> None:
            write_tables(records, options.out)

        _unpack(place)
        seconds = options.seconds - (time.monotonic() - began)
        day = Day(options.out, seconds, options.patience, environment(place), write)
        try:
            _run_steps(day, place, options)
        finally:
            day.close()
        return all(record.status == OK for record in day.records)


def _unpack(place: Place) -> None:
    """Unpack archives, each into a folder of its name. Raises PackedError."""
    if missing := [name for name in PACKED if not (place.packed / name).exists()]:
        raise PackedError(f"lacks {', '.join(missing)}")
    for name in (SDK, WINDOWS, LLAMA):
        try:
            with tarfile.open(place.packed / name, "r:xz") as archive:
                unpack(archive, place.scratch / name.partition(".")[0])
        except (tarfile.TarError, EOFError, OSError) as error:
            raise PackedError(f"has a {name} that cannot be unpacked: {error}") from error


def _run_steps(day: Day, place: Place, options: DayOptions) -> None:
    day.run(_packages(place))
    builds = [day.start(step) for step in (build_vkmoe(place), make_model(place, options))]
    llama = day.start(build_llama_cpp(place))
    day.finish(builds[0])
    for step in first_steps(options.device):
        day.run(step)
    for running in (builds[1], llama):
        day.finish(running)
    if options.model != "tiny":
        os.sync()  # nothing is written to a disk while something is timed
    for step in (*bench_steps(options), *decode_steps(place, day, options.device)):
        day.run(step)


def _model_parent(options: DayOptions) -> Path | None:
    """Choose shared memory for the model's file where it has room: no disk is involved there."""
    room = MODELS[options.model]
    has_room = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > room
    return SHARED_MEMORY if has_room else None


# ----- what the commands find -----


def environment(place: Place) -> dict[str, str]:
    """Return the variables that all steps run with."""
    libraries = [place.sdk / LIBRARIES]
    if find_library("X11") is None:
        libraries.append(place.scratch / "windows" / LIBRARIES)
    own = {
        "PYTHONPATH": os.pathsep.join(map(str, (place.vkmoe, place.packages, ROOT))),
        "PYTHONSAFEPATH": "1",  # the checkout's vkmoe has no extension
        "PYTHONDONTWRITEBYTECODE": "1",
        "LD_LIBRARY_PATH": _joined(libraries, "LD_LIBRARY_PATH"),
        "PATH": _joined([place.sdk / "usr/bin"], "PATH"),
        "VK_LAYER_PATH": str(place.sdk / "usr/share/vulkan/explicit_layer.d"),
    }
    found = [Path(folder, "vulkan/icd.d") for folder in DRIVER_FOLDERS]
    hidden = sorted(CONTAINER_DRIVERS.glob("*.json"))
    given = {"VK_DRIVER_FILES", "VK_ICD_FILENAMES"} & set(os.environ)
    if hidden and not given and not any(any(folder.glob("*.json")) for folder in found):
        own["VK_DRIVER_FILES"] = os.pathsep.join(map(str, hidden))
    return {**os.environ, **own}


def _joined(first: Sequence[Path], variable: str) -> str:
    return os.pathsep.join([*map(str, first), *filter(None, [os.environ.get(variable)])])


def _vulkan(place: Place) -> list[str]:
    """CMake's variables for the headers and the loader that were packed."""
    return [
        f"-DVulkan_INCLUDE_DIR={place.sdk / 'usr/include'}",
        f"-DVulkan_LIBRARY={place.sdk / LIBRARIES / 'libvulkan.so'}",
    ]


# ----- building -----


def _pip(*arguments: str | Path) -> list[str]:
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    return [*install, "--no-index", "--no-deps", *map(str, arguments)]


def _packages(place: Place) -> Step:
    wheels = sorted((place.packed / WHEELS).glob("*.whl"))
    return Step("python packages", _pip("--target", place.packages, *wheels), 60)


def build_vkmoe(place: Place) -> Step:
    """Build as pip does for a user."""
    defines = [
        *_vulkan(place),
        f"-Dfmt_DIR={place.sdk / LIBRARIES / 'cmake/fmt'}",
        f"-Dpybind11_DIR={place.packages / 'pybind11/share/cmake/pybind11'}",
        "-DVKMOE_CPU=OFF",  # ggml's sources are more than the machine is sent
    ]
    variables = {"VKMOE_KP_SDIST": str(place.packed / KOMPUTE), "CMAKE_ARGS": " ".join(defines)}
    command = _pip(
        "--no-build-isolation", "--target", place.vkmoe,
        "-C", f"build-dir={place.scratch / 'vkmoe-build'}", ROOT,
    )  # fmt: skip
    return Step("build vkmoe", command, 150, needs=("python packages",), environment=variables)


def build_llama_cpp(place: Place) -> Step:
    """Build llama.cpp's Vulkan backend and llama-bench with its own CMake project."""
    source, build = place.scratch / "llama/llama", place.scratch / "llama-build"
    configure = [
        "cmake", "-S", source, "-B", build, "-G", "Ninja",
        "-DGGML_VULKAN=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_COMMON=ON",
        "-DLLAMA_OPENSSL=OFF", f"-DCMAKE_RUNTIME_OUTPUT_DIRECTORY={build / 'bin'}",
        f"-DVulkan_GLSLC_EXECUTABLE={source / 'glslc'}", *_vulkan(place),
        f"-DSPIRV-Headers_DIR={place.sdk / 'usr/share/cmake/SPIRV-Headers'}",
    ]  # fmt: skip
    words = " ".join(f"'{word}'" for word in configure)
    script = f"{words} && nice cmake --build '{build}' --target llama-bench"
    # Not a definition: a rehearsal may ask for a quicker build.
    variables = {"CMAKE_BUILD_TYPE": os.environ.get("CMAKE_BUILD_TYPE", "Release")}
    return Step("build llama.cpp", ["sh", "-c", script], 270, environment=variables)


def make_model(place: Place, options: DayOptions) -> Step:
    """Make the model while all is built; it needs none of it."""
    command = [sys.executable, "-m", "tools.make_synthetic_model", options.model, "--out"]
    variables = {"PYTHONPATH": os.pathsep.join(map(str, (place.packages, ROOT)))}
    return Step(
        "make the model", [*command, str(place.model_file)], 200,
        lambda out, err: last_json(out), ("python packages",), variables,
    )  # fmt: skip


# ----- measuring -----


def _vkmoe(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "vkmoe", *arguments]


def _device(device: str) -> list[str]:
    return ["--device", device] if device else []


def first_steps(device: str) -> Iterator[Step]:
    """Yield what is not timed: is there a device, and does it compute what it should?"""
    needs = ("build vkmoe",)
    where = _device(device)
    yield Step("devices", _vkmoe("devices", "--json", *where), 30, _chosen_device, needs)
    yield Step("selftest", _vkmoe("selftest", "--json", *where), 90, _selftest, needs)
    yield Step(
        "validation",
        _vkmoe("generate", "--validation", *where, "--temp", "0", "-n", "8", "-p", PROMPT),
        60, _validation, needs,
    )  # fmt: skip


def bench_steps(options: DayOptions) -> Iterator[Step]:
    """Yield the measurements of single things: transfers, and kernels in the model's shapes.

    Each type of weights is a step: one that is too slow costs its own rows of the table only.
    """
    asked = [("transfer", 60, ["transfer", "--quick"])]
    shapes = ["-m", "tiny"] if options.model == "tiny" else []
    for kind in TYPES:
        words = ["kernels", "--family", FAMILIES, "--type", kind, *shapes]
        asked.append((f"kernels {kind}", 30, words))
    for name, limit, words in asked:
        command = _vkmoe("bench", *words, "--json", *_device(options.device))
        yield Step(name, command, limit, lambda out, err: last_json(out), ("build vkmoe",))


def decode_steps(place: Place, day: Day, device: str) -> Iterator[Step]:
    """Yield both sides on the same file: resident, then with part of the experts on the device."""
    model = day.result("make the model") or {"n_layers": 0, "n_experts": 0}
    needs = ("build vkmoe", "make the model")
    slots = {share: max(1, model["n_experts"] * share // 100) for share in SHARES}
    own = _vkmoe(
        "bench", "decode", "-m", str(place.model_file), *_device(device), "--json", "-c", "512",
        "--tokens", str(TOKENS), "--repeats", str(REPEATS),
    )  # fmt: skip
    yield Step("vkmoe resident", own, 75, _vkmoe_speed, needs)
    for share, n_slots in slots.items():
        command = [*own, "--expert-slots", str(n_slots)]
        yield Step(f"vkmoe {share} %", command, 75, _vkmoe_speed, needs)
    prompts = [sys.executable, "-m", "bench.speed", "--model", str(place.model_file)]
    command = [*prompts, *_device(device), "--lengths", PROMPT_LENGTHS]
    yield Step("prompts", command, 75, _prompt_speeds, needs)
    rival = [
        str(place.llama_bench), "-m", str(place.model_file), "-ngl", "99", "-p", "0",
        "-n", str(TOKENS), "-r", str(REPEATS), "-o", "json",
    ]  # fmt: skip
    rival_needs = ("build llama.cpp", "make the model", "devices")
    chosen = day.result("devices") or {"index": 0}
    variables = {"GGML_VK_VISIBLE_DEVICES": str(chosen["index"])}
    yield Step("llama.cpp resident", rival, 60, _rival_speed, rival_needs, variables)
    for share in SHARES:
        on_cpu = round(model["n_layers"] * (100 - share) / 100)
        command = [*rival, "--n-cpu-moe", str(on_cpu)]
        yield Step(f"llama.cpp {share} %", command, 60, _rival_speed, rival_needs, variables)


# ----- what the outputs say -----


def _chosen_device(out: str, err: str) -> Mapping[str, Any]:
    (chosen,) = (item for item in last_json(out) if item["chosen"])
    names = ("index", "name", "type", "driver_name", "driver_info", "api_version")
    return {name: chosen[name] for name in names}


def _selftest(out: str, err: str) -> Mapping[str, Any]:
    return {"n_cases": len(last_json(out)["cases"])}


def _validation(out: str, err: str) -> Mapping[str, Any]:
    (said,) = re.findall(r"validation: (.*)", err)
    return {"said": said}


def _vkmoe_speed(out: str, err: str) -> Mapping[str, Any]:
    found = last_json(out)["results"]
    return {
        "tokens_per_second": found["rows"][0]["value"]["median"],
        "bytes_per_token": found["bytes_per_token"],
        "share_of_roofline": found["share_of_roofline"],
    }


def _prompt_speeds(out: str, err: str) -> Mapping[str, Any]:
    rows = last_json(out)["results"]["rows"]
    return {"tokens_per_second": {row["what"]: row["value"]["median"] for row in rows}}


def _rival_speed(out: str, err: str) -> Mapping[str, Any]:
    (found,) = last_json(out)
    names = ("gpu_info", "n_cpu_moe", "n_threads", "flash_attn", "n_gen")
    return {
        "tokens_per_second": median(found["samples_ts"]),  # as ours; it prints the mean
        "samples": found["samples_ts"],
        "backend": found["backends"],
        **{name: found[name] for name in names},
    }
