"""This module has what ops are given that go by the device's tuning: program, tuning and label."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vkmoe.gpu.program import Command, Dispatch, Program, Role
from vkmoe.kernels.launches import Launch
from vkmoe.kernels.tuning import Tuning


@dataclass(frozen=True)
class OpContext:
    """Says where an op appends its dispatches, how they are tuned, and what they are called.

    Ops process the first `n_rows` rows of their tensors, whose bits do not depend on that number.
    """

    program: Program
    tuning: Tuning
    label: str = ""
    layer: int | None = None  # what is appended belongs to
    n_rows: int = 1  # of the program's batch

    def of_layer(self, index: int) -> OpContext:
        """Return the context of a layer's ops."""
        return replace(self, label=f"layer {index}", layer=index)

    def named(self, name: str) -> OpContext:
        """Return the context of one op, whose label is this one's and its name."""
        return replace(self, label=f"{self.label} {name}".lstrip())

    def mark(self, role: Role) -> None:
        """Mark what is appended from now on with its role and this context's layer."""
        self.program.mark(role, self.layer)

    def append(self, command: Command) -> None:
        self.program.append(command)

    def launch(self, dispatch: Dispatch, launch: Launch) -> None:
        """Append a dispatch whose pipeline has the launch's size of subgroups."""
        self.append(replace(dispatch, subgroup_size=launch.subgroup_size))
