"""The head of a prompt runs for so many rows at a time, and gives the bits that any other run does.

In the last layer, experts are computed for the rows that want logits alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.caches import assert_same_bits
from tests.engine.test_batches import batch, joined, prompt, tokens_of
from tests.engine.tiny import ONE_OF_EACH, model_path
from vkmoe.batch import RunResult, TokenBatch
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.generate.perplexity import run_tokens
from vkmoe.generate.regions.regions import Regions
from vkmoe.placement.pools import SlotLayout
from vkmoe.weights.sizes import weight_bytes

pytestmark = pytest.mark.usefixtures("one_device")

N_TOKENS = 21
LEAST = "the least"  # that a host pool may have
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ONE_OF_EACH},
    "experts on the CPU": ("qwen2moe_plain", {"cpu_moe": True}),
    "some on the CPU": ("qwen2moe_plain", {"expert_mode": "hybrid", "expert_slots": 2}),
    "stepped": ("qwen2moe_plain", {"executor": "stepped"}),
    "one slot, gathered": ("qwen2moe_plain", {"expert_slots": 1, "miss": "gather"}),
    "kept as they are read": ("qwen2moe_plain", {"expert_slots": 2, "promote_on_read": True}),
    "a pool smaller than a layer": ("qwen2moe_plain", {"expert_slots": 1, "host_pool": LEAST}),
}


def least_host_pool(name: str) -> str:
    with Engine(model_path(name), EngineConfig(ctx_size=64)) as engine:
        spec = engine.spec.experts
        assert spec is not None
        spans = weight_bytes(engine.model.tensors).spans
        layout = SlotLayout(engine.device.info, spans, spec.n_experts, spec.n_used)
        return str(layout.least_host_bytes)


@pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES)
@pytest.mark.sample(2)
def test_rows_of_a_chunk_have_the_logits_of_prompts_that_end_there(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of one chunk, in groups as large as the head takes."""
    if options.get("host_pool") == LEAST:
        options = {**options, "host_pool": least_host_pool(name)}
    with Engine(model_path(name), EngineConfig(ctx_size=64, parallel=2, **options)) as engine:
        tokens = tokens_of(engine.n_vocab, N_TOKENS)
        wanted = prompt(engine, tokens, [1] * N_TOKENS, region=1)
        n_rows, run = [], engine.run

        def noted(batch: TokenBatch) -> RunResult:
            n_rows.append(len(batch.tokens))
            return run(batch)

        monkeypatch.setattr(engine, "run", noted)
        found: list[NDArray[np.float32]] = []
        for row in run_tokens(engine, Regions(engine), tokens, 2, "prompt"):
            full = row.fetch()
            assert row.position == 2 + len(found)
            np.testing.assert_array_equal(row.top.logits, full[row.top.ids])
            assert row.top.logits[0] == full.max()
            found.append(full.copy())
        assert_same_bits(np.stack(found), wanted[2:])
        assert n_rows == [N_TOKENS], "one chunk"


@pytest.mark.parametrize(
    "options",
    [{}, {"cpu_moe": True}, {"executor": "stepped", "expert_slots": 4}, {"device": "cpu"}],
    ids=["on the device", "experts on the CPU", "stepped", "on the CPU"],
)
def test_rows_of_several_sequences_in_any_choice(options: dict[str, Any]) -> None:
    """Also those that had logits before; what runs next finds the chunk as any other leaves it."""
    config = EngineConfig(ctx_size=64, parallel=2, **options)
    with Engine(model_path("qwen2moe_plain"), config) as engine:
        tokens = tokens_of(engine.n_vocab, N_TOKENS)
        wanted = prompt(engine, tokens, [1] * N_TOKENS)
        both = joined(batch(tokens, 0, 9, 0), batch(tokens, 0, 12, 1))
        positions = [*range(9), *range(12)]
        for chosen in ((0, 8, 9, 20), (20,), (3, 4, 5, 6, 7, 11, 12, 13, 18, 19), range(21)):
            wants = tuple(i in chosen for i in range(len(positions)))
            both = both._replace(wants_logits=wants)
            engine.run(both)
            for first in (*range(0, len(chosen), engine.max_logit_rows), 0, len(chosen) - 1):
                tops = engine.run_head(first)
                rows = [positions[i] for i in chosen[first : first + engine.max_logit_rows]]
                found = np.stack([engine.full_logits(i) for i in range(len(rows))])
                assert_same_bits(found, wanted[rows])
                assert [top.log_sum_exp for top in tops] == pytest.approx(
                    [float(np.log(np.exp(wanted[row].astype(np.float64)).sum())) for row in rows]
                )
        engine.run(batch(tokens, 9, 12, 0))
        assert_same_bits(engine.full_logits()[None], wanted[-1:])
