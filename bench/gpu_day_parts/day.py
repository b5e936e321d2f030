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
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.gpu_day_parts import KOMPUTE, LLAMA, LLAMA_BENCH, PACKED, SDK, WHEELS, WINDOWS
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
LINKED_LIBRARIES = ("X11", "Xext", "xcb", "GLX", "EGL")  # that NVIDIA's driver is linked with
# What is timed of kernels: of single tokens and of prompts, each in types of which those of the
# model come first. Prompts are multiplied on matrix units where the device has any.
FAMILIES = "matvec,matvec_residual,expert_gate_up,expert_down"
TYPES = ("Q4_K", "Q6_K", "Q8_0", "MXFP4", "F16", "Q5_0", "IQ3_XXS", "IQ2_XS", "NVFP4")
PROMPT_FAMILIES = "matmul,expert_matmul_gate_up,expert_matmul_down"
PROMPT_TYPES = ("Q4_K", "Q6_K", "MXFP4", "IQ3_XXS")
TOKENS, REPEATS = 64, 4
CARD_GIB = 12  # of the card that a larger one is taken for: what most users have
# Kernels against their twins, and the law: placement, neighbours and cuts never change the answer.
LAWS = ("tests/kernels", "tests/engine", "tests/execute")
PROMPT = "def add a list of numbers"
PROMPT_LENGTHS = "32,128,512,2048"
SHARES = (50, 25)
PARTS = ("all", "checks", "decoding")


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
    part: str = "all"  # one of PARTS


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
    def llama(self) -> Path:
        return self.scratch / "llama/llama"

    @property
    def llama_bench(self) -> Path:
        return self.scratch / "llama-build/bin/llama-bench"

    @property
    def kept_llama_bench(self) -> Path:
        """Where the program of an earlier part may lie, as it was put beside the results."""
        return self.packed / LLAMA_BENCH


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
    checks, decoding = (options.part in ("all", part) for part in PARTS[1:])
    day.run(_packages(place))
    vkmoe = day.start(build_vkmoe(place))
    others = [make_model(place, options)] if decoding else []
    beside = [day.start(step) for step in (*others, build_llama_cpp(place, options.out))]
    day.finish(vkmoe)
    day.run(find_device(options.device))
    if checks:  # none is timed
        beside += [day.start(step) for step in check_steps(options.device)]
    for running in beside:
        day.finish(running)
    if decoding and options.model != "tiny":
        os.sync()  # nothing is written to a disk while something is timed
    if checks:
        for step in bench_steps(options):
            day.run(step)
    if decoding:
        for step in decode_steps(place, day, options.device):
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
    if not all(map(find_library, LINKED_LIBRARIES)):
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
    ]
    variables = {
        "VKMOE_KP_SDIST": str(place.packed / KOMPUTE),
        "VKMOE_GGML_SOURCE": str(place.llama / "llama.cpp/ggml"),
        "CMAKE_ARGS": " ".join(defines),
    }
    command = _pip(
        "--no-build-isolation", "--target", place.vkmoe,
        "-C", f"build-dir={place.scratch / 'vkmoe-build'}", ROOT,
    )  # fmt: skip
    return Step("build vkmoe", command, 150, needs=("python packages",), environment=variables)


def build_llama_cpp(place: Place, out: Path) -> Step:
    """Build llama.cpp's Vulkan backend and llama-bench with its own CMake project, and put the
    program beside the results; or unpack that of an earlier part."""
    kept, program = place.kept_llama_bench, place.llama_bench
    if kept.exists():
        script = f"mkdir -p '{program.parent}' && xz -dc '{kept}' >'{program}' && "
        return Step("build llama.cpp", ["sh", "-c", f"{script}chmod +x '{program}'"], 60)
    source, build = place.llama, place.scratch / "llama-build"
    configure = [
        "cmake", "-S", source, "-B", build, "-G", "Ninja",
        "-DGGML_VULKAN=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_COMMON=ON",
        "-DLLAMA_OPENSSL=OFF", f"-DCMAKE_RUNTIME_OUTPUT_DIRECTORY={build / 'bin'}",
        f"-DVulkan_GLSLC_EXECUTABLE={source / 'glslc'}", *_vulkan(place),
        f"-DSPIRV-Headers_DIR={place.sdk / 'usr/share/cmake/SPIRV-Headers'}",
    ]  # fmt: skip
    words = " ".join(f"'{word}'" for word in configure)
    script = f"{words} && nice cmake --build '{build}' --target llama-bench"
    script += f" && strip '{program}' && xz -T0 -c '{program}' >'{out / LLAMA_BENCH}'"
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


