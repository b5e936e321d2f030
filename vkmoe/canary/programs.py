"""Builds the programs of a model before there is any memory for them, and lists their pipelines.

Of layers that are alike one is taken. A pipeline is what a driver compiles: a SPIR-V module with
its constants. It is compared with each probe that a dispatch of it has: probes differ where other
ways through a kernel are taken. Programs of other sizes than these have no other probes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from vkmoe.batch import BatchKind
from vkmoe.experts.store.table import N_VERSIONS, table_shape
from vkmoe.facts import LayerSpec, MemoryPlan, ModelSpec
from vkmoe.gpu.device import spirv_words
from vkmoe.gpu.kernels import KERNELS
from vkmoe.gpu.program import Dispatch, Program
from vkmoe.kernels.attention.shapes import AttentionShape
from vkmoe.kernels.experts.operations import BOTH, GATE_ONLY
from vkmoe.kernels.families import FAMILIES
from vkmoe.kernels.family import Probe, Used, Variant
from vkmoe.kernels.prompt_experts.operations import BroughtPlaces
from vkmoe.kernels.tuning import Tuning
from vkmoe.models import ModelFile
from vkmoe.models.ahead import AheadDecoder, DraftDecoder
from vkmoe.models.decoder import Decoder
from vkmoe.models.kv_caches import KvAddresses
from vkmoe.models.tensors import FeedForwardTensors, LayerTensors
from vkmoe.models.trunk_tensors import FileMatrix
from vkmoe.models.weights import AheadWeights, ModelWeights, with_slots
from vkmoe.models.workspace import LOGIT_ROWS, AttentionKernels, MixerKernels
from vkmoe.placement.decide import Decision
from vkmoe.weights.outline import Outline


class Pipeline(NamedTuple):
    """Describes what a driver compiles."""

    variant: str
    constants: tuple[int, ...]
    subgroup_size: int  # 0: the driver's choice


class Comparison(NamedTuple):
    """Holds a case that compares kernels of a model, and what these are, by their keys."""

    probe: Probe
    kernels: Mapping[str, Pipeline]

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self.kernels)

    @property
    def variants(self) -> tuple[str, ...]:
        """Name the kernels."""
        return tuple(dict.fromkeys(each.variant for each in self.kernels.values()))


def comparisons(model: ModelFile, decision: Decision) -> list[Comparison]:
    """List what compares all kernels that the model's programs may run on a decision's device."""
    found: dict[Probe, dict[str, Pipeline]] = {}
    for program, mixers in _programs(model, decision):
        for used in probed(program.dispatches(), decision.tuning, mixers):
            found.setdefault(used.probe, {})[used.key] = used.pipeline
    return [Comparison(probe, kernels) for probe, kernels in found.items()]


class Probed(NamedTuple):
    """Describes what a dispatch runs, and what compares it."""

    pipeline: Pipeline
    probe: Probe

    @property
    def key(self) -> str:
        """Name both, and the module; no others have this name, in any process."""
        words = _hash(spirv_words(self.pipeline.variant))
        facts = (self.pipeline, _facts(self.probe))
        return hashlib.sha256(words + repr(facts).encode()).hexdigest()[:16]


def _facts(part: object) -> object:
    """List what a probe is made of, but for the tuning: pipelines say what that does to them."""
    if isinstance(part, Tuning):
        return None
    if not is_dataclass(part):
        return part
    return (type(part).__name__, *(_facts(getattr(part, each.name)) for each in fields(part)))


def probed(
    dispatches: Sequence[Dispatch], tuning: Tuning, mixers: Sequence[MixerKernels]
) -> Iterator[Probed]:
    """Find the pipeline and the probe of each dispatch of a program; `mixers` are of its layers."""
    for index, command in enumerate(dispatches):
        used = _used(dispatches, index, tuning, mixers)
        make = FAMILIES[used.variant.family].probe
        assert make is not None, f"no probe of {command.variant}"
        pipeline = Pipeline(command.variant, command.constants, command.subgroup_size)
        yield Probed(pipeline, make(used))


@cache
def _hash(words: bytes) -> bytes:
    return hashlib.sha256(words).digest()


def _used(
    dispatches: Sequence[Dispatch], index: int, tuning: Tuning, mixers: Sequence[MixerKernels]
) -> Used:
    """Describe a dispatch for its probe; gates and ups of two types follow each other."""
    command = dispatches[index]
    numbers = KERNELS[command.kernel].numbers_of(command.push, command.constants)
    gate = up = command.weight_type
    if (which := numbers.get("pass", BOTH)) != BOTH:
        other = dispatches[index + (1 if which == GATE_ONLY else -1)].weight_type
        gate, up = (gate, other) if which == GATE_ONLY else (other, up)
    layer = command.mark.layer
    return Used(
        Variant.parse(command.variant),
        numbers,
        command.groups,
        command.subgroup_size,
        tuning,
        (gate, up),
        None if layer is None else mixers[layer],
    )


# ----- programs -----


class _OfLayers(NamedTuple):
    """Holds a program, and the kernels of its layers' attention or delta rule."""

    program: Program
    mixers: tuple[MixerKernels, ...]


def _programs(model: ModelFile, decision: Decision) -> Iterator[_OfLayers]:
    """Build all programs whose kernels may differ."""
    plan = decision.plan
    whole = model.guessing() if plan.n_guesses else model
    model, n_cpu_layers = _of_each_kind(whole, plan)
    outline, shape = Outline(), table_shape(model.spec)
    table = outline.range(N_VERSIONS * shape.n_bytes)
    weights, ahead = outline.model(model.tensors, table, n_cpu_layers)
    weights = _with_slots(outline, model.spec, weights, plan)
    for n_positions in _contexts(decision):
        mixers = {
            mixer: x.of_context(n_positions) for mixer, x in decision.workspace.mixers.items()
        }
        yield from _of_context(model.spec, decision, weights, ahead, outline, mixers)


