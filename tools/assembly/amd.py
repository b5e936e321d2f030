"""Reads the assembly that RADV prints of ACO's code, of GCN to RDNA 4.

    global_load_b128 v[8:11], v[8:9], off        a load by address; "s[4:5]" for "off": scalar base
    buffer_load_dwordx4 v[2:5], v1, s[24:27], 0  a load of the buffer whose descriptor s24 begins
    s_load_b128 s[24:27], s[14:15], 0x20         of a descriptor: 16 bytes each, in binding order
    s_waitcnt vmcnt(1) lgkmcnt(0)                RDNA 4: s_wait_loadcnt 0x1, s_wait_kmcnt 0x0

Loads arrive in order (`vmcnt`); so does shared memory, while scalar loads are only awaited all
together (`lgkmcnt`). On GCN stores take part in vmcnt; RDNA has a counter of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from tools.assembly.flow import Block, Instruction, Jump, Kind, Wait, blocks_of

_WIDTH = re.compile(r"(byte|short|dword)(?:x(\d+))?|[biu](\d+)$")
_WAITS = {"vmcnt": "vector", "lgkmcnt": "scalar", "loadcnt": "vector", "kmcnt": "scalar"}
_LOAD = re.compile(r"(global|flat|buffer|s|s_buffer)_(?:load|atomic)_(\w+)$")
_SCALARS = re.compile(r"\bs\[?(\d+)")


def read(text: str) -> list[Block]:
    """Read a kernel. Bindings are those of its one descriptor set."""
    return blocks_of(_lines(text))


def _lines(text: str) -> Iterator[str | Instruction]:
    """Yield labels and instructions."""
    stores_in_order = "_nc_u32" not in text and "_nc_i32" not in text
    bindings: dict[int, int] = {}  # first register of a descriptor -> its binding
    for line in text.splitlines():
        code = line.partition(";")[0].rstrip()
        if code.endswith(":"):
            yield code[:-1]
        elif code.startswith("\t"):
            name, _, rest = code.strip().partition(" ")
            found = _instruction(name, rest.split(", "), bindings, stores_in_order)
            yield replace(found, text=code.strip())


def _instruction(
    name: str, operands: list[str], bindings: dict[int, int], stores_in_order: bool
) -> Instruction:
    """Read one instruction; notes which registers a scalar load fills with descriptors."""
    if name.startswith("v_"):
        return Instruction("alu")
    if name.startswith(("s_waitcnt", "s_wait_")):
        return Instruction("other", waits=tuple(_waits(name, " ".join(operands))))
    if name in ("s_branch", "s_endpgm") or name.startswith("s_cbranch"):
        target = operands[-1].strip() if "branch" in name else None
        return Instruction("other", jump=Jump(target, name.startswith("s_cbranch")))
    if match := _LOAD.match(name):
        return _load(match[1], match[2], operands, bindings)
    if name.startswith("ds_"):
        return Instruction("shared", counter="scalar")
    if name.startswith(("global_store", "flat_store", "buffer_store")):
        return Instruction("store", counter="vector" if stores_in_order else "")
    scalar = name.startswith("s_") and not name.startswith(("s_nop", "s_delay", "s_clause"))
    return Instruction("scalar" if scalar else "other")


def _waits(name: str, operands: str) -> Iterator[Wait]:
    """Yield what is waited for; not shared memory alone, nor stores and exports."""
    if name.startswith("s_wait_"):
        left = int(operands, 0)
        parts = name.removeprefix("s_wait_").split("_")
        limits = {parts[0]: left} if len(parts) == 1 else {parts[0]: left >> 8, parts[1]: left & 63}
    else:
        limits = {key: int(left) for key, left in re.findall(r"(\w+)\((\d+)\)", operands)}
    for counter, left in limits.items():
        if counter in _WAITS:
            yield Wait(_WAITS[counter], left)


def _load(unit: str, width: str, operands: list[str], bindings: dict[int, int]) -> Instruction:
    """Read a load, or an atomic that may return something."""
    match = _WIDTH.search(width)
    n_bytes = 4
    if match is not None and match[3]:  # from RDNA 3 on
        n_bytes = int(match[3]) // 8
    elif match is not None:
        n_bytes = {"byte": 1, "short": 2, "dword": 4}[match[1]] * int(match[2] or 1)
    registers = [found[0] for found in map(_SCALARS.findall, operands) if found]
    if unit == "s":
        offset = {"null": "0"}.get(operands[-1].strip(), operands[-1].strip())
        if registers and re.fullmatch(r"0|0x[0-9a-f]+", offset):
            for part in range(n_bytes // 16):
                bindings[int(registers[0]) + 4 * part] = int(offset, 0) // 16 + part
        return Instruction("scalar load", n_bytes=n_bytes, counter="scalar")
    if unit in ("buffer", "s_buffer"):
        first = _SCALARS.search(operands[2 if unit == "buffer" else 1])
        binding = bindings.get(int(first[1])) if first else None
        kind: Kind = "load" if unit == "buffer" else "scalar load"
        counter = "vector" if unit == "buffer" else "scalar"
        return Instruction(kind, n_bytes=n_bytes, binding=binding, counter=counter)
    return Instruction("load", n_bytes=n_bytes, counter="vector")
