"""This module specifies kernels: bindings and access, push constants, specialisation constants.

A `KernelSpec` is what the host must know of a shader; a test compares each with its SPIR-V. The
table `shaders/variants.toml` says which SPIR-V variants exist; they are compiled when the package
is built.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from vkmoe.gpu.extension import native
from vkmoe.gpu.program import Dispatch, Range, TensorRef

__all__ = ["KERNELS", "Binding", "KernelSpec", "PushField", "kernel", "spirv_folder", "spirv_words"]

Access = Literal["r", "w", "rw"]


class Binding(NamedTuple):
    """Describes a descriptor-bound buffer of a kernel."""

    name: str
    access: Access


class PushField(NamedTuple):
    """Describes a push constant: `u32`, `f32` or `address` (uvec2, 8-byte aligned)."""

    name: str
    kind: Literal["u32", "f32", "address"]


KERNELS: dict[str, KernelSpec] = {}


@dataclass(frozen=True)
class KernelSpec:
    """Specifies a shader. `constants` are named in id order; id 0 is the workgroup size."""

    name: str
    bindings: tuple[Binding, ...]
    push: tuple[PushField, ...]
    constants: tuple[str, ...]
    _format: struct.Struct = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        codes = {"u32": "I", "f32": "f", "address": "Q"}
        text, offset = "<", 0
        for item in self.push:
            if item.kind == "address" and offset % 8:
                text, offset = text + "4x", offset + 4
            text += codes[item.kind]
            offset += 8 if item.kind == "address" else 4
        assert offset <= 128, f"{self.name}: {offset} bytes of push constants"
        object.__setattr__(self, "_format", struct.Struct(text))

    @property
    def push_bytes(self) -> int:
        return self._format.size

    def dispatch(
        self,
        variant: str,
        constants: Mapping[str, int],
        tensors: Mapping[str, TensorRef],
        push: Mapping[str, int | float],
        groups: tuple[int, int, int],
        label: str,
        ranges: Mapping[str, Range] | None = None,
        memory_reads: tuple[Range, ...] = (),
        memory_writes: tuple[Range, ...] = (),
        subgroup_size: int = 0,
    ) -> Dispatch:
        """Make a dispatch with its hazard ranges.

        Bound tensors count as read or written whole, as the binding says, unless `ranges` narrows
        one. What is reached by address is named in `memory_reads` and `memory_writes`.
        """
        assert set(constants) == set(self.constants), (
            self.name,
            set(constants) ^ set(self.constants),
        )
        assert set(tensors) == {b.name for b in self.bindings}, (self.name, sorted(tensors))
        assert set(push) == {item.name for item in self.push}, (self.name, sorted(push))
        narrowed = ranges or {}
        touched = [(b, narrowed.get(b.name, tensors[b.name].whole)) for b in self.bindings]
        return Dispatch(
            variant=variant,
            constants=tuple(constants[name] for name in self.constants),
            tensors=tuple(tensors[b.name] for b in self.bindings),
            push=self._format.pack(*(push[item.name] for item in self.push)),
            groups=groups,
            reads=tuple(r for b, r in touched if "r" in b.access) + memory_reads,
            writes=tuple(r for b, r in touched if "w" in b.access) + memory_writes,
            label=label,
            kernel=self.name,
            subgroup_size=subgroup_size,
        )


def kernel(name: str, bindings: str, push: str, constants: str) -> KernelSpec:
    """Register a kernel: `kernel("copy", "r:source w:target", "u32:n_words", "workgroup_size")`."""
    assert name not in KERNELS, f"kernel {name} is registered twice"
    spec = KernelSpec(
        name,
        tuple(
            Binding(item.split(":")[1], _access(item.split(":")[0])) for item in bindings.split()
        ),
        tuple(PushField(item.split(":")[1], _kind(item.split(":")[0])) for item in push.split()),
        tuple(constants.split()),
    )
    KERNELS[name] = spec
    return spec


def _access(text: str) -> Access:
    accesses: dict[str, Access] = {"r": "r", "w": "w", "rw": "rw"}
    return accesses[text]


def _kind(text: str) -> Literal["u32", "f32", "address"]:
    kinds: dict[str, Literal["u32", "f32", "address"]] = {
        "u32": "u32",
        "f32": "f32",
        "address": "address",
    }
    return kinds[text]


def spirv_folder() -> Path:
    """Find the folder of the compiled shaders: beside the extension."""
    return Path(str(native().__file__)).parent / "spirv"


@cache
def spirv_words(variant: str) -> bytes:
    """Read the SPIR-V of one variant; a missing one is a broken installation."""
    path = spirv_folder() / f"{variant}.spv"
    assert path.exists(), f"no compiled shader {variant}: rebuild the package"
    return path.read_bytes()