def find_device(device: str) -> Step:
    """Is there a device?"""
    command = _vkmoe("devices", "--json", *_device(device))
    return Step("devices", command, 30, _chosen_device, ("build vkmoe",))


def check_steps(device: str) -> Iterator[Step]:
    """Yield what is not timed: does the device compute what it should?"""
    needs = ("build vkmoe", "devices")
    where = _device(device)
    yield Step(
        "validation",
        _vkmoe("generate", "--validation", *where, "--temp", "0", "-n", "8", "-p", PROMPT),
        60, _validation, needs,
    )  # fmt: skip
    yield Step("selftest", _vkmoe("selftest", "--json", *where), 240, _selftest, needs)
    # Appended: the checkout's vkmoe has no extension. Warnings are those of other versions.
    n_processes = str(min(12, os.cpu_count() or 1))
    command = [sys.executable, "-m", "pytest", "--import-mode=append", "-p", "no:cacheprovider",
               "-o", "filterwarnings=default", "--disable-warnings", "-v", "-n", n_processes,
               *(str(ROOT / law) for law in LAWS)]  # fmt: skip
    variables = {"VKMOE_DEVICE": device or "vulkan"}
    yield Step("laws", command, 180, _laws, needs, variables)


def bench_steps(options: DayOptions) -> Iterator[Step]:
    """Yield the measurements of single things: how long the demo model's kernels are compared
    before its first token, transfers, and kernels in the model's shapes.

    Each type of weights is a step: one that is too slow costs its own rows of the table only.
    """
    needs, where = ("build vkmoe",), _device(options.device)
    canary = [sys.executable, "-m", "bench.canary", "demo", *where]
    yield Step("canary", canary, 90, _canary, needs)
    asked = [("transfer", 60, ["transfer", "--quick"])]
    shapes = ["-m", "tiny"] if options.model == "tiny" else []
    kernels = [(FAMILIES, kind, "") for kind in TYPES]
    kernels += [(PROMPT_FAMILIES, kind, " of prompts") for kind in PROMPT_TYPES]
    for families, kind, what in kernels:
        words = ["kernels", "--family", families, "--type", kind, *shapes]
        asked.append((f"kernels {kind}{what}", 30, words))
    for name, limit, words in asked:
        command = _vkmoe("bench", *words, "--json", *where)
        yield Step(name, command, limit, lambda out, err: last_json(out), needs)


