"""Says in which ways a model's experts are held and computed: one class for each.

A mode answers what others ask of it: kernels, how a missed expert is served; memory, whether
experts move; programs for people, what to say. What memory a mode takes is the subject of
placement/experts.py, how fast it is that of placement/forecast/cost.py.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal, NamedTuple

from vkmoe.choices import ExpertsIn, MissWay, ModeName


class Unchangeable(NamedTuple):
    """Says why nothing can be changed about slots while a model runs, and what to start with."""

    reason: str
    remedy: str


@dataclass(frozen=True)
class ExpertMode:
    """Is what every mode is: it says where experts are, and how those without a slot are served."""

    name: ClassVar[ModeName]  # as --expert-mode has it
    experts_in: ClassVar[ExpertsIn]
    has_slots: ClassVar[bool] = False  # on the device, for experts that come and go
    can_miss: ClassVar[bool] = True  # experts that the device is to read may be elsewhere
    by_cpu: ClassVar[bool] = False  # the CPU computes experts that are not on the device
    unchangeable: ClassVar[Unchangeable | None] = None

    _: KW_ONLY
    reason: str = ""  # for the way misses are served, in a few words

    @property
    def miss(self) -> MissWay | Literal["cpu"]:
        """Name the way in which an expert without a slot is served."""
        return "cpu" if self.by_cpu else "read"

    @property
    def promotes(self) -> bool:
        """Say whether a missed expert may stay on the device where it has landed."""
        return False

    @property
    def gathers(self) -> bool:
        """Say whether a kernel copies missed experts to the device ahead of their readers."""
        return self.miss == "gather"

    @property
    def keeps(self) -> bool:
        """Say whether the kernels that read a missed expert at home store it on the device too."""
        return self.promotes and not self.gathers

    @property
    def lands(self) -> bool:
        """Say whether missed experts come to lie on the device in the submit that uses them."""
        return self.gathers or self.keeps

    @property
    def misses(self) -> str:
        """Say in words how experts without a slot are served; empty where there are no slots."""
        return ""

    def words(self, n_cpu_layers: int) -> str:
        """Say where experts are that have no slot; empty where that goes by the plan.

        The CPU computes experts of `n_cpu_layers` layers.
        """
        return ""


class Resident(ExpertMode):
    """All experts are on the device, so that none misses."""

    name, experts_in = "resident", "device"
    can_miss = False
    unchangeable = Unchangeable(
        "all experts are on the device", "start with --expert-mode cache, or fewer --expert-slots"
    )

    def words(self, n_cpu_layers: int) -> str:
        return "all on the device"


class AtHome(ExpertMode):
    """No expert has a slot: kernels read each in host memory, in place."""

    name, experts_in = "cache", "host"
    unchangeable = Unchangeable("no expert has a slot on the device", "start with --expert-slots")

    def words(self, n_cpu_layers: int) -> str:
        return "none on the device"


@dataclass(frozen=True)
class Cache(ExpertMode):
    """Some experts have a slot on the device; kernels read the others in host memory."""

    name, experts_in = "cache", "cache"
    has_slots = True

    miss: MissWay = "read"
    promotes: bool = False

    @property
    def misses(self) -> str:
        how = "gathered on the device first" if self.gathers else "read in host memory"
        return how + ", and kept where they land" * self.promotes


class Hybrid(ExpertMode):
    """Some experts have a slot on the device; the CPU computes the others, in the mapped file.

    Which device computes an expert decides the last bits of an answer. So where a prompt is cut,
    and what has a slot when, may not go by time.
    """

    name, experts_in = "hybrid", "cache"
    has_slots = by_cpu = True
    unchangeable = Unchangeable(
        "in the mode hybrid slots and pins decide which device computes an expert, and with it the "
        "last bits of the answer",
        "start with --expert-mode cache to change them while running, or with other --expert-slots",
    )

    @property
    def misses(self) -> str:
        return "computed by the CPU"

    def words(self, n_cpu_layers: int) -> str:
        return "the CPU computes the others"


class CpuLayers(ExpertMode):
    """The CPU computes the experts of some layers, or of all; those of the others are resident."""

    name, experts_in = "cpu", "cpu"
    by_cpu, can_miss = True, False
    unchangeable = Unchangeable(
        "the CPU computes the experts of whole layers, and the others are resident",
        "start with --expert-mode cache, or another --n-cpu-moe",
    )

    def words(self, n_cpu_layers: int) -> str:
        return f"the CPU computes those of {n_cpu_layers} layers"


RESIDENT = Resident()
