"""Reads the assembly that ANV prints of brw's code, of Xe-LP to Xe2.

    send(8)  g94UD  g93UD  nullUD  0x62100500  0x03000000
             ugm MsgDesc: ( load, a32, d32, V4, ... bti )  BTI 3  base_offset 0  { align1 1Q $5 };
    sync nop(1)  null<0,1,0>UB  { align1 WE_all 1N $5.dst };

`$5` on a send is the token that its arrival frees, `$5.dst` waits for that; `$5.src` only for its
operands to have been read. A send whose token is in use waits, too. Buffers have numbers of their
own (BTI); what binding each is stands in "Final NIR" alone. Loads of a whole wave at once
("transpose", block reads) are scalar loads. In Xe-LP's messages surfaces 253 and 254 are memory by
address and shared memory; a set bit of the mask is a word that is not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from tools.assembly.flow import Block, Instruction, Jump, Kind, Wait, blocks_of

_NAME = re.compile(r"(\(\S+\)\s+)?([a-z][a-z0-9]*)(?:\S*?| \w+)\((\d+)\)")
_LOAD = re.compile(
    r"(ugm|slm|tgm) MsgDesc: \( (load\w*|store\w*|atomic\w*), \w+, d(\d+)\w*, V(\d+)"
)
_OLD = re.compile(r"(untyped surface|block) (read|write), (?:Surface =|bti) (\d+)")
_NIR_BINDING = re.compile(r"@resource_intel \(%\d+ \(\w+\), %\d+ \((\w+)\).*?binding=(\d+)")
_STATELESS, _SHARED = 253, 254
_JUMPS = {"if": "JIP", "else": "JIP", "while": "JIP", "break": "UIP", "cont": "UIP", "halt": "UIP"}
_CONTROL = ("endif", "sync", "nop", "send", "sendc", *_JUMPS)


def read(text: str, wave_lanes: int, nir: str = "") -> list[Block]:
    """Read a kernel whose waves have `wave_lanes`."""
    bindings = {int(bti, 16): int(binding) for bti, binding in _NIR_BINDING.findall(nir)}
    return blocks_of(_lines(text, wave_lanes, bindings))


def _lines(text: str, wave_lanes: int, bindings: dict[int, int]) -> Iterator[str | Instruction]:
    """Yield labels and instructions; a message's description is a line of its own."""
    started = ""
    for line in text.splitlines():
        code = line.strip()
        if re.fullmatch(r"LABEL\d+:", code):
            yield code[:-1]
            continue
        started = f"{started} {code}".strip() if started or _NAME.match(code) else ""
        if started.endswith("};"):
            yield replace(_instruction(started, wave_lanes, bindings), text=started)
            started = ""


def _instruction(code: str, wave_lanes: int, bindings: dict[int, int]) -> Instruction:
    """Read one instruction, its annotations and all."""
    match = _NAME.match(code)
    assert match is not None, code
    name, lanes = match[2], int(match[3])
    waits = tuple(_waits(code))
    if name.startswith("send"):
        return _message(code, lanes / wave_lanes, bindings, waits)
    if name in _JUMPS:
        labels = dict(re.findall(r"(JIP|UIP):\s+(LABEL\d+)", code))
        target = labels.get(_JUMPS[name]) or labels["JIP"]
        return Instruction(
            "other", waits=waits, jump=Jump(target, bool(match[1] or name == "while"))
        )
    if name in _CONTROL:
        return Instruction("other", waits=waits)
    return Instruction("alu", waits=waits)


def _message(
    code: str, part: float, bindings: dict[int, int], waits: tuple[Wait, ...]
) -> Instruction:
    """Read a message of a part of the wave."""
    if "EOT" in code:
        return Instruction("other", waits=waits, jump=Jump(None, falls_through=False))
    token = found[0] if (found := re.search(r"\$\d+(?![\d.])", code)) else ""
    waits = (*waits, Wait(token)) if token else waits
    if match := _LOAD.search(code):
        unit, action, n_bytes = match[1], match[2], int(match[3]) // 8 * int(match[4])
        surface = int(bti[1]) if (bti := re.search(r"\bBTI (\d+)", code)) else _STATELESS
        whole = "transpose" in code
    elif match := _OLD.search(code):
        action = {"read": "load", "write": "store"}[match[2]]
        surface, whole = int(match[3]), match[1] == "block"
        unit = "slm" if surface == _SHARED else "ugm"
        mask = int(words[1], 16) if (words := re.search(r"Mask = 0x(\w)", code)) else 0
        n_bytes = 4 * (4 - mask.bit_count())
    else:
        return Instruction("other", waits=waits)
    if unit == "slm":
        return Instruction("shared", counter=token, waits=waits)
    if action.startswith("store"):
        return Instruction("store", waits=waits)
    binding = None if surface == _STATELESS else bindings.get(surface, -surface)
    kind: Kind = "scalar load" if whole else "load"
    return Instruction(kind, n_bytes * part, binding, counter=token, waits=waits)


def _waits(code: str) -> Iterator[Wait]:
    """Yield the tokens that an instruction waits for."""
    if "sync allwr" in code:
        yield Wait("*")
    for token in re.findall(r"(\$\d+)\.dst", code):
        yield Wait(token)