def decode_steps(place: Place, day: Day, device: str) -> Iterator[Step]:
    """Yield both sides on the same file: resident, then with part of the experts on the device."""
    model = day.result("make the model") or {"n_layers": 0, "n_experts": 0, "file_bytes": 0}
    chosen = day.result("devices") or {"index": 0, "memory": 0}
    needs = ("build vkmoe", "make the model")
    rival_needs = ("build llama.cpp", "make the model", "devices")
    variables = {"GGML_VK_VISIBLE_DEVICES": str(chosen["index"])}
    file, where = str(place.model_file), _device(device)
    own = _vkmoe(
        "bench", "decode", "-m", file, *where, "--json", "-c", "512",
        "--tokens", str(TOKENS), "--repeats", str(REPEATS),
    )  # fmt: skip
    rival = [str(place.llama_bench), "-m", file, "-ngl", "99", "-r", str(REPEATS), "-o", "json"]
    rival_decode = [*rival, "-p", "0", "-n", str(TOKENS)]

    def ours(what: str, *options: str) -> Step:
        return Step(f"vkmoe {what}", [*own, *options], 75, _vkmoe_speed, needs)

    def theirs(what: str, n_cpu_moe: int = 0) -> Step:
        command = [*rival_decode, *(("--n-cpu-moe", str(n_cpu_moe)) if n_cpu_moe else ())]
        return Step(f"llama.cpp {what}", command, 60, _rival_speed, rival_needs, variables)

    yield ours("resident")
    yield theirs("resident")
    small = f"{CARD_GIB} GiB"
    card = ("--vram-margin", str(max(0, chosen["memory"] - (CARD_GIB << 30))))
    plan = _vkmoe("plan", file, *where, *card, "-c", "512", "--json")
    yield Step("plan", plan, 45, _plan, needs)
    yield ours(small, *card)
    yield theirs(small, _layers_beyond(model, CARD_GIB << 30))
    for mode in ("hybrid", "cache"):
        yield ours(f"{small}, {mode}", *card, "--expert-mode", mode)
    pool = ("--expert-mode", "cache", "--host-pool", f"{CARD_GIB - 4}GiB")
    yield ours(f"{small}, exchange", *card, *pool)
    prompts = [sys.executable, "-m", "bench.speed", "--model", file, *where]
    yield Step("prompts", [*prompts, "--lengths", PROMPT_LENGTHS], 90, _prompt_speeds, needs)
    command = [*rival, "-p", PROMPT_LENGTHS, "-n", "0"]
    yield Step("prompts of llama.cpp", command, 60, _rival_prompts, rival_needs, variables)
    for share in SHARES:
        n_slots = max(1, model["n_experts"] * share // 100)
        yield ours(f"{share} %", "--expert-slots", str(n_slots))
        yield theirs(f"{share} %", round(model["n_layers"] * (100 - share) / 100))


def _layers_beyond(model: Mapping[str, Any], card: int) -> int:
    """Count the layers whose experts a user of llama.cpp would leave to the CPU on such a card.

    A GiB is left for what is computed, the KV cache and the driver; experts are 95 % of the file.
    """
    n_layers, n_bytes = model["n_layers"], model["file_bytes"]
    too_many = n_bytes - (card - (1 << 30))
    return min(n_layers, max(0, ceil(too_many / (0.95 * n_bytes / n_layers)))) if n_layers else 0


# ----- what the outputs say -----


def _chosen_device(out: str, err: str) -> Mapping[str, Any]:
    (chosen,) = (item for item in last_json(out) if item["chosen"])
    names = ("index", "name", "type", "driver_name", "driver_info", "api_version")
    memory = max(heap["size"] for heap in chosen["heaps"] if heap["device_local"])
    return {name: chosen[name] for name in names} | {"memory": memory}


def _selftest(out: str, err: str) -> Mapping[str, Any]:
    return {"n_cases": len(last_json(out)["cases"])}


def _canary(out: str, err: str) -> Mapping[str, Any]:
    rows = last_json(out)["results"]["rows"]
    return {"seconds": {row["what"]: row["value"]["median"] for row in rows}}


def _validation(out: str, err: str) -> Mapping[str, Any]:
    (said,) = re.findall(r"validation: (.*)", err)
    return {"said": said}


def _laws(out: str, err: str) -> Mapping[str, Any]:
    return {"said": out.rstrip().splitlines()[-1]}


def _plan(out: str, err: str) -> Mapping[str, Any]:
    found = last_json(out)
    names = ("mode", "executor", "expert_slots", "exchanges", "cpu_layers", "expected", "others",
             "bytes_per_second")  # fmt: skip
    return {name: found[name] for name in names}


def _vkmoe_speed(out: str, err: str) -> Mapping[str, Any]:
    found = last_json(out)["results"]
    return {
        "tokens_per_second": found["rows"][0]["value"]["median"],
        "bytes_per_token": found["bytes_per_token"],
        "share_of_roofline": found["share_of_roofline"],
        "rows": [row["what"] for row in found["rows"]],
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


def _rival_prompts(out: str, err: str) -> Mapping[str, Any]:
    speeds = {f"llama.cpp prompt {found['n_prompt']}": median(found["samples_ts"])
              for found in last_json(out)}  # fmt: skip
    return {"tokens_per_second": speeds}
