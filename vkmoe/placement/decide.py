"""Everything that is decided before memory is allocated: tuning, attention split, workspace, plan.

Used by the engine, and by `vkmoe info` to say what loading would do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vkmoe.config import EngineConfig
from vkmoe.experts.settings import CacheSettings, PoolSpec
from vkmoe.facts import DeviceInfo, MemoryPlan, ModelSpec, PlanLine
from vkmoe.gpu.link_speed import LinkSpeed
from vkmoe.models.tensors import ModelTensors
from vkmoe.models.workspace import Workspace, attention_shape
from vkmoe.ops.attention_shapes import AttentionShape, AttentionSplit, LatentShape, choose_split
from vkmoe.ops.tuning import Tuning, choose_tuning
from vkmoe.placement.allocations import heap_of
from vkmoe.placement.cache_choice import cache_pools, cache_settings
from vkmoe.placement.fixed_lines import Scratch
from vkmoe.placement.host import available_bytes
from vkmoe.placement.misses import miss_ways
from vkmoe.placement.planner import context_size, plan
from vkmoe.placement.pool_places import host_pools
from vkmoe.placement.sizes import weight_bytes
from vkmoe.placement.slots import MissWays

__all__ = ["Decision", "decide", "predictor_lines"]


@dataclass(frozen=True)
class Decision:
    """How a model will run on a device."""

    tuning: Tuning
    attention_shape: AttentionShape | LatentShape
    attention_split: AttentionSplit
    workspace: Workspace
    plan: MemoryPlan
    ways: MissWays
    largest_span: int  # bytes of the largest expert
    pools: tuple[PoolSpec, ...]  # of expert slots; () without a cache
    host_pools: tuple[PoolSpec, ...]  # of places in host memory; () where there is one for each
    overlaps: bool  # experts are copied while tokens are computed
    cache_settings: CacheSettings


def decide(
    config: EngineConfig,
    spec: ModelSpec,
    tensors: ModelTensors,
    device: DeviceInfo,
    tuning: Tuning | None = None,
    link: LinkSpeed | None = None,
    overlaps: bool = False,
) -> Decision:
    """Decide with the host memory that is available now; `link` where it is measured.

    `overlaps`: experts are copied while tokens are computed (`copies_overlap`). Raises
    UsageError and OutOfMemoryError as the planner does.
    """
    tuning = tuning or choose_tuning(device)
    shape = attention_shape(spec, context_size(config, spec), config.kv_type)
    split = choose_split(shape, tuning)
    workspace = Workspace(spec, tuning, split, shape)
    sizes = weight_bytes(tensors)
    largest = max(sizes.spans, default=0)
    ways = miss_ways(config, device, link, largest)
    decided = plan(config, spec, device, sizes, _scratch(workspace), available_bytes(), ways)
    pools = cache_pools(config, spec, decided, sizes.spans)
    n_used = spec.experts.n_used if spec.experts else 0
    homes = host_pools(decided.host_places, sizes.spans, n_used)
    settings = cache_settings(config, spec, decided, overlaps)
    learning = predictor_lines(settings, spec, len(sizes.spans), device)
    decided = replace(decided, lines=(*decided.lines, *learning))
    return Decision(
        tuning, shape, split, workspace, decided, ways, largest, pools, homes, overlaps, settings
    )


def predictor_lines(
    settings: CacheSettings, spec: ModelSpec, n_layers: int, device: DeviceInfo
) -> tuple[PlanLine, ...]:
    """The plan's line for a predictor that remembers pairs of experts in `n_layers` MoE layers.

    Other bookkeeping takes a few words for each expert and has no line.
    """
    if settings.predictor != "correlation" or spec.experts is None:
        return ()
    n_experts = spec.experts.n_experts
    n_bytes = 4 * n_layers * n_experts * (n_experts + 1)  # as experts/correlation.py has them
    reason = "how often each expert follows each other one"
    return (PlanLine("predictor, correlation", "host", n_bytes, reason, heap_of(device, "host")),)


def _scratch(workspace: Workspace) -> Scratch:
    """The workspace's tensors, and the host's buffers for what goes in and comes out."""
    return Scratch(
        tensors=tuple(tensor.n_bytes for tensor in workspace.tensors),
        params=workspace.params.n_bytes,
        results=workspace.log.n_bytes + workspace.candidates.n_bytes,
    )
