"""Cuts the commands of a token into parts that are submitted one after the other.

The stepped executor needs a cut at each router. Bounded work needs cuts at layer borders: drivers
end a submit that runs for about two seconds, and desktops stutter long before. What takes longest
is reading weights, so their bytes over the measured bandwidth are the estimate. Touches no device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from vkmoe.facts import DeviceInfo
from vkmoe.gpu.link_speed import LinkSpeed
from vkmoe.gpu.program import Command
from vkmoe.models.weights import ModelWeights
from vkmoe.modes import ExpertMode


class Bring(NamedTuple):
    """Says that the host, behind a router, makes the experts available that the log names."""

    layer: int  # counts MoE layers, as the log does
    in_groups: bool = False  # some at a time; the next part runs once for each group


class Compute(NamedTuple):
    """Says that the CPU, behind a router, computes experts of a layer while the next parts run."""

    layer: int  # counts MoE layers, as the log does


class Part(NamedTuple):
    """Holds commands of one submit, and what the host does when they have run.

    Before the next part may begin, or beside it: then one further on `waits` for what it has done.
    """

    commands: list[Command]
    then: Bring | Compute | None = None  # None: nothing, the next one is queued behind it
    waits: bool = False


def cut_at_routers(commands: Sequence[Command]) -> list[Part]:
    """Cut the commands of a token at the choice of every router: n_moe_layers + 1 parts.

    A part ends with the choice of its router. The next begins with the same dispatch: it finds the
    same experts, and looks their addresses up anew in the table of its own submit.
    """
    choices = [i for i, command in enumerate(commands) if command.mark.role == "choice"]
    starts, ends = [0, *choices], [i + 1 for i in choices]
    parts = [
        Part(list(commands[start:end]), Bring(layer))
        for layer, (start, end) in enumerate(zip(starts, ends, strict=False))
    ]
    return [*parts, Part(list(commands[starts[-1] :]))]


def cut_prompt_at_routers(commands: Sequence[Command]) -> list[Part]:
    """Cut the commands of a prompt behind each choice, and behind the experts it is about.

    2 * n_moe_layers + 1 parts, and the head. The part of the experts ("routed") does those that are
    available and have not been done, so it can run again when others are; the head, for other rows.
    """
    choices = _ends(commands, "choice")
    routed = _ends(commands, "routed")
    assert len(choices) == len(routed), (choices, routed)
    brings = {end: Bring(layer, in_groups=True) for layer, end in enumerate(choices)}
    return _cut(commands, [*brings, *routed, *_head(commands)], brings)


def cut_at_marks(commands: Sequence[Command]) -> list[Part]:
    """Cut the commands wherever their marks change: the smallest parts there are."""
    neighbours = enumerate(pairwise(commands), 1)
    return _cut(commands, [i for i, (one, more) in neighbours if one.mark != more.mark])


def cut_at_handovers(commands: Sequence[Command], before_head: bool) -> list[Part]:
    """Cut the commands where rows are handed over, and where what comes back is joined.

    There is no part between the two where there are no commands. Cut `before_head`, the head can
    run again for other rows.
    """
    computes = {end: Compute(layer) for layer, end in enumerate(_ends(commands, "handed"))}
    roles = [command.mark.role for command in commands]
    starts = [i for i, role in enumerate(roles) if role == "joined" != roles[i - 1]]
    head = _head(commands) if before_head else []
    return _cut(commands, [*computes, *starts, *head], computes, starts)


def _ends(commands: Sequence[Command], role: str) -> list[int]:
    """Find the index behind each run of commands of a role."""
    roles = [*(command.mark.role for command in commands), None]
    return [i for i, (one, more) in enumerate(pairwise(roles), 1) if one == role != more]


def _head(commands: Sequence[Command]) -> list[int]:
    """Find the index of the first command of the head, if there is one."""
    return [i for i, command in enumerate(commands) if command.mark.role == "head"][:1]


def _cut(
    commands: Sequence[Command],
    borders: Sequence[int],
    then: Mapping[int, Bring | Compute] = MappingProxyType({}),
    waits: Sequence[int] = (),
) -> list[Part]:
    """Cut at borders, which are indices: of where a part ends with `then`, or begins and waits."""
    ends = sorted({0, *borders, len(commands)})
    return [Part(list(commands[a:b]), then.get(b), a in waits) for a, b in pairwise(ends)]


def cut_within(parts: Sequence[Part], borders: Callable[[Command, Command], bool]) -> list[Part]:
    """Cut parts of more than two layers further, wherever a border is between two commands.

    A part waits for the host before its first piece, and leaves work to it behind the last.
    """
    pieces = []
    for part in parts:
        many = len({command.mark.layer for command in part.commands} - {None}) > 2
        both = enumerate(pairwise(part.commands), 1)
        ends = [i for i, (one, more) in both if many and borders(one, more)]
        for a, b in pairwise([0, *ends, len(part.commands)]):
            then = part.then if b == len(part.commands) else None
            pieces.append(Part(part.commands[a:b], then, part.waits and a == 0))
    return pieces


def layer_ends(commands: Sequence[Command]) -> list[int]:
    """Find the index behind the last command of each layer."""
    layers = [*(command.mark.layer for command in commands), None]
    ends = [i + 1 for i, (one, more) in enumerate(pairwise(layers)) if one != more]
    return [end for end in ends if layers[end - 1] is not None]


def cut_at_layers(commands: Sequence[Command], first_layers: Sequence[int]) -> list[Part]:
    """Cut the commands before these layers, which rise; the one behind the last is the head.

    A border at the end of the commands, where there is no head, is none.
    """
    ends = [0, *(end for end in layer_ends(commands) if end < len(commands))]
    borders = [ends[layer] for layer in first_layers if layer < len(ends)]
    assert 0 not in borders and len({*borders}) == len(borders), first_layers
    return _cut(commands, borders)


TARGET_S = 0.25  # of a submit, by estimate
LIMIT_S = 0.5  # what only a part that cannot be cut may exceed
# Assumed of integrated GPUs, whose memory is not measured: a quarter of the 19 GB/s that one was
# seen to read. Too low costs a token some submits more, of about 75 us each.
SHARED_BYTES_PER_SECOND = 5e9


class Bounded(NamedTuple):
    """Groups parts to submits: `borders` are the parts that begin a submit, but for the first."""

    borders: tuple[int, ...]
    too_long: tuple[tuple[int, float], ...]  # parts above the limit on their own, with seconds

    def warning(self, n_layers: int) -> str | None:
        """Describe the longest part that is too long; part `n_layers` is the output head."""
        if not self.too_long:
            return None
        part, seconds = max(self.too_long, key=lambda item: item[1])
        what = f"layer {part}" if part < n_layers else "the output head"
        return (
            f"{what} alone may keep the GPU busy for {seconds:.1f} s, and drivers reset a GPU "
            "after about 2 s: if the device is lost, keep more experts on it, or take a smaller "
            "quantisation"
        )


def bound_submits(seconds: Sequence[float]) -> Bounded:
    """Group neighbouring parts so that each group takes TARGET_S at most, or is a single part."""
    borders, so_far = [], 0.0
    for part, cost in enumerate(seconds):
        if part and so_far + cost > TARGET_S:
            borders.append(part)
            so_far = 0.0
        so_far += cost
    too_long = tuple((part, cost) for part, cost in enumerate(seconds) if cost > LIMIT_S)
    return Bounded(tuple(borders), too_long)


def submit_speed(info: DeviceInfo, link: LinkSpeed | None, mode: ExpertMode) -> float | None:
    """Choose the bytes per second to estimate a submit's time by, when misses are served so.

    None where it is not known, and on CPUs, where nothing ends a long one.
    """
    if link is not None:
        gathers = mode.gathers and link.gather_bytes_per_second > 0
        return link.gather_bytes_per_second if gathers else link.read_bytes_per_second
    return SHARED_BYTES_PER_SECOND if info.is_uma and not info.is_cpu else None


def part_bytes(weights: ModelWeights, n_used: int, cache_bytes: Sequence[int] | None) -> list[int]:
    """Count the bytes that each layer, and then the output head, reads at most where it is slow.

    On a GPU with memory of its own (`cache_bytes` None) these are the routed experts, all of them
    missed, and what else is in host memory. On one that shares the host's memory they are all
    weights, and each layer's KV cache of `cache_bytes`, which is full at worst.
    """
    experts = [n_used * layer.span_bytes for layer in weights.layers]
    trunk = [layer.trunk_bytes for layer in weights.layers]
    if cache_bytes is None:
        in_host = [
            n if layer.in_host else 0 for n, layer in zip(trunk, weights.layers, strict=True)
        ]
        return [*map(sum, zip(experts, in_host, strict=True)), 0]
    head = weights.output.n_rows * weights.output.row_bytes
    return [*map(sum, zip(experts, trunk, cache_bytes, strict=True)), head]
