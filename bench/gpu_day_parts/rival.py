"""Packs llama.cpp's sources, with its Vulkan shaders compiled here, in its own build's terms.

The machine of the GPU day has no glslc. llama.cpp's generator is run here with one from Debian, and
the SPIR-V is kept under the names the generator gives; there, its unchanged build calls a stand-in
that hands out those files. Owns what is left out: other backends, shaders that decoding a token
does not run. A shader that was left out is no SPIR-V: a driver that is asked for it refuses.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.archives import unpack
from tools.llama_cpp_shaders import SHADERS, VENDORED, fetch_glslc

KEPT = ("CMakeLists.txt", "LICENSE", "cmake", "common", "ggml", "include", "src",
        "tools/llama-bench", "vendor")  # fmt: skip
BACKENDS_KEPT = {"ggml-cpu", "ggml-vulkan"}
# Weight types that no model of the day has, or has in prompts.
SHADERS_LEFT_OUT = (
    "*iq[1-4]_*|*q[23]_k*|*q[1245]_[01]*|*nvfp4*|*bf16*|matmul*q8_0*|matmul*q5_k*|matmul*mxfp4*"
)
OUTPUT_WORD = 'for word; do [ "$last" = -o ] && out=$word; last=$word; done'

COMPILER = f"""#!/bin/sh
{OUTPUT_WORD}
case ${{out##*/}} in
{SHADERS_LEFT_OUT}) printf '\\0\\0\\0\\0' >"$out"; exit;;
esac
exec GLSLC "$@"
"""
STAND_IN = f"""#!/bin/sh
# Stands in for glslc: hands out what was compiled when this was packed.
here=${{0%/*}}
{OUTPUT_WORD}
case $out in
-) name=${{last##*/}}; cat "$here/features/${{name%.comp}}.txt" >&2;;
*) cp "$here/spv/${{out##*/}}" "$out";;
esac
"""
PROJECT = """cmake_minimum_required(VERSION 3.19)
project(rival C CXX)
add_subdirectory(llama.cpp)
add_subdirectory(llama.cpp/tools/llama-bench)
"""


def pack_llama_cpp(sdist: Path, scratch: Path, target: Path) -> None:
    """Write the archive `target`. Raises ArchiveError, CalledProcessError."""
    tree = scratch / "llama"
    source = _unpack(sdist, scratch, tree)
    compiler = _compiler(scratch)
    (tree / "CMakeLists.txt").write_text(PROJECT)
    (tree / "glslc").write_text(STAND_IN)
    (tree / "glslc").chmod(0o755)
    features = _features(source / SHADERS, compiler, tree / "features")
    _compile(source / SHADERS, compiler, features, tree / "spv")
    with tarfile.open(target, "w:xz", preset=9) as archive:
        archive.add(tree, "llama")


def _unpack(sdist: Path, scratch: Path, tree: Path) -> Path:
    """Return the folder of llama.cpp's sources, less what is not needed."""
    with tarfile.open(sdist) as archive:
        unpack(archive, scratch / "sdist")
    (vendored,) = scratch.glob(f"sdist/*/{VENDORED}")
    source = tree / "llama.cpp"
    for name in KEPT:
        copy = shutil.copytree if (vendored / name).is_dir() else shutil.copy
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        copy(vendored / name, source / name)
    for backend in (source / "ggml/src").glob("ggml-*/"):
        if backend.name not in BACKENDS_KEPT:
            shutil.rmtree(backend)
    return source


def _compiler(scratch: Path) -> Path:
    """Return a script that runs Debian's glslc, and skips what is left out."""
    script = scratch / "glslc"
    words = fetch_glslc(scratch / "glslc-root")
    script.write_text(COMPILER.replace("GLSLC", shlex.join(words)))
    script.chmod(0o755)
    return script


def _features(shaders: Path, compiler: Path, into: Path) -> list[str]:
    """Ask the compiler what llama.cpp's CMake asks, keep its words, return what it has."""
    into.mkdir()
    found = []
    for test in sorted(shaders.glob("feature-tests/*.comp")):
        command = [compiler, "-fshader-stage=compute", "--target-env=vulkan1.3", "-o", "-", test]
        done = subprocess.run([*map(str, command)], capture_output=True)
        said = done.stderr.decode()
        said = said.replace(str(test.parent), "")
        (into / f"{test.stem}.txt").write_text(said)
        if "extension not supported" not in said:
            found.append(test.stem)
    return found


def _compile(shaders: Path, compiler: Path, features: list[str], into: Path) -> None:
    """Run llama.cpp's generator over all its shaders; `into` has their SPIR-V in the end."""
    into.mkdir()
    generator = into.parent.parent / "generator"
    defines = [f"-DGGML_VULKAN_{feature.upper()}_GLSLC_SUPPORT" for feature in features]
    subprocess.run(
        ["g++", "-O1", "-std=c++17", "-pthread", *defines, "-o", generator,
         shaders / "vulkan-shaders-gen.cpp"], check=True,
    )  # fmt: skip
    sources = sorted(shaders.glob("*.comp"))

    def run(source: Path) -> None:
        scratch = generator.parent / source.name
        command = [generator, "--glslc", compiler, "--source", source, "--output-dir", into,
                   "--target-hpp", f"{scratch}.hpp", "--target-cpp", f"{scratch}.cpp"]  # fmt: skip
        subprocess.run([*map(str, command)], check=True, capture_output=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for index, _ in enumerate(pool.map(run, sources), start=1):
            print(f"\r  llama.cpp's shaders: {index} of {len(sources)} files", end="",
                  file=sys.stderr, flush=True)  # fmt: skip
    print(file=sys.stderr)
