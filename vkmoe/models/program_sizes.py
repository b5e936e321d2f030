"""Chooses the sizes of a model's programs, and those of what they keep, from what was asked.

They are the tokens of a context, the number formats of its KV cache, the rows of a program, and
the buffers of those. What lies where in memory is the subject of placement/plan.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkmoe.config import EngineConfig
from vkmoe.errors import UsageError
from vkmoe.facts import DeltaNetSpec, DeviceInfo, LatentSpec, ModelSpec
from vkmoe.kernels.attention.shapes import MAX_CACHE_BYTES
from vkmoe.kernels.tuning import Tuning
from vkmoe.kv_types import KvTypes, both
from vkmoe.models.cpu_experts import CpuTensors
from vkmoe.models.kept import Kept, ring_of, state_bytes
from vkmoe.models.workspace import MOST_DECODED, RowSizes, Workspace, mixer_kernels
from vkmoe.option_fields import in_mib

SURE_CTX_SIZE, LEAST_CTX_SIZE = 8192, 512  # that there is room for unasked; at least
FIRST_POSITIONS = 2048  # that KV caches begin with
CONTEXT_STEP = 1024  # positions by which they grow
PROMPT_ROWS = (32, 64, 128, 256, 512, 1024)  # sizes of programs below the largest
CPU_UBATCH, GPU_UBATCH = 128, 512
LEAST_ROWS = 64  # of the longest chunks that are planned unasked
# Of a recurrent state, behind the last positions: so many guesses and one more can be taken back.
FEW_VERSIONS, DRAFT_VERSIONS = 2, 4
# Of what a text goes back with, in host memory: as many as take so many bytes, within bounds.
STATE_COPIES, FEW_STATE_COPIES, STATE_COPY_BYTES = 16, 4, 1 << 30


def sure_context(config: EngineConfig, spec: ModelSpec) -> int:
    """Return for how many tokens the KV cache must have room: those asked for, or a default.

    They may be more than the model was trained for. Raises UsageError for more than can be.
    """
    n_tokens = config.ctx_size or min(spec.context_length, SURE_CTX_SIZE)
    if n_tokens > spec.context_length and spec.context_limit:
        raise UsageError(
            f"--ctx-size {config.ctx_size} is more than the {spec.context_length} tokens "
            f"{spec.name} can take: {spec.context_limit}",
            f"use at most {spec.context_length}",
        )
    largest = _largest_context(config, spec, MAX_CACHE_BYTES - 1)
    if n_tokens > largest:
        raise UsageError(
            f"a context of {n_tokens} tokens makes the KV cache of a layer larger than 4 GiB",
            f"use --ctx-size {largest} or less",
        )
    return n_tokens


def largest_context(config: EngineConfig, spec: ModelSpec, chunk_bytes: int) -> int:
    """Return how many tokens the KV cache may grow to: those asked for, or the model's.

    The caches of a layer end at 4 GiB, and together at the `chunk_bytes` of an allocation.
    """
    most = min(_largest_context(config, spec, MAX_CACHE_BYTES - 1), _wanted(config, spec))
    whole = chunk_bytes // config.parallel
    return min(most, _largest_context(config, spec, whole))


def _wanted(config: EngineConfig, spec: ModelSpec) -> int:
    return config.ctx_size or spec.context_length


def _largest_context(config: EngineConfig, spec: ModelSpec, n_bytes: int) -> int:
    """Return for how many tokens the largest cache of a sequence takes so many bytes."""
    few = Kept(4, kv_types(config, spec))  # rows of as many positions fill whole words of 16 bytes
    found = [n_bytes]
    for mixer in spec.mixers:
        sizes = state_bytes(mixer, few)
        if isinstance(mixer, DeltaNetSpec) or not sizes:
            continue
        n_tokens = n_bytes * few.n_positions // max(sizes)
        if not 0 < ring_of(mixer, _margin(config.ubatch_size or GPU_UBATCH)) <= n_tokens:
            found.append(n_tokens)
    return min(found)


def kept(config: EngineConfig, spec: ModelSpec, n_positions: int, n_rows: int) -> Kept:
    """Say what layers keep of sequences with so many positions, and chunks of so many rows."""
    versions = max(FEW_VERSIONS, 1 + config.n_guesses)
    if config.draft == "lookup":
        versions = DRAFT_VERSIONS
    return Kept(n_positions, kv_types(config, spec), versions, _margin(n_rows))


def _margin(n_rows: int) -> int:
    """Return how many positions layers with a window keep beside those that it sees.

    They are the rows of a batch, and those by which a text goes back without a copy.
    """
    return max(n_rows, MOST_DECODED)


def n_state_copies(n_bytes: int) -> int:
    """Say how many copies of so many bytes are kept of what texts go back with, at most."""
    fitting = STATE_COPY_BYTES // max(1, n_bytes)
    return max(FEW_STATE_COPIES, min(STATE_COPIES, fitting)) if n_bytes else 0


def kv_types(config: EngineConfig, spec: ModelSpec) -> KvTypes:
    """Choose what the KV cache holds.

    Raises UsageError for values unlike keys where a model caches them as one.
    """
    keys, values = config.cache_type_k, config.cache_type_v
    if not any(isinstance(mixer, LatentSpec) for mixer in spec.mixers):
        return KvTypes(keys, values or "f16")
    if values not in (None, keys):
        raise UsageError(
            f"--cache-type-v {values} contradicts --cache-type-k {keys}: {spec.name} caches keys "
            "and values as one row",
            f"leave out --cache-type-v; --cache-type-k {values} makes the rows {values}",
        )
    return both(keys)


def _decode_sizes(config: EngineConfig, tuning: Tuning) -> tuple[int, ...]:
    """Choose how many rows programs decode: one of each sequence, or guesses to verify."""
    return tuning.decode_sizes(
        MOST_DECODED if config.verifies else min(config.parallel, MOST_DECODED)
    )


def _prompt_sizes(config: EngineConfig, device: DeviceInfo, n_rows: int = 0) -> tuple[int, ...]:
    """Choose how many rows of a prompt programs have, `n_rows` at most if given."""
    most = CPU_UBATCH if device.is_cpu and device.is_vulkan else GPU_UBATCH
    most = n_rows or config.ubatch_size or most
    return (*(size for size in PROMPT_ROWS if size < most), most)


def chunks_to_try(config: EngineConfig, device: DeviceInfo) -> tuple[int, ...]:
    """List the sizes of the longest chunks of prompts that may be planned, the longest first."""
    most = _prompt_sizes(config, device)[-1]
    if config.ubatch_size is not None or not device.is_vulkan:
        return (most,)
    return (most, *(n for n in reversed(PROMPT_ROWS) if LEAST_ROWS <= n < most))


def workspace_of(
    config: EngineConfig,
    spec: ModelSpec,
    device: DeviceInfo,
    tuning: Tuning,
    n_rows: int,
    shares: bool,
) -> Workspace:
    """Describe the workspace of programs with up to `n_rows` of a prompt.

    `shares`: another device computes experts. Raises UsageError where the device cannot bind it.
    """
    kernels = mixer_kernels(spec, kept(config, spec, sure_context(config, spec), n_rows), tuning)
    sizes = RowSizes(_decode_sizes(config, tuning), _prompt_sizes(config, device, n_rows))
    workspace = Workspace(spec, tuning, kernels, sizes, shares)
    largest = max(workspace.tensors, key=lambda tensor: tensor.n_bytes)
    if largest.n_bytes > (most := device.limits.max_storage_buffer_range):
        raise UsageError(
            f"{n_rows} tokens at once need {in_mib(largest.n_bytes)} in one piece "
            f"({largest.name}), {device.name} allows {in_mib(most)}",
            "lower --ubatch-size",
        )
    return workspace


@dataclass(frozen=True)
class TokenBuffers:
    """Counts the bytes of the small buffers of a token."""

    tensors: tuple[int, ...]  # of the workspace, each an allocation of its own
    params: int
    results: int  # routing log and candidates, read back after each token, at most
    logits: tuple[int, ...]  # of each row that may want some, read back on its own
    rows: int  # of a prompt that are processed at once
    brings: bool = True  # some program brings experts of prompts to the device
    handed: int = 0  # rows that the CPU computes experts from, all of them
    joined: int = 0  # what it adds to them
    of_cpu: int = 0  # its own tensors

    @classmethod
    def of(cls, workspace: Workspace, cpu: CpuTensors | None) -> TokenBuffers:
        """Count those of a workspace, and of what the CPU works on if it computes experts."""
        return cls(
            tensors=tuple(tensor.n_bytes for tensor in workspace.tensors),
            params=workspace.params.n_bytes,
            results=workspace.log.n_bytes + workspace.candidates.n_bytes,
            logits=(4 * workspace.logits.row_words,) * workspace.logits.n_rows,
            rows=workspace.row_sizes["prompt"][-1],
            brings=workspace.brings_experts,
            handed=cpu.handed.n_bytes if cpu else 0,
            joined=cpu.sums.n_bytes if cpu else 0,
            of_cpu=cpu.n_bytes if cpu else 0,
        )
