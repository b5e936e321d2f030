"""What a generation took, for people (stderr) and for programs (--json)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vkmoe.llm import LLM, GenerationStatistics

__all__ = ["json_document", "statistics_lines"]


def statistics_lines(llm: LLM, statistics: GenerationStatistics, reason: str) -> list[str]:
    """Two lines: times and speeds, then memory and what is needed to repeat the run."""
    s = statistics
    reused = f" ({s.n_reused_tokens} reused)" if s.n_reused_tokens else ""
    memory = ", ".join(f"{place} {size / 2**20:.1f} MiB" for place, size in llm.memory.items())
    return [
        f"load {s.load_seconds:.2f} s | first token {s.ttft_seconds:.2f} s | "
        f"prompt {s.n_prompt_tokens} tokens{reused}, {s.prompt_rate:.1f} tok/s | "
        f"reply {s.n_generated_tokens} tokens, {s.decode_rate:.1f} tok/s | ended by {reason}",
        f"memory: {memory} | seed {s.seed}",
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
        **_statistics_values(statistics),
    }


def _statistics_values(statistics: GenerationStatistics) -> dict[str, Any]:
    values = dataclasses.asdict(statistics)
    del values["finish_reason"]  # the document has it: an interrupt outside the loop differs
    return {**values, "prompt_rate": statistics.prompt_rate, "decode_rate": statistics.decode_rate}
