"""The engine that `vkmoe simulate` stands for: its options, and what its cache would be told."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from vkmoe.config import EngineConfig

if TYPE_CHECKING:
    from vkmoe.experts.settings import CacheSettings
    from vkmoe.experts.simulate import Transfers
    from vkmoe.experts.trace import TraceHeader
    from vkmoe.facts import ModelSpec

__all__ = ["CacheOptions", "settings_of", "transfers_of"]


def _same(name: str) -> Any:
    """The engine's option of that name, default and help included."""
    (known,) = (item for item in fields(EngineConfig) if item.name == name)
    return field(default=known.default, metadata=known.metadata)


@dataclass(frozen=True)
class CacheOptions:
    """Those of the engine's options that decide which experts are in the slots, and when."""

    expert_policy: Literal["lru", "slru", "lfru"] = _same("expert_policy")
    expert_half_life: float = _same("expert_half_life")
    moe_warmpin: int | None = _same("moe_warmpin")
    moe_warmpin_after: int = _same("moe_warmpin_after")
    expert_resident_selection: Literal["first_n", "frequency", "manual"] | None = _same(
        "expert_resident_selection"
    )
    expert_num_resident: int | None = _same("expert_num_resident")
    expert_warmup_tokens: int = _same("expert_warmup_tokens")
    expert_resident_ids: str | None = _same("expert_resident_ids")
    executor: Literal["fused", "stepped"] | None = _same("executor")
    promote_on_read: bool | None = _same("promote_on_read")
    expert_predictor: Literal["previous", "correlation", "frequency", "none"] | None = _same(
        "expert_predictor"
    )
    moe_predict_prefetch: bool | None = _same("moe_predict_prefetch")
    expert_admission: bool = _same("expert_admission")
    expert_copies: Literal["overlap", "wait"] | None = _same("expert_copies")


def settings_of(header: TraceHeader, config: EngineConfig, n_slots: int) -> CacheSettings:
    """What the engine's cache would be told, by the engine's own rule."""
    from vkmoe.facts import MemoryPlan
    from vkmoe.placement.cache_choice import cache_settings, copies_overlap

    experts_in: Literal["device", "cache"] = "device" if n_slots >= header.n_experts else "cache"
    plan = MemoryPlan(
        0,
        "f16",
        experts_in,
        (),
        (n_slots,) * header.n_layers,
        executor=config.executor or "fused",
    )
    return cache_settings(config, _spec(header), plan, copies_overlap(config, has_queue=False))


def transfers_of(config: EngineConfig) -> Transfers:
    """How experts get into slots: by copies that are waited for, unless asked for otherwise."""
    from vkmoe.experts.simulate import Transfers
    from vkmoe.placement.cache_choice import copies_overlap
    from vkmoe.placement.misses import N_LANDING

    late = copies_overlap(config, has_queue=False)
    return Transfers(late, N_LANDING if config.promote_on_read else 0)


def _spec(header: TraceHeader) -> ModelSpec:
    """A model of which only name and experts are true; the rule asks for nothing else."""
    from vkmoe.facts import ExpertSpec, ModelSpec, RopeSpec

    experts = ExpertSpec(header.n_experts, header.n_used, width=0)
    return ModelSpec(
        architecture=header.architecture,
        name=header.model,
        n_layers=header.n_layers,
        width=0,
        n_heads=0,
        n_kv_heads=0,
        head_dim=0,
        n_vocab=0,
        context_length=0,
        norm_eps=0.0,
        rope=RopeSpec(0),
        qk_norm="none",
        feed_forward_width=0,
        experts=experts,
        tied_embeddings=False,
    )
