"""Chooses the sizes of a model's programs, and those of what they keep, from what was asked.

They are the tokens of a context, the number formats of its KV cache, the rows of a program, and
the buffers of those. What lies where in memory is the subject of placement/plan.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkmoe.config import EngineConfig
from vkmoe.errors import UsageError
from vkmoe.facts import DeltaNetSpec, DeviceInfo, LatentSpec, ModelSpec, in_mib
from vkmoe.kernels.attention.shapes import MAX_CACHE_BYTES
from vkmoe.kernels.tuning import Tuning
from vkmoe.kv_types import KvTypes, both
from vkmoe.models.cpu_experts import CpuTensors
from vkmoe.models.workspace import FEW_ROWS, RowSizes, Workspace, mixer_kernels

SURE_CTX_SIZE, LEAST_CTX_SIZE = 8192, 512  # that there is room for unasked; at least
FIRST_POSITIONS = 2048  # that KV caches begin with
CONTEXT_STEP = 1024  # positions by which they grow
PROMPT_ROWS = (32, 64, 128, 256, 512, 1024)  # sizes of programs below the largest
CPU_UBATCH, GPU_UBATCH = 128, 512
LEAST_ROWS = 64  # of the longest chunks that are planned unasked
# Of a recurrent state, behind the last positions: so many guesses and one more can be taken back.
FEW_VERSIONS, DRAFT_VERSIONS = 2, 4
STATE_COPIES = 16  # of recurrent states, in host memory


def sure_context(config: EngineConfig, spec: ModelSpec) -> int:
    """Return for how many tokens the KV cache must have room: those asked for, or a default.

    Raises UsageError for more than can be.
    """
    n_tokens = min(spec.context_length, config.ctx_size or SURE_CTX_SIZE)
    if config.ctx_size is not None and config.ctx_size > spec.context_length:
        limit = f": {spec.context_limit}" if spec.context_limit else ""
        raise UsageError(
            f"--ctx-size {config.ctx_size} is more than the {spec.context_length} tokens "
            f"{spec.name} {'can take' if limit else 'was trained for'}{limit}",
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
    most = min(_largest_context(config, spec, MAX_CACHE_BYTES - 1), spec.context_length)
    whole = chunk_bytes // config.parallel
    return min(most, config.ctx_size or most, _largest_context(config, spec, whole))


def _largest_context(config: EngineConfig, spec: ModelSpec, n_bytes: int) -> int:
    """Return for how many tokens the largest cache of a sequence takes so many bytes."""
    few = 4  # rows of as many positions fill whole words of 16 bytes
    mixers = [mixer for mixer in spec.mixers if not isinstance(mixer, DeltaNetSpec)]
    sizes = [size for mixer in mixers for size in mixer.state_bytes(few, kv_types(config, spec))]
    return n_bytes * few // max(sizes, default=1)


def n_versions(config: EngineConfig) -> int:
    """Say how many versions of a recurrent state a sequence keeps."""
    if config.draft == "lookup":
        return DRAFT_VERSIONS
    return max(FEW_VERSIONS, 1 + config.n_guesses)


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


def cache_bytes(config: EngineConfig, spec: ModelSpec, n_tokens: int) -> list[int]:
    """Count the bytes of each cache of each layer, in the order in which they are placed."""
    types, versions = kv_types(config, spec), n_versions(config)
    layers = (layer.mixer.state_bytes(n_tokens, types, versions) for layer in spec.kept_layers)
    return [n_bytes for sizes in layers for n_bytes in sizes]


def row_sizes(config: EngineConfig, device: DeviceInfo, n_rows: int = 0) -> RowSizes:
    """Choose how many rows programs have: to decode, and of a prompt, `n_rows` at most if given.

    More than one row is decoded where there are several sequences, or guesses to verify.
    """
    most = CPU_UBATCH if device.is_cpu and device.is_vulkan else GPU_UBATCH
    most = n_rows or config.ubatch_size or most
    prompt = [size for size in PROMPT_ROWS if size < most]
    several = config.parallel > 1 or config.verifies
    return RowSizes(FEW_ROWS if several else (1,), (*prompt, most))


def chunks_to_try(config: EngineConfig, device: DeviceInfo) -> tuple[int, ...]:
    """List the sizes of the longest chunks of prompts that may be planned, the longest first."""
    most = row_sizes(config, device).prompt[-1]
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
    ctx_size, types = sure_context(config, spec), kv_types(config, spec)
    kernels = mixer_kernels(spec, ctx_size, types, n_versions(config), tuning)
    workspace = Workspace(spec, tuning, kernels, row_sizes(config, device, n_rows), shares)
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
