"""What a generation took, for people (stderr) and for programs (--json)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vkmoe.llm import LLM, GenerationStatistics

__all__ = ["json_document", "statistics_lines"]


def statistics_lines(llm: LLM, statistics: GenerationStatistics, reason: str) -> list[str]:
    """Times and speeds; memory and what is needed to repeat the run; the expert cache, if any."""
    s = statistics
    reused = f" ({s.n_reused_tokens} reused)" if s.n_reused_tokens else ""
    memory = ", ".join(f"{place} {size / 2**20:.1f} MiB" for place, size in llm.memory.items())
    return [
        f"load {s.load_seconds:.2f} s | first token {s.ttft_seconds:.2f} s | "
        f"prompt {s.n_prompt_tokens} tokens{reused}, {s.prompt_rate:.1f} tok/s | "
        f"reply {s.n_generated_tokens} tokens, {s.decode_rate:.1f} tok/s | ended by {reason}",
        f"memory: {memory} | seed {s.seed}",
        *_expert_lines(llm),
    ]


def _expert_lines(llm: LLM) -> list[str]:
    """What the expert cache did since the model was loaded; nothing without a cache."""
    report = llm.expert_statistics
    rate, counters = report.total.hit_rate, report.counters
    if counters is None or rate is None:
        return []
    return [
        f"experts: {100 * rate:.0f} % of uses from device memory, "
        f"{counters.upload_bytes / 2**20:.1f} MiB uploaded"
    ]


def json_document(
    llm: LLM, statistics: GenerationStatistics, text: str, token_ids: list[int], reason: str
) -> dict[str, Any]:
    """The result of `vkmoe generate --json`; rates are tokens per second."""
    return {
        "text": text,
        "token_ids": token_ids,
        "finish_reason": reason,
        "model": llm.spec.name,
        "device": llm.device_info.name,
        "ctx_size": llm.plan.ctx_size,
        "memory_bytes": dict(llm.memory),
        "expert_cache": _expert_values(llm),
        **_statistics_values(statistics),
    }


def _expert_values(llm: LLM) -> dict[str, Any] | None:
    """The counters of the expert cache since the model was loaded; None without a cache."""
    report = llm.expert_statistics
    if report.counters is None:
        return None
    return {
        "hit_rate": report.total.hit_rate,
        "n_uses": report.total.n_uses,
        "n_hits": report.total.n_hits,
        **dataclasses.asdict(report.counters),
    }


def _statistics_values(statistics: GenerationStatistics) -> dict[str, Any]:
    values = dataclasses.asdict(statistics)
    del values["finish_reason"]  # the document has it: an interrupt outside the loop differs
    return {**values, "prompt_rate": statistics.prompt_rate, "decode_rate": statistics.decode_rate}
