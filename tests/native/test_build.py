"""What the build makes: an extension that links little, and SPIR-V that follows its table."""

from __future__ import annotations

import os
import subprocess
import time
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import pytest

from tools import compile_shaders
from vkmoe.experts import _residency
from vkmoe.gpu import _native as native

SHADER = """#version 450
#extension GL_GOOGLE_include_directive : require
#include "value.glsl"
layout(local_size_x_id = 0) in;
layout(binding = 0) buffer Words { uint words[]; };
void main() { words[gl_GlobalInvocationID.x] = VALUE + MORE; }
"""
TABLE = """
[[variant]]
name = "one"
source = "shader.comp"
defines = { MORE = 1 }

[[variant]]
name = "two"
source = "shader.comp"
defines = { MORE = 2 }
"""


RUNTIME = ("libstdc++.so", "libm.so", "libgcc_s.so", "libc.so", "ld-linux")


@pytest.mark.parametrize(("extension", "more"), [(native, {"libvulkan.so.1"}), (_residency, set())])
def test_the_extension_needs_vulkan_and_the_runtime_only(extension, more):
    """That of the experts needs no Vulkan either."""
    listed = subprocess.run(
        ["readelf", "-d", extension.__file__], capture_output=True, text=True, check=True
    ).stdout
    needed = {line.split("[")[1].split("]")[0] for line in listed.splitlines() if "NEEDED" in line}
    assert {name for name in needed if not name.startswith(RUNTIME)} == more


@pytest.fixture
def shaders(tmp_path: Path) -> Path:
    folder = tmp_path / "shaders"
    (folder / "include").mkdir(parents=True)
    (folder / "include" / "value.glsl").write_text("#define VALUE 40\n")
    (folder / "shader.comp").write_text(SHADER)
    (folder / "variants.toml").write_text(TABLE)
    return folder


def touch(path: Path, text: str) -> None:
    """Write with a time that is surely newer than any compiled file."""
    path.write_text(text)
    ahead = time.time() + 10
    os.utime(path, (ahead, ahead))


def test_only_what_changed_is_compiled(shaders, tmp_path):
    out = tmp_path / "out"
    assert compile_shaders.compile_all(shaders, out) == 2
    assert (out / "one.spv").read_bytes() != (out / "two.spv").read_bytes()
    assert compile_shaders.compile_all(shaders, out) == 0
    (shaders / "variants.toml").write_text(TABLE.replace("MORE = 2", "MORE = 3"))
    assert compile_shaders.compile_all(shaders, out) == 1
    before = (out / "one.spv").read_bytes()
    touch(shaders / "include" / "value.glsl", "#define VALUE 50\n")
    assert compile_shaders.compile_all(shaders, out) == 2
    assert (out / "one.spv").read_bytes() != before


def test_axes_multiply_a_row(shaders, tmp_path):
    table = """
    [axis.more]
    small = { MORE = 1 }
    large = { MORE = 100 }
    [[variant]]
    name = "add."
    source = "shader.comp"
    axes = ["more"]
    """
    (shaders / "variants.toml").write_text(table)
    assert compile_shaders.compile_all(shaders, tmp_path) == 2
    assert (tmp_path / "add.small.spv").read_bytes() != (tmp_path / "add.large.spv").read_bytes()


def test_a_row_that_is_gone_takes_its_file_along(shaders, tmp_path):
    out = tmp_path / "out"
    compile_shaders.compile_all(shaders, out)
    (shaders / "variants.toml").write_text(TABLE.split('[[variant]]\nname = "two"')[0])
    compile_shaders.compile_all(shaders, out)
    assert [path.name for path in out.glob("*.spv")] == ["one.spv"]


def test_an_error_names_the_variant_and_shows_the_compiler(shaders, tmp_path, capsys):
    out = tmp_path / "out"
    compile_shaders.compile_all(shaders, out)
    touch(shaders / "shader.comp", SHADER.replace("VALUE + MORE", "MISSING"))
    assert compile_shaders.main([str(shaders), str(out)]) == 1
    message = capsys.readouterr().err
    assert "variant one" in message
    assert "variant two" in message
    assert "MISSING" in message
    assert not (out / "one.spv").exists(), "a stale file must not stand in for a broken shader"