def _contexts(decision: Decision) -> set[int]:
    """List the positions of caches with which kernels may differ: rings are whole at first."""
    plan, kinds = decision.plan, decision.workspace.mixers.values()
    shapes = [kernels.shape for kernels in kinds]
    if not any(isinstance(shape, AttentionShape) and shape.ring for shape in shapes):
        return {plan.ctx_size}
    return {plan.ctx_size, plan.first_positions or plan.ctx_size}


def _of_context(
    spec: ModelSpec,
    decision: Decision,
    weights: ModelWeights,
    ahead: AheadWeights | None,
    outline: Outline,
    mixers: Mapping[Any, MixerKernels],
) -> Iterator[_OfLayers]:
    space, tuning, mode = decision.workspace, decision.tuning, decision.plan.mode
    caches = _caches(outline, spec, decision.plan, mixers)
    decoders: list[Decoder] = [Decoder(spec, tuning, weights, space, caches, mode)]
    if ahead is not None:
        kind = AheadDecoder if spec.drafter is None else DraftDecoder
        of_ahead = spec.of_ahead
        caches = _caches(outline, of_ahead, decision.plan, mixers)
        guessing = kind(of_ahead, tuning, ahead.model, space, caches, ahead=ahead)
        decoders += [guessing, replace(guessing, follows=True)]
    for decoder in decoders:
        of_layers = tuple(mixers[layer.mixer] for layer in decoder.spec.layers)
        for batch in _kinds(decision):
            program = decoder.program(batch)
            decoder.close_program(program)
            yield _OfLayers(program, of_layers)


def _kinds(decision: Decision) -> Iterator[BatchKind]:
    """List kinds of batches: the head of a prompt may run for few rows or for several."""
    space = decision.workspace
    for n_rows in space.row_sizes["decode"]:
        yield BatchKind("decode", n_rows, n_rows)
    for n_rows in space.row_sizes["prompt"][-1:]:
        for n_logits in LOGIT_ROWS:
            if n_logits <= min(n_rows, space.logits.n_rows):
                yield BatchKind("prompt", n_rows, n_logits)


def _caches(
    outline: Outline, spec: ModelSpec, plan: MemoryPlan, mixers: Mapping[Any, MixerKernels]
) -> tuple[KvAddresses, ...]:
    """Describe caches of each layer of its own, even where they are another's."""
    found = []
    for layer in spec.layers:
        kernels, rope, n_positions = mixers[layer.mixer], layer.mixer.rope, 0
        sizes = kernels.state_bytes
        if isinstance(kernels, AttentionKernels):
            n_positions, sizes = kernels.shape.context, kernels.shape.cache_bytes
        places = tuple(outline.take(plan.n_regions * n_bytes) for n_bytes in sizes)
        angles = outline.take(4 * rope.dim * n_positions) if rope else 0
        found.append(KvAddresses(n_positions, plan.n_regions, angles, places))
    return tuple(found)


def _with_slots(
    outline: Outline, spec: ModelSpec, weights: ModelWeights, plan: MemoryPlan
) -> ModelWeights:
    """Say that experts may also lie in slots, and where they are brought to, as a plan has it."""
    if spec.experts is None:
        return weights
    slots = [(outline.range(n_bytes),) for n_bytes in weights.span_bytes]
    places, n_experts = None, spec.experts.n_experts
    if plan.brought_places:
        n_bytes = max(weights.span_bytes)
        memory = outline.take(2 * plan.brought_places * n_bytes)
        places = BroughtPlaces(memory, n_bytes, plan.brought_places, n_experts)
    of_layer = slots.__getitem__
    return with_slots(weights, of_layer, of_layer, table_shape(spec).n_landing, places)


# ----- layers that are alike -----


def _of_each_kind(model: ModelFile, plan: MemoryPlan) -> tuple[ModelFile, int]:
    """Return the model with one layer of each kind, and count those whose experts the CPU has.

    The last layer is among them: there experts of few rows of a prompt are computed.
    """
    spec, tensors = model.spec, model.tensors
    if spec.input_width:  # their matrices have rows for all layers
        return model, plan.cpu_layers
    by_cpu = spec.moe_layers[: plan.cpu_layers]
    kinds: dict[tuple[object, ...], int] = {}
    for index, (layer, of_file) in enumerate(zip(spec.layers, tensors.layers, strict=True)):
        kinds.setdefault((_kind(layer, of_file), index in by_cpu), index)
    chosen = sorted({*kinds.values(), spec.n_layers - 1})
    layers = tuple(spec.layers[index] for index in chosen)
    few = replace(tensors, layers=tuple(tensors.layers[index] for index in chosen))
    n_cpu_layers = sum(index in by_cpu for index in chosen)
    return replace(model, spec=replace(spec, layers=layers), tensors=few), n_cpu_layers


def _kind(layer: LayerSpec, tensors: LayerTensors) -> tuple[object, ...]:
    """Describe a layer: what is alike in two layers has the same kernels."""
    parts = (tensors.mixer, tensors.feed_forward, tensors.input, {"block": tensors.block})
    return (layer, *((name, _form(part)) for of in parts for name, part in of.items()))


def _form(part: object) -> object:
    if isinstance(part, FeedForwardTensors):
        return tuple((x.type, x.n_rows, x.n_columns) for x in (*part.matrices, *part.biases))
    return (part.type, part.n_rows, part.n_columns) if isinstance(part, FileMatrix) else None
