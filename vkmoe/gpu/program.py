"""A program is data: an ordered list of dispatches and copies with the bytes each reads and writes.

Building one touches no device: tensors and buffers are names, bound to memory when the program is
lowered (`backend.py`). `hazards.py` decides where barriers go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from vkmoe.quants.code_books import HAS_CODE_BOOK, code_books

MAX_GROUPS = 65535  # workgroups in each direction that every Vulkan device takes

# the resource of everything reached by a 64-bit address; its offsets are addresses
MEMORY = "@memory"


class Range(NamedTuple):
    """Describes bytes [start, end) of one named resource."""

    resource: str
    start: int
    end: int

    def overlaps(self, other: Range) -> bool:
        start, end = max(self.start, other.start), min(self.end, other.end)
        return self.resource == other.resource and start < end


def memory_range(address: int, n_bytes: int) -> Range:
    """Make a range of memory reached by address: weights, KV cache, expert spans, expert table."""
    return Range(MEMORY, address, address + n_bytes)


def workgroup_lines(n_groups: int) -> tuple[int, int]:
    """Lay out at least `n_groups` workgroups in as few lines (x, y) as fit; the rest return."""
    n_lines = -(-n_groups // MAX_GROUPS)
    return -(-n_groups // n_lines), n_lines


@dataclass(frozen=True)
class TensorRef:
    """Names a descriptor-bound buffer of 32-bit words (activations, parameters, logs).

    It may have rows, one for each of a batch, that lie behind one another.
    """

    name: str
    n_words: int  # of all rows
    n_rows: int = 1

    def __post_init__(self) -> None:
        assert self.n_words % self.n_rows == 0, self

    @property
    def n_bytes(self) -> int:
        return 4 * self.n_words

    def words(self, start: int, count: int) -> Range:
        """Return the range of `count` words from word `start`."""
        assert start >= 0 and start + count <= self.n_words, (self, start, count)
        return Range(self.name, 4 * start, 4 * (start + count))

    @property
    def whole(self) -> Range:
        return Range(self.name, 0, self.n_bytes)

    def part(self, start: int, count: int) -> Bound:
        """Bind the tensor to a dispatch that touches only `count` words from word `start`."""
        return Bound(self, self.words(start, count))

    @property
    def row_words(self) -> int:
        """Count the words of a row, which lie between the beginnings of one and the next."""
        return self.n_words // self.n_rows

    def rows(self, n_rows: int, start: int = 0, count: int = 0) -> Bound:
        """Bind the tensor to a dispatch that touches the first rows, or some words of each.

        They begin at word `start` of a row; 0 words: all of them. What lies between counts too.
        """
        count = count or self.row_words - start
        assert n_rows <= self.n_rows and start + count <= self.row_words, (self, start, count)
        return self.part(start, (n_rows - 1) * self.row_words + count)

    @property
    def bound(self) -> Bound:
        """Bind the tensor to a dispatch that may touch all of it."""
        return Bound(self, self.whole)


class Bound(NamedTuple):
    """Says which tensor a dispatch is bound to, and which bytes of it the dispatch touches."""

    tensor: TensorRef
    range: Range

    @property
    def bound(self) -> Bound:
        return self


# What a command does for a model. "choice": top-k, and the look-up of where the chosen experts are.
# "handed": another device gets what it computes experts from; "joined": what it gave is added.
Role = Literal[
    "",
    "embed",
    "attention",
    "router",
    "choice",
    "handed",
    "routed",
    "combine",
    "joined",
    "shared",
    "dense",
    "head",
    "finish",
]


class Mark(NamedTuple):
    """Says what a command is for: its role, and the number of its layer if it belongs to one."""

    role: Role = ""
    layer: int | None = None


UNMARKED = Mark()


@dataclass(frozen=True)
class Dispatch:
    """Describes one kernel launch. `constants` are specialisation constants in id order."""

    variant: str  # name of the SPIR-V module
    constants: tuple[int, ...]
    tensors: tuple[TensorRef, ...]  # in binding order
    push: bytes
    groups: tuple[int, int, int]
    reads: tuple[Range, ...]
    writes: tuple[Range, ...]
    label: str
    kernel: str = ""  # name of the kernel's specification, whatever the variant
    subgroup_size: int = 0  # that the pipeline must have; 0: what the driver chooses
    mark: Mark = UNMARKED

    def __post_init__(self) -> None:
        assert all(1 <= n <= MAX_GROUPS for n in self.groups), self

    @property
    def weight_type(self) -> str:
        """Name the type of the weights that it reads, such as Q4_K of matvec.q4_k+blocks, or ""."""
        return self.variant.partition("+")[0].partition(".")[2].upper()

    def with_code_book(self, first: Callable[[], int]) -> Dispatch:
        """Add the address of a code book where the weights are indices of one.

        `first` is asked for the address of all code books (quants/code_books.py).
        """
        if self.weight_type not in HAS_CODE_BOOK:
            return self
        address = first() + code_books()[1][self.weight_type]
        push = self.push + bytes(-len(self.push) % 8) + address.to_bytes(8, "little")
        return replace(self, push=push)

    def __str__(self) -> str:
        x, y, z = self.groups
        names = ", ".join(tensor.name for tensor in self.tensors)
        return f"{self.label:<24} {self.variant:<28} [{x} {y} {z}] ({names})"


@dataclass(frozen=True)
class Copy:
    """Copies bytes between two named resources (tensors, or raw buffers such as `readback`)."""

    source: Range
    target: Range
    label: str
    mark: Mark = UNMARKED

    def __post_init__(self) -> None:
        assert self.source.end - self.source.start == self.target.end - self.target.start, self

    @property
    def reads(self) -> tuple[Range]:
        return (self.source,)

    @property
    def writes(self) -> tuple[Range]:
        return (self.target,)

    def __str__(self) -> str:
        n_bytes = self.source.end - self.source.start
        return (
            f"{self.label:<24} copy {n_bytes} bytes {self.source.resource}+{self.source.start}"
            f" -> {self.target.resource}+{self.target.start}"
        )


Command = Dispatch | Copy


@dataclass
class Program:
    """Holds an ordered list of commands; `str(program)` prints it."""

    name: str
    commands: list[Command] = field(default_factory=list)
    _mark: Mark = field(default=UNMARKED, init=False, repr=False, compare=False)

    def mark(self, role: Role, layer: int | None = None) -> None:
        """Mark what is appended from now on; cuts go by these marks, never by kernels or labels."""
        self._mark = Mark(role, layer)

    def append(self, command: Command) -> None:
        """Append a command under the current mark."""
        self.commands.append(replace(command, mark=self._mark))

    def copy(self, source: Range, target: Range, label: str) -> None:
        self.append(Copy(source, target, label))

    def dispatches(self, label_prefix: str = "") -> list[Dispatch]:
        """List the dispatches whose label starts with a prefix such as `layer 3`."""
        found = (command for command in self.commands if isinstance(command, Dispatch))
        return [dispatch for dispatch in found if dispatch.label.startswith(label_prefix)]

    def __str__(self) -> str:
        from vkmoe.gpu.hazards import plan_barriers

        lines = [f"program {self.name}: {len(self.commands)} commands"]
        for command, barrier in zip(self.commands, plan_barriers(self.commands), strict=True):
            lines.append(f"{'|' if barrier else ' '} {command}")
        return "\n".join(lines)
