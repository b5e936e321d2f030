"""How many loads of weights the assembly of a compute kernel has in flight at once.

The compilers are Mesa's: RADV's (`amd`), NVK's (`nvidia`) and ANV's (`intel`); each module reads
one maker's text into instructions. `flow` finds blocks, loops and the path a wave takes;
`in_flight` walks it and counts. Nothing here runs a compiler.
"""

from __future__ import annotations

from tools.assembly import amd, intel, nvidia
from tools.assembly.flow import Block
from tools.assembly.in_flight import loads_in_flight

__all__ = ["Block", "loads_in_flight", "read"]


def read(text: str, wave_lanes: int, nir: str = "") -> list[Block]:
    """Read the assembly of one kernel into blocks, whichever maker's it is.

    `wave_lanes` is the size of a subgroup. `nir` is what ANV calls "Final NIR"; without it, loads
    of buffers have no known binding on Intel. Raises ValueError where the text is of none.
    """
    if "{ align1" in text:
        return intel.read(text, wave_lanes, nir)
    if "s_endpgm" in text:
        return amd.read(text)
    if "// delay=" in text:
        return nvidia.read(text)
    raise ValueError("this is not the assembly of ACO, NAK or brw")
