"""Lists the pipelines that vkmoe makes for real models, without their weights and without a GPU.

The programs are those of the decoder itself: of the shapes in tools/synthetic, in every weight type
and with every way to serve a miss, over addresses that are invented. A program is data: what
differs in kernel, constants or subgroup size is a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tools.gguf_writer import describe_tensor
from tools.synthetic.metadata import model_metadata
from tools.synthetic.presets import PRESETS
from tools.synthetic.tensors import tensor_list
from vkmoe.batch import BatchKind
from vkmoe.bench.shapes import SIZES
from vkmoe.facts import RopeSpec
from vkmoe.gguf_file import GgufFile, TensorInfo
from vkmoe.gpu.kernels import KERNELS
from vkmoe.gpu.link_speed import GROUP_BYTES, read_words, sums_words
from vkmoe.gpu.program import Dispatch, Program, Range, TensorRef, memory_range
from vkmoe.gpu.shared_memory import N_GROUPS, WORKGROUP_SIZE, fill_shared
from vkmoe.gpu.token_io import param_words
from vkmoe.kernels.attention.cases import CACHES, SAME_TYPES, hunyuan_shape
from vkmoe.kernels.attention.operations import AttentionTensors, KvCache, attention
from vkmoe.kernels.attention.shapes import choose_split
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.layer_inputs.operations import gate_inputs
from vkmoe.kernels.matvec.operations import Matrix
from vkmoe.kernels.norms.operations import rms_norm
from vkmoe.kernels.prompt_attention.operations import append_rows
from vkmoe.kernels.prompt_experts.operations import BroughtPlaces
from vkmoe.kernels.tuning import Tuning
from vkmoe.kv_types import KvTypes
from vkmoe.models import ModelFile, read_spec
from vkmoe.models.decoder import Decoder
from vkmoe.models.kept import Kept
from vkmoe.models.kv_caches import KvAddresses
from vkmoe.models.program_sizes import FEW_VERSIONS, GPU_UBATCH, SURE_CTX_SIZE
from vkmoe.models.tensors import FeedForwardTensors, LayerTensors, TrunkTensor, read_tensors
from vkmoe.models.trunk_tensors import FileMatrix
from vkmoe.models.weights import (
    BlockWeights,
    FeedForwardWeights,
    LayerWeights,
    ModelWeights,
    with_slots,
)
from vkmoe.models.workspace import RowSizes, Workspace, mixer_kernels
from vkmoe.modes import Cache, ExpertMode, Hybrid, Resident
from vkmoe.quants import HAS_KERNEL, TYPES, device_row_bytes
from vkmoe.weights.sizes import expert_shape

MODELS = tuple(SIZES)
N_LAYERS = 2  # enough for every kind of layer: one without experts, one with a window
KEPT, GATHERED = Cache(promotes=True), Cache("gather")
BESIDE_CPU, OF_ALL_TYPES = Hybrid(), "qwen3-30b-a3b"  # with what, and whose
# Two of several columns, as more have no other kernels; a prompt whose experts have several tiles.
SIZES_OF_PROGRAMS = RowSizes((1, 2, 8), (GPU_UBATCH,))
F16, *OTHER_CACHES = dict.fromkeys((*CACHES, *SAME_TYPES))  # the others of any model
FALLBACK = "Q8_0"  # of rows that are no multiple of a type's blocks


class Pipeline(NamedTuple):
    """Describes what a driver compiles once."""

    kernel: str  # name of its specification
    variant: str
    constants: tuple[int, ...]
    n_bindings: int
    push_bytes: int
    subgroup_size: int  # 0: the driver's choice

    @property
    def name(self) -> str:
        """Name it by its variant and constants, as no other pipeline of a device is named."""
        pairs = zip(KERNELS[self.kernel].constants, self.constants, strict=True)
        return " ".join([self.variant, *(f"{name}={value}" for name, value in pairs)])


def pipelines(tuning: Tuning, only: str = "") -> dict[Pipeline, tuple[str, ...]]:
    """Find all pipelines that a tuning leads to, each with the models that need it.

    Those alone whose names contain `only`; where that names a weight type, in much less time.
    """
    found: dict[Pipeline, dict[str, None]] = {}
    kinds = sorted(HAS_KERNEL)
    pairs = list(pairwise([*kinds, kinds[0]]))
    named = {kind for kind in kinds if f".{kind.lower()}" in only}
    pairs = [pair for pair in pairs if named & {*pair}] or pairs
    for model in MODELS:
        for program in _programs(model, tuning, pairs):
            for command in program.dispatches():
                found.setdefault(_pipeline(command), {})[model] = None
    for command in _other_kernels(tuning).dispatches():
        found.setdefault(_pipeline(command), {})
    return {
        pipeline: tuple(models)
        for pipeline, models in sorted(found.items())
        if only in pipeline.name
    }


def _pipeline(command: Dispatch) -> Pipeline:
    return Pipeline(
        command.kernel,
        command.variant,
        command.constants,
        len(command.tensors),
        len(command.with_code_book(lambda: 0).push),
        command.subgroup_size,
    )


def _programs(model: str, tuning: Tuning, pairs: Sequence[tuple[str, str]]) -> Iterator[Program]:
    """Build the programs of a model in each pair's first type, and with gate and up in both."""
    described = Described(model, N_LAYERS)
    build = partial(_program, tuning=tuning)
    for kind, other in pairs:
        for file in (described.file(kind), described.file(kind, up=other)):
            yield from (build(file, mode) for mode in (Resident(), KEPT))
        if model == OF_ALL_TYPES:
            yield build(described.file(kind), BESIDE_CPU)
    usual = described.file(FALLBACK)
    yield build(usual, BESIDE_CPU)
    yield build(usual, GATHERED)
    for kv_types in OTHER_CACHES:
        yield build(usual, Resident(), kv_types=kv_types)


