"""Decides how a model runs on a device: `decide` makes all decisions, for engines and for plans.

Of the plans that options leave it takes the one that is predicted to be fastest (forecast/cost.py),
over all ways to place experts and some sizes of chunks. What a plan has is the subject of plan.py.
Also says what to try where a device refuses memory that a plan gave it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from vkmoe.choices import ModeName
from vkmoe.config import EngineConfig
from vkmoe.cpu.device import cpu_info
from vkmoe.cpu.host_memory import available_bytes
from vkmoe.cpu.variants import variant
from vkmoe.errors import (
    ModelFileError,
    NoDeviceError,
    OutOfMemoryError,
    UnsupportedModelError,
    UsageError,
)
from vkmoe.experts.decide.settings import (
    CacheSettings,
    PoolSpec,
    cache_settings,
    host_pools,
    make_pools,
)
from vkmoe.experts.decide.token_table import n_rows_of, row_bytes
from vkmoe.experts.study.hit_curve import MEAN_CURVE, HitCurve
from vkmoe.experts.study.slot_curves import known_curves
from vkmoe.facts import Allocation, DeviceInfo, MemoryPlan, ModelSpec, WeightBytes
from vkmoe.gpu.link_speed import LinkSpeed
from vkmoe.kernels.tuning import Tuning, choose_tuning
from vkmoe.models import ModelFile
from vkmoe.models.cpu_experts import CpuTensors
from vkmoe.models.program_sizes import (
    LEAST_CTX_SIZE,
    TokenBuffers,
    chunks_to_try,
    sure_context,
    workspace_of,
)
from vkmoe.models.workspace import Workspace
from vkmoe.modes import Cache, Resident
from vkmoe.placement.forecast.cost import Prediction, predict, token_bytes
from vkmoe.placement.forecast.speeds import Machine, Speeds, machine_of
from vkmoe.placement.memory import allocation, host_budget, margin_for
from vkmoe.placement.plan import plans
from vkmoe.weights.mapped import mapped_bytes, spans_in_file
from vkmoe.weights.sizes import weight_bytes

log = logging.getLogger("vkmoe")
LEAST_GAIN = 0.05  # of the time of a prompt and a reply, for which a layer guesses tokens unasked


class Programs(NamedTuple):
    """Describes what programs need, and the weights they read, in chunks of some size."""

    workspace: Workspace
    cpu: CpuTensors | None  # what the CPU works on, if it computes experts
    weights: WeightBytes


@dataclass(frozen=True)
class Candidate:
    """Holds a complete plan in one way, what is predicted of it, and the programs it is for."""

    plan: MemoryPlan
    prediction: Prediction
    programs: Programs


@dataclass(frozen=True)
class Decision:
    """Describes how a model will run on a device."""

    tuning: Tuning
    workspace: Workspace
    weights: WeightBytes
    plan: MemoryPlan
    cpu: CpuTensors | None  # what the CPU works on, if it computes experts beside the device
    link: LinkSpeed | None  # None where it was not measured: no expert crosses one
    pools: tuple[PoolSpec, ...]  # of expert slots; () without a cache
    host_pools: tuple[PoolSpec, ...]  # of slots in host memory; () where all experts have a home
    overlaps: bool  # experts are copied while tokens are computed
    cache_settings: CacheSettings
    machine: Machine  # by which plans were compared
    candidates: tuple[Candidate, ...]  # the cheapest first, which is the plan


@dataclass(frozen=True)
class Choosing:
    """Holds what plans are compared by, and which may be compared."""

    speeds: Callable[[], Speeds] = Speeds  # called where there is something to choose
    known: bool = False  # the speeds are at hand: calling it measures nothing
    curve: HitCurve = MEAN_CURVE  # of hits, unless --expert-profile tells more
    corrections: Mapping[ModeName, float] = field(default_factory=dict)
    beside_cpu: bool = False  # the CPU may compute experts unasked


def decide(
    config: EngineConfig,
    model: ModelFile,
    device: DeviceInfo,
    tuning: Tuning | None = None,
    choosing: Choosing | None = None,
    overlaps: bool = False,
    available_host_bytes: int | None = None,
) -> Decision:
    """Decide with `available_host_bytes` of host memory, by default those available now.

    `overlaps`: experts are copied while tokens are computed (`copies_overlap`). Where the default
    context does not fit and none was asked for, it is halved until it does; where the trunk does
    not fit even so, layers of it go to host memory. Raises what `plan`, `known_curves` and
    measuring speeds raise.
    """
    free = available_bytes() if available_host_bytes is None else available_host_bytes
    tuning = tuning or choose_tuning(device)
    choosing = choosing or Choosing()
    if config.expert_profile is not None and device.is_vulkan and model.expert_tensors:
        path = Path(config.expert_profile)
        curves = known_curves(path, model.spec, model.expert_tensors)
        choosing = replace(choosing, curve=curves or choosing.curve)
    given = _Given(model, device, tuning, choosing, overlaps, free)
    return _guessing_or_not(config, given) if config.draft == "auto" else _fitting(config, given)


def _guessing_or_not(config: EngineConfig, given: _Given) -> Decision:
    """Decide whether a layer of the model guesses tokens: where that makes replies faster."""
    plain = _fitting(replace(config, draft="none"), given)
    if given.model.ahead is None:
        return plain
    try:
        found = _fitting(replace(config, draft="mtp"), given)
    except (OutOfMemoryError, UsageError, UnsupportedModelError, ModelFileError) as error:
        log.info("no layer guesses tokens ahead: %s", str(error))
        return plain
    enough = min(plain.plan.ctx_size, sure_context(config, given.model.spec))
    times = (each.candidates[0].prediction.seconds for each in (found, plain))
    gains = next(times) * (1 + LEAST_GAIN) < next(times)
    return found if gains and found.plan.ctx_size >= enough else plain


def _fitting(config: EngineConfig, given: _Given) -> Decision:
    """Decide with what was asked for, or less context and fewer layers on the device."""
    if config.draft == "mtp":
        given = replace(given, model=given.model.guessing())
    asked, spec = config, given.model.spec
    try:
        return _decided(config, given)
    except OutOfMemoryError:
        if config.slots_option or config.n_cpu_moe:
            raise  # what was asked for does not fit: a shorter context is not the first to try
        for less in _shorter(config, spec):
            with suppress(OutOfMemoryError):
                return _reduced(_decided(less, given), asked, spec)
            config = less
        if (found := _with_fewer_layers(config, given)) is not None:
            return _reduced(found, asked, spec)
        raise


def _shorter(config: EngineConfig, spec: ModelSpec) -> Iterator[EngineConfig]:
    """Yield what may be tried where the default context does not fit: it is halved."""
    n_tokens = sure_context(config, spec)
    while config.ctx_size is None and n_tokens > LEAST_CTX_SIZE:
        n_tokens = max(LEAST_CTX_SIZE, n_tokens // 2)
        yield replace(config, ctx_size=n_tokens)


def _with_fewer_layers(config: EngineConfig, given: _Given) -> Decision | None:
    """Decide with as many layers on the device as fit; None where not even none does.

    None is tried where an option says how many, or where memory is shared.
    """
    found: Decision | None = None
    low, high = 0, given.model.spec.n_layers - 1
    while config.gpu_layers is None and not given.device.is_uma and low <= high:
        n_layers = (low + high) // 2
        try:
            found, low = _decided(replace(config, gpu_layers=n_layers), given), n_layers + 1
        except OutOfMemoryError:
            high = n_layers - 1
    return found


def _reduced(decision: Decision, asked: EngineConfig, spec: ModelSpec) -> Decision:
    """Say of a decision what is less in it than was `asked`, which did not fit."""
    made, reasons, notes = decision.plan, dict[str, str](), list(decision.plan.notes)
    whole = sure_context(asked, spec)
    if made.ctx_size < whole:
        reasons["KV cache"] = f"reduced from {whole}, which does not fit; --ctx-size changes it"
        notes.append(f"the context is {made.ctx_size} tokens, because {whole} do not fit")
    if made.host_layers and asked.gpu_layers is None:
        reasons["host weights"] = "the device has no room for them; --gpu-layers changes it"
        which = f"{made.host_layers} of {spec.n_layers} layers"
        notes.append(f"{which} are in host memory, because the device has no room for them")
    lines = tuple(
        replace(line, reason=reasons.get(line.name or "", line.reason)) for line in made.lines
    )
    return replace(decision, plan=replace(made, lines=lines, notes=tuple(notes)))


@dataclass(frozen=True)
class _Given:
    """Holds what decisions rest on besides what was asked."""

    model: ModelFile
    device: DeviceInfo
    tuning: Tuning
    choosing: Choosing
    overlaps: bool
    available_host_bytes: int

    @cached_property
    def weights(self) -> WeightBytes:
        """Count the bytes of the weights on the device alone."""
        find_bytes = weight_bytes if self.device.layout == "planes" else mapped_bytes
        return find_bytes(self.model.tensors)

    @cached_property
    def weights_beside_cpu(self) -> WeightBytes:
        """Count them where the CPU computes experts, too."""
        return replace(self.weights, file_spans=spans_in_file(self.model.tensors))

    @cached_property
    def speeds(self) -> Speeds:
        """Measure, or remember, how fast memory is; once."""
        return self.choosing.speeds()

    def candidate(self, made: MemoryPlan, programs: Programs, machine: Machine) -> Candidate:
        """Predict how fast a plan is on a machine."""
        spec, weights = self.model.spec, programs.weights
        embedding = self.model.tensors.embeddings.tensor.n_bytes
        first = weights.pieces[0] if self.device.is_vulkan else embedding
        reads = token_bytes(spec, weights, first, made.host_layers)
        return Candidate(made, predict(made, spec, reads, machine, self.choosing.curve), programs)

    def machine(self, measured: bool) -> Machine:
        """Describe the machine, by what is typical of its kind where nothing is to be measured."""
        speeds = self.speeds if measured or self.choosing.known else Speeds()
        found = machine_of(self.device, speeds, self.available_host_bytes)
        return replace(found, corrections=self.choosing.corrections)


def _decided(config: EngineConfig, given: _Given) -> Decision:
    """Decide with the context that was asked for, or the default."""
    spec, found = given.model.spec, _planned(config, given)
    measured = not all(isinstance(made.mode, Resident) for made, _ in found)
    machine = given.machine(measured)
    ranked = [given.candidate(made, programs, machine) for made, programs in found]
    ranked.sort(key=lambda each: each.prediction.seconds)
    best, programs = explained(ranked[0].plan, machine.speeds, measured), ranked[0].programs
    if isinstance(best.mode, Cache):
        log.info("experts without a slot are %s: %s", best.mode.misses, best.mode.reason)
    link = given.speeds.of_link if measured and not best.cpu_layers else None
    settings = cache_settings(config, spec.name, spec.experts, best, given.overlaps)
    spans, n_used = programs.weights.spans, spec.experts.n_used if spec.experts else 0
    lines = *best.lines, *predictor_lines(settings, best, spec, given.device)
    best = replace(best, lines=lines)
    free = given.available_host_bytes
    return Decision(
        tuning=given.tuning,
        workspace=programs.workspace,
        weights=programs.weights,
        plan=replace(best, lines=(*lines, *kept_texts_lines(config, best, given.device, free))),
        cpu=programs.cpu,
        link=link if link is not None and link.read_bytes_per_second else None,
        pools=make_pools(best.expert_slots, spans, n_used, config.expert_allocation),
        host_pools=host_pools(best.host_slots, spans, n_used),
        overlaps=given.overlaps,
        cache_settings=settings,
        machine=machine,
        candidates=tuple(ranked),
    )


def explained(made: MemoryPlan, speeds: Speeds, measured: bool) -> MemoryPlan:
    """Say by which speeds misses are served as they are, where nothing else decides that."""
    if not isinstance(made.mode, Cache) or made.mode.reason:
        return made
    reason = f"{speeds.link / 1e9:.1f} GB/s read in place, {speeds.gather / 1e9:.1f} gathered"
    mode = replace(made.mode, reason=reason if measured else "the link was not measured")
    return replace(made, mode=mode)


def _planned(config: EngineConfig, given: _Given) -> list[tuple[MemoryPlan, Programs]]:
    """Make a plan of each way in each size of chunks.

    Shorter chunks are tried where not all experts are on the device, whose room they leave to
    slots. Raises OutOfMemoryError or UsageError where no way has a plan.
    """
    device, spec, choosing = given.device, given.model.spec, given.choosing
    asked = config.mode in ("hybrid", "cpu")
    beside = choosing.beside_cpu and config.mode == "auto" and config.cpu_moe is None
    by_cpu = (True,) if asked else (False, True) if beside else (False,)
    found, error, free = list[tuple[MemoryPlan, Programs]](), None, given.available_host_bytes
    for n_rows in chunks_to_try(config, device):
        for shares in by_cpu:
            try:
                programs = _programs(config, given, n_rows, shares)
                scratch = TokenBuffers.of(programs.workspace, programs.cpu)
                made = plans(config, spec, device, programs.weights, scratch, free, choosing.curve)
                found += [(each, programs) for each in made]
            except (OutOfMemoryError, UsageError) as refusal:
                error = refusal if not shares or asked else error
        if any(isinstance(made.mode, Resident) for made, _ in found):
            break
    if not found:
        assert error is not None
        raise error
    return found


def _programs(config: EngineConfig, given: _Given, n_rows: int, shares: bool) -> Programs:
    """Describe what programs need, with chunks of `n_rows`. `shares`: with experts of the CPU.

    Raises UsageError where the device cannot bind their tensors, or vkmoe has no kernels for the
    CPU.
    """
    spec, device = given.model.spec, given.device
    cpu = _cpu_tuning(config) if shares and spec.experts and device.is_vulkan else None
    workspace = workspace_of(config, spec, device, given.tuning, n_rows, cpu is not None)
    if cpu is None:
        return Programs(workspace, None, given.weights)
    return Programs(workspace, CpuTensors(spec, cpu, workspace), given.weights_beside_cpu)


def _cpu_tuning(config: EngineConfig) -> Tuning:
    """Choose how kernels run on the CPU that is to compute experts beside a device."""
    try:
        variant()
    except NoDeviceError as error:
        hint = f"leave it out, or {error.hint}"
        raise UsageError(f"{config.mode_option} needs the CPU: {error}", hint) from error
    return choose_tuning(cpu_info())


def predictor_lines(
    settings: CacheSettings, plan: MemoryPlan, spec: ModelSpec, device: DeviceInfo
) -> tuple[Allocation, ...]:
    """Make the line for what forecasts remember of tokens, where experts move.

    Other bookkeeping takes a few words for each expert and has no line.
    """
    moves = plan.mode.can_miss and (plan.mode.has_slots or bool(plan.host_slots))
    if (experts := spec.experts) is None or settings.policy != "forecast" or not moves:
        return ()
    n_layers = len(spec.moe_layers)
    n_rows = min(spec.n_vocab, n_rows_of(n_layers, experts.n_used))
    n_bytes = n_rows * row_bytes(n_layers, experts.n_used)
    what = f"which experts each token uses, of {n_rows} tokens at most"
    return (allocation(device, "predictor", "host", what, n_bytes=n_bytes),)


KEPT_TEXT_BYTES = 8 << 30  # of prompts that left the KV cache, unasked


def kept_texts_lines(
    config: EngineConfig, made: MemoryPlan, device: DeviceInfo, available_host_bytes: int
) -> tuple[Allocation, ...]:
    """Make the line of the texts that are kept in host memory, where a plan leaves room for any.

    Weights that are read from their file are in the page cache, which such texts must not push out.
    Where memory is shared they may lie in what the KV cache has yet to grow into.
    """
    needed = made.total("host") + made.total("file")
    left = host_budget(available_host_bytes) - needed
    if device.is_uma:
        left = min(left - made.total("device"), made.spare_bytes)
    else:
        heaps = [heap.size for heap in device.heaps if not heap.device_local]
        left = min(left, max(heaps, default=left) - made.total("host"))
    asked = config.cache_ram_bytes
    most = KEPT_TEXT_BYTES if asked is None else asked
    reason = "what is left, taken as they come" if left < most else "taken as they come"
    if asked is not None and left >= asked:
        reason = "as --cache-ram"
    item, n_bytes = "prompts that left the KV cache, at most", min(most, left)
    line = Allocation(item, "spare", n_bytes, reason, name="kept texts")
    return (line,) if n_bytes > 0 else ()


# ----- when a device refuses memory that the plan gave it -----
#
# Other programs take memory between plan and allocation, and drivers keep some for themselves. What
# is smaller first is the experts' share: fewer slots, then none. Then it is all the rest, as on a
# smaller device: a shorter context, and layers in host memory.

N_ATTEMPTS = 4  # which take away an eighth of the experts, a quarter, a half, and all
MOST_ATTEMPTS = 12  # each behind those: as much as a quarter of the layers that are still there
_REFUSED = "VK_ERROR_OUT_OF_DEVICE_MEMORY"
_OF_EXPERTS = ("experts", "expert slots")


def with_less(
    config: EngineConfig,
    decision: Decision,
    device: DeviceInfo,
    available_host_bytes: int,
    error: OutOfMemoryError,
    attempt: int,
) -> EngineConfig | None:
    """Ask for a plan with less on the device than that of a decision; None: there is none.

    `attempt` counts the plans that failed, from 1. Where a user asked for experts, or in how many
    layers the CPU has them, nothing is less; nor are there fewer layers than were asked for.
    """
    made, weights = decision.plan, decision.weights
    decided = config.slots_option or config.n_cpu_moe is not None or config.mode == "resident"
    of_experts = sum(
        line.n_bytes for line in made.lines if line.place == "device" and line.name in _OF_EXPERTS
    )
    if error.result != _REFUSED or decided or attempt > MOST_ATTEMPTS:
        return None
    taken = made.total("device") + (made.total("host") if device.is_uma else 0)
    if of_experts:
        less = of_experts >> max(0, N_ATTEMPTS - attempt)
    elif device.is_uma or config.gpu_layers is not None:
        return None
    else:
        host_layers = (made.host_layers, len(weights.layer_pieces))
        whole, least = (sum(weights.trunk_pieces(n)[0]) for n in host_layers)
        less = -(-(whole - least) // 4)
    most = taken - less
    return replace(config, vram_margin=str(margin_for(device, available_host_bytes, most)))
