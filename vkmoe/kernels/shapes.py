"""This module holds what decides how large the kernels of a model are, for measurements."""

from __future__ import annotations

from dataclasses import dataclass

from vkmoe.facts import AttentionSpec, DeltaNetSpec, ExpertSpec, LatentSpec, Mixer, RopeSpec
from vkmoe.kernels.router.operations import RouterShape
from vkmoe.quants import device_row_bytes

GATHERED_TYPE = "Q8_0"


@dataclass(frozen=True)
class KernelShapes:
    """Holds what decides how large a model's kernels are; sizes in elements."""

    name: str
    width: int
    n_vocab: int
    mixers: tuple[Mixer, ...]  # matrices are those of the first
    experts: ExpertSpec
    contexts: tuple[int, ...] = (512, 4096)
    types: frozenset[tuple[str, str]] = frozenset()  # role and type of its matrices; empty: any

    @property
    def router(self) -> RouterShape:
        return RouterShape.of(self.experts)

    @property
    def qkv(self) -> tuple[int, ...]:
        """Count the rows of the matrices that read the same normed input."""
        mixer = self.mixers[0]
        if isinstance(mixer, LatentSpec):
            return mixer.qkv_width - mixer.row, mixer.row
        if isinstance(mixer, DeltaNetSpec):
            return mixer.n_channels, mixer.attended_width, mixer.n_heads, mixer.n_heads
        gates = (mixer.q_width,) * mixer.gated
        return mixer.q_width, mixer.kv_width, mixer.kv_width, *gates

    @property
    def o_columns(self) -> int:
        return self.mixers[0].attended_width

    @property
    def latent(self) -> LatentSpec | None:
        """Find the latent attention, if there is any."""
        return next((mixer for mixer in self.mixers if isinstance(mixer, LatentSpec)), None)

    @property
    def span_bytes(self) -> int:
        """Count the bytes of an expert whose three matrices are of GATHERED_TYPE."""
        inner = self.experts.width
        of_width, of_inner = (device_row_bytes(GATHERED_TYPE, n) for n in (self.width, inner))
        return 2 * inner * of_width + self.width * of_inner


TINY = KernelShapes(  # a bit of everything
    "tiny",
    width=512,
    n_vocab=1000,
    mixers=(
        AttentionSpec(4, 2, 64, RopeSpec(64), "per_head"),
        LatentSpec(4, kv_rank=256, nope_dim=256, value_dim=64, rope=RopeSpec(32)),
        DeltaNetSpec(2, 4, 64, 4, tiled=True),
    ),
    experts=ExpertSpec(8, 2, 256, shared_width=512),
    contexts=(64,),
)