def _program(
    model: ModelFile, mode: ExpertMode, tuning: Tuning, kv_types: KvTypes = F16
) -> Program:
    """Build the programs of batches with logits over invented memory, one behind the other."""
    memory, spec = _Memory(), model.spec
    ctx_size = min(spec.context_length, SURE_CTX_SIZE)
    kernels = mixer_kernels(spec, Kept(ctx_size, kv_types, FEW_VERSIONS, GPU_UBATCH), tuning)
    ropes: dict[RopeSpec | None, int] = {None: 0}
    ropes |= {rope: memory.take(4 * rope.dim * ctx_size) for rope in spec.ropes}
    caches = tuple(
        KvAddresses(
            ctx_size,
            1,
            ropes[layer.mixer.rope],
            tuple(map(memory.take, kernels[layer.mixer].state_bytes)),
        )
        for layer in spec.layers
    )
    weights = memory.model(model)
    if mode.has_slots and spec.experts is not None:
        slots = [(memory.range(n_bytes * 16),) for n_bytes in weights.span_bytes]
        n_bytes, n_experts = max(weights.span_bytes), spec.experts.n_experts
        places = BroughtPlaces(memory.take(n_bytes * n_experts), n_bytes, n_experts // 2, n_experts)
        slot_of, n_used = slots.__getitem__, spec.experts.n_used
        weights = with_slots(weights, slot_of, slot_of, n_used, places)
    if isinstance(mode, Hybrid):
        weights = _beside_cpu(weights)
    workspace = Workspace(spec, tuning, kernels, SIZES_OF_PROGRAMS, shares=isinstance(mode, Hybrid))
    decoder, program = Decoder(spec, tuning, weights, workspace, caches, mode), Program("batches")
    for phase, sizes in workspace.row_sizes.items():
        for n_rows in sizes:
            n_logits = n_rows if phase == "decode" else 1
            program.commands += decoder.program(BatchKind(phase, n_rows, n_logits)).commands
    decoder.close_program(program)
    return program


def _beside_cpu(weights: ModelWeights) -> ModelWeights:
    """Let the CPU compute experts of all layers that have any; none are brought to the device."""
    layers = list(weights.layers)
    for index in weights.moe_layers:
        part = layers[index].feed_forward
        block = replace(part.block, on_cpu=True)
        layers[index] = replace(layers[index], feed_forward=replace(part, block=block))
    return replace(weights, layers=tuple(layers), brought_places=None)


def _other_kernels(tuning: Tuning) -> Program:
    """Append what these programs lack: norms of compressed queries, a link's measure, what fills
    shared memory, inputs of layers, and the heads of Hunyuan-A13B.
    """
    program, width = Program("others"), 1536
    x, y, op = TensorRef("x", width), TensorRef("y", width), OpContext(program, tuning)
    rms_norm(op, x, y, width, 1 << 32, 1e-6)
    read_words(program, 1 << 32, GROUP_BYTES, TensorRef("sums", sums_words(GROUP_BYTES)))
    fill_shared(program, TensorRef("seen", N_GROUPS * WORKGROUP_SIZE))
    gate_inputs(op, x, y, 0, width)
    for kv_types in CACHES:
        _hunyuan_heads(op, kv_types)
    return program


def _hunyuan_heads(op: OpContext, kv_types: KvTypes) -> None:
    """Append what makes the queries and rows of caches of a token, and of a prompt."""
    sizes = {"n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "rotary_dim": 128}
    shape = hunyuan_shape(**sizes, context=SURE_CTX_SIZE, kv_types=kv_types)
    memory, split = _Memory(), choose_split(shape, op.tuning)
    places = *shape.cache_bytes, shape.rope_bytes, *(4 * width for width in shape.gain_widths)
    cache = KvCache(*map(memory.take, places))
    qkv, params = TensorRef("qkv", shape.qkv_width), TensorRef("params", param_words(op.n_rows))
    out = TensorRef("out", shape.n_heads * shape.head_dim)
    partials = TensorRef("partials", split.partials_words(shape))
    attention(op, shape, split, cache, qkv, AttentionTensors(params, partials, out))
    append_rows(op, shape, cache, qkv, params)


# ----- a model without a file -----


class _Header(GgufFile):
    """Shows metadata and tensors that no file has."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], tensors: list[TensorInfo]) -> None:
        self.path, self.metadata = path, metadata
        self.tensors = {tensor.name: tensor for tensor in tensors}

    def numbers(self, key: str) -> npt.NDArray[np.generic]:
        return np.array(self.metadata[key])

    def close(self) -> None:
        """There is nothing to close."""


class Described:
    """Describes a preset with all its layers, or so many, in any types."""

    def __init__(self, model: str, n_layers: int | None = None) -> None:
        shape = PRESETS[model]
        if n_layers is not None:
            shape = replace(shape, n_layers=n_layers)
        self._path = Path(model)
        self._metadata = model_metadata(model, shape, "q4_k_m")
        self._tensors = list(tensor_list(shape, "q4_k_m"))

    def file(self, kind: str, up: str = "") -> ModelFile:
        """Describe it with all matrices in a type, but those that stay float32; `up` in another."""
        return self._file([_retyped(item, kind, up) for item in self._tensors])

    def as_quantised(self) -> ModelFile:
        """Describe it in the types that Q4_K_M has."""
        return self._file(self._tensors)

    def _file(self, tensors: list[TensorInfo]) -> ModelFile:
        header = _Header(self._path, self._metadata, tensors)
        spec = read_spec(header)
        return ModelFile(header, spec, read_tensors(header, spec))


def _retyped(tensor: TensorInfo, kind: str, up: str) -> TensorInfo:
    if tensor.type == "F32":
        return tensor
    wanted = up if up and "ffn_up" in tensor.name else kind
    fits = tensor.shape[-1] % TYPES[wanted].block_weights == 0
    return describe_tensor(tensor.name, wanted if fits else FALLBACK, tensor.shape)


class _Memory:
    """Hands out invented addresses, none twice, and places weights at them."""

    def __init__(self) -> None:
        self._next = 1 << 32

    def take(self, n_bytes: int) -> int:
        address, self._next = self._next, self._next + -(-n_bytes // 256) * 256
        return address

    def range(self, n_bytes: int) -> Range:
        return memory_range(self.take(n_bytes), n_bytes)

    def model(self, model: ModelFile) -> ModelWeights:
        """Place all weights of a model, and its expert table."""
        tensors = model.tensors
        layers = [self._layer(layer) for layer in tensors.layers]
        n_entries = sum(block.n_experts * 2 for block in tensors.expert_layers)
        return ModelWeights(
            embeddings=self._matrix(tensors.embeddings),
            output_gain=self.take(tensors.output_gain.n_bytes),
            output=self._matrix(tensors.output),
            layers=tuple(layers),
            expert_table=self.range(8 * n_entries),
        )

    def _layer(self, layer: LayerTensors) -> LayerWeights:
        mixer = {field: self._weights(tensor) for field, tensor in layer.mixer.items()}
        rest: dict[str, Any]
        rest = {field: self._weights(tensor) for field, tensor in layer.feed_forward.items()}
        block = self._block(layer.block)
        if layer.has_experts:
            homes = self.range(layer.block.n_experts * block.shape.span_bytes)
            block = BlockWeights(block.shape, ranges=(homes,))
        feed_forward = FeedForwardWeights(block=block, **rest)
        return LayerWeights(layer.mixer_weights(**mixer), feed_forward)

    def _weights(self, tensor: TrunkTensor) -> Any:
        if isinstance(tensor, FileMatrix):
            return self._matrix(tensor)
        if isinstance(tensor, FeedForwardTensors):
            return self._block(tensor)
        return self.take(tensor.n_bytes)

    def _block(self, block: FeedForwardTensors) -> BlockWeights:
        shape = expert_shape(block)
        return BlockWeights(shape, self.take(shape.span_bytes))

    def _matrix(self, tensor: FileMatrix) -> Matrix:
        row_bytes = device_row_bytes(tensor.type, tensor.n_columns)
        address = self.take(tensor.n_bytes)
        return Matrix(tensor.type, address, tensor.n_rows, tensor.n_columns, row_bytes)
