"""This module specifies kernels: bindings and access, push constants, specialisation constants.

A test compares each with its SPIR-V. `shaders/variants.toml` says which SPIR-V variants exist.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vkmoe.gpu.program import Bound, Dispatch, Range, TensorRef


class Binding(NamedTuple):
    """Describes a descriptor-bound buffer of a kernel."""

    access: str  # "r", "w" or "rw"
    name: str


class PushField(NamedTuple):
    """Describes a push constant: `u32`, `f32` or `address` (uvec2, 8-byte aligned)."""

    kind: str
    name: str


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

    def numbers_of(self, push: bytes, constants: Sequence[int]) -> dict[str, int | float]:
        """Return by name the push and specialisation constants of a dispatch of this kernel."""
        pushed = zip(self.push, self._format.unpack(push), strict=True)
        named = dict(zip(self.constants, constants, strict=True))
        return {item.name: value for item, value in pushed} | named

    def dispatch(
        self,
        variant: str,
        numbers: Mapping[str, Any],
        tensors: Mapping[str, TensorRef | Bound],
        groups: tuple[int, int, int],
        label: str,
        reads: tuple[Range, ...] = (),
        writes: tuple[Range, ...] = (),
    ) -> Dispatch:
        """Make a dispatch with its hazard ranges.

        Specialisation and push constants are found in `numbers` by their names; others may be in
        it. A tensor counts as read or written whole, as its binding says, or the bytes of a
        `Bound`. `reads` and `writes` are what is reached by address.
        """
        missing = {*self.constants, *(item.name for item in self.push)} - set(numbers)
        assert not missing, (self.name, missing)
        assert set(tensors) == {b.name for b in self.bindings}, (self.name, sorted(tensors))
        bound = [(b.access, tensors[b.name].bound) for b in self.bindings]
        return Dispatch(
            variant=variant,
            constants=tuple(numbers[name] for name in self.constants),
            tensors=tuple(item.tensor for _, item in bound),
            push=self._format.pack(*(numbers[item.name] for item in self.push)),
            groups=groups,
            reads=tuple(item.range for access, item in bound if "r" in access) + reads,
            writes=tuple(item.range for access, item in bound if "w" in access) + writes,
            label=label,
            kernel=self.name,
        )


def kernel(name: str, bindings: str, push: str, constants: str) -> KernelSpec:
    """Register a kernel: `kernel("copy", "r:source w:target", "u32:n_words", "workgroup_size")`."""
    assert name not in KERNELS, f"kernel {name} is registered twice"
    KERNELS[name] = KernelSpec(
        name,
        tuple(Binding(*item.split(":")) for item in bindings.split()),
        tuple(PushField(*item.split(":")) for item in push.split()),
        tuple(constants.split()),
    )
    return KERNELS[name]
