"""Cuts the commands of a token into segments that are submitted one after the other.

At the routers, for the stepped executor; at layer borders, for submits that would take too long.
Pure: knows commands by their kernels, and touches no device. `split.py` decides which borders.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from vkmoe.gpu.program import Command, Dispatch
from vkmoe.ops.experts import EXPERT_DOWN, EXPERT_DOWN_KEEP
from vkmoe.ops.router import ROUTER_TOPK

__all__ = ["cut", "layer_ends", "segments"]


def segments(commands: Sequence[Command]) -> list[list[Command]]:
    """The commands of a token, cut at the top-k of every router: n_moe_layers + 1 segments.

    A segment ends with the top-k of its router. The next begins with the same dispatch: it finds
    the same experts, and looks their addresses up anew in the table of its own submit.
    """
    routers = [i for i, command in enumerate(commands) if _is(command, ROUTER_TOPK.name)]
    starts, ends = [0, *routers], [*(i + 1 for i in routers), len(commands)]
    return [list(commands[start:end]) for start, end in zip(starts, ends, strict=True)]


def layer_ends(commands: Sequence[Command]) -> list[int]:
    """For each layer the index behind its last command, which is its last down projection."""
    downs = [_is(command, EXPERT_DOWN.name, EXPERT_DOWN_KEEP.name) for command in commands] + [
        False
    ]
    return [i + 1 for i, (down, more) in enumerate(pairwise(downs)) if down and not more]


def cut(commands: Sequence[Command], borders: Sequence[int]) -> list[list[Command]]:
    """The commands, cut before those at `borders`, which rise; no piece may be empty."""
    pieces = [list(commands[a:b]) for a, b in pairwise([0, *borders, len(commands)])]
    assert all(pieces), borders
    return pieces


def _is(command: Command, *kernels: str) -> bool:
    return isinstance(command, Dispatch) and command.kernel in kernels