@pytest.mark.parametrize("package", [compile_shaders.COMPILER, compile_shaders.TOOLS])
def test_a_missing_compiler_is_named(shaders, tmp_path, capsys, monkeypatch, package):
    def find(name):
        if name == package:
            raise PackageNotFoundError(name)
        return distribution(name)

    for asked in (compile_shaders.prefix, compile_shaders.version):
        asked.cache_clear()
    monkeypatch.setattr(compile_shaders, "distribution", find)
    assert compile_shaders.main([str(shaders), str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert f"no package {package}" in message and "pip" in message and "pyproject" in message
    assert not list((tmp_path / "out").glob("*.spv"))


def test_another_compiler_compiles_anew(shaders, tmp_path, monkeypatch):
    assert compile_shaders.compile_all(shaders, tmp_path) == 2
    monkeypatch.setattr(compile_shaders, "version", lambda package: "another")
    assert compile_shaders.compile_all(shaders, tmp_path) == 2


SHARING = """#version 460
#extension GL_KHR_memory_scope_semantics : require
PRAGMA
layout(local_size_x = 64) in;
layout(set = 0, binding = 0) buffer Words { uint words[]; };
shared uvec4 kept[64];
void main() {
    kept[gl_LocalInvocationIndex] = uvec4(words[gl_LocalInvocationIndex]);
    barrier();
    words[gl_LocalInvocationIndex] = kept[63u - gl_LocalInvocationIndex].y;
}
"""


def visible_accesses(spirv: bytes) -> int:
    """Count the loads and stores that make something available or visible."""
    words, at, found = np.frombuffer(spirv, np.uint32), 5, 0
    while at < len(words):
        code, n_words = int(words[at] & 0xFFFF), int(words[at] >> 16)
        first = {61: 4, 62: 3}.get(code, n_words)
        found += first < n_words and bool(words[at + first] & 0x18)
        at += n_words
    return found


@pytest.mark.parametrize("in_model", [True, False])
def test_accesses_are_free_of_vulkans_memory_model(tmp_path, in_model):
    """What remains is valid; modules of the other model stay as they are."""
    source, out = tmp_path / "sharing.comp", tmp_path / "sharing.spv"
    source.write_text(SHARING.replace("PRAGMA", "#pragma use_vulkan_memory_model" * in_model))
    compile_shaders.compile_glsl(source, out)
    before = out.read_bytes()
    out.write_bytes(compile_shaders.with_free_accesses(before))
    assert (visible_accesses(before) > 0) == (out.read_bytes() != before) == in_model
    assert visible_accesses(out.read_bytes()) == 0
    words = ["--target-env", compile_shaders.TARGET_ENV, str(out)]
    compile_shaders.run(compile_shaders.TOOLS, "spirv-val", words, "sharing")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (TABLE + TABLE, "names used twice"),
        (TABLE.replace("shader.comp", "other.comp"), "no file other.comp"),
        (TABLE.replace("defines", "definitions"), "unknown keys"),
    ],
)
def test_a_malformed_table_is_refused(shaders, tmp_path, table, message):
    (shaders / "variants.toml").write_text(table)
    with pytest.raises(compile_shaders.ShaderError, match=message):
        compile_shaders.compile_all(shaders, tmp_path / "out")


@pytest.mark.parametrize(
    ("script", "name", "variable"),
    [
        ("gpu/native/cmake/kompute.cmake", "kp/kp-0.9.0", "VKMOE_KP_SDIST"),
        ("cpu/native/cmake/ggml.cmake", "ggml/llama_cpp_python-0.3.36", "VKMOE_GGML_SDIST"),
    ],
)
def test_a_damaged_download_is_refused_and_removed(tmp_path, script, name, variable):
    """The next configure downloads again, instead of meeting the same file for ever."""
    damaged = tmp_path / f"{name}.tar.gz"
    damaged.parent.mkdir()
    damaged.write_bytes(b"half a download")
    script = Path(__file__).parents[2] / "vkmoe" / script
    environment = {name: text for name, text in os.environ.items() if name != variable}

    def configure(**more: str) -> str:
        done = subprocess.run(
            ["cmake", "-P", str(script)],
            cwd=tmp_path,
            env=environment | more,
            capture_output=True,
            text=True,
        )
        assert done.returncode != 0
        return done.stderr

    assert "has SHA-256" in configure(**{variable: str(damaged)})
    assert damaged.exists(), "a file that the user named is the user's"
    assert "has SHA-256" in configure()
    assert not damaged.exists()
