"""Whole models on CPU threads: against other implementations, and the law.

Where weights are floats, so are their products; else activations are rounded to 8 bits, as
llama.cpp does it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.caches import assert_same_bits, rows
from tests.engine.other_types import UNEVEN, of_types, one_by_one
from tests.engine.test_batches import batch, joined, prompt, tokens_of
from tests.engine.test_logits import PHASES, TOLERANCE, error, load, run
from tests.engine.tiny import NAMES, ONE_OF_EACH, expected, lengthened, model_path, rewrite
from vkmoe.config import EngineConfig
from vkmoe.cpu.device import CpuDevice
from vkmoe.engine import Engine
from vkmoe.experts.records.report import as_text
from vkmoe.llm import LLM, demo_model_path
from vkmoe.models import ModelFile

pytestmark = pytest.mark.usefixtures("cpu_native")

# Of the largest logit, where weights have blocks; seen: 0.018, and 0.006 between the phases.
ROUNDED_TOLERANCE = 0.03
N_TOKENS = 70


def on_threads(path: Path | ModelFile, n_threads: int = 2, **options: Any) -> Engine:
    return Engine(path, EngineConfig(device="cpu", threads=n_threads, **options))


@pytest.mark.parametrize("name", NAMES)
def test_tiny_models_agree_with_transformers(name: str) -> None:
    wanted = expected(name)
    ctx_size = int(wanted["ctx_size"]) if "ctx_size" in wanted else None
    with on_threads(
        model_path(name), cache_type_k="f32", cache_type_v="f32", ctx_size=ctx_size
    ) as engine:
        has_blocks = "mxfp4" in name
        for phase in PHASES:
            logits, routing = run(engine, wanted["tokens"], phase)
            most = ROUNDED_TOLERANCE if has_blocks else TOLERANCE
            assert error(logits, wanted["logits"]) <= most, phase
            if "router_ids" in wanted and not has_blocks:
                np.testing.assert_array_equal(np.sort(routing), np.sort(wanted["router_ids"]))


def test_the_demo_model_says_what_it_says_without_rounding() -> None:
    """At 1,000 positions, next tokens and perplexity; seen: 97.8 %, 0.08 %."""
    stored, wanted = load("demo_heldout.npz"), load("demo_llama_cpp.npz")
    first = int(stored["first"])
    for phase in PHASES:
        best, nll = [], []
        with on_threads(demo_model_path(), ctx_size=stored["tokens"].shape[1]) as engine:
            for window in stored["tokens"]:
                logits, _ = run(engine, window[:-1], phase)
                wide = logits[first:].astype(np.float64)
                peaks = wide.max(axis=1)
                sums = np.log(np.exp(wide - peaks[:, None]).sum(axis=1)) + peaks
                best.append(wide.argmax(axis=1))
                nll.append(sums - wide[np.arange(len(wide)), window[first + 1 :]])
        same = np.concatenate(best) == wanted["decoded_ids"][:, 0]
        assert len(same) == 1000 and same.mean() >= 0.95
        assert abs(np.concatenate(nll).mean() / wanted["decoded_nll"].mean() - 1) <= 0.005


# ----- the law -----


@pytest.fixture(scope="module", params=["demo", *ONE_OF_EACH])
def engines(request: pytest.FixtureRequest) -> Iterator[list[Engine]]:
    """The same model on 1, 2 and 4 threads."""
    path = demo_model_path() if request.param == "demo" else model_path(request.param)
    options: dict[str, Any] = {"ctx_size": N_TOKENS + 7, "parallel": 4, "ubatch_size": 64}
    with ExitStack() as stack:
        yield [
            stack.enter_context(on_threads(lengthened(path, N_TOKENS + 7), n, **options))
            for n in (1, 2, 4)
        ]


@pytest.mark.sample(10)
def test_no_cut_and_no_number_of_threads_changes_a_bit_of_a_prompt(engines: list[Engine]) -> None:
    """And its logits are near those of its tokens as they are decoded one by one."""
    tokens = tokens_of(engines[0].n_vocab, N_TOKENS)
    wanted = prompt(engines[0], tokens, [1, 16, 15, 1, 37])
    ends = np.cumsum([1, 16, 15, 1, 37])
    for engine in engines:
        for cuts in ([17, 16, 37], [64, 6], [1] * 9 + [8, 15, 1, 37]):
            found = prompt(engine, tokens, cuts, region=1)
            here = np.isin(np.cumsum(cuts), ends)
            assert here.any()
            assert_same_bits(found[here], wanted[np.isin(ends, np.cumsum(cuts))])
    decoded = rows(engines[1], tokens)[ends - 1]
    assert np.abs(wanted - decoded).max() <= ROUNDED_TOLERANCE * np.abs(decoded).max()


def test_no_neighbour_and_no_number_of_threads_changes_a_bit(engines: list[Engine]) -> None:
    """Three prompts in one chunk at other positions; then three replies, several rows of one."""
    n_vocab = engines[0].n_vocab
    tokens, other = tokens_of(n_vocab, N_TOKENS), tokens_of(n_vocab, N_TOKENS)[::-1]
    of_prompt = prompt(engines[0], tokens, [9, 4])[1:]
    engines[0].run(batch(tokens, 13, 1, phase="decode"))
    of_reply = engines[0].full_logits()[None]
    for engine in engines:
        prompt(engine, tokens, [9], region=0)
        prompt(engine, other, [5], region=1)
        engine.run(joined(batch(other, 5, 17, 1), batch(tokens, 9, 4, 0), batch(other, 0, 31, 2)))
        assert_same_bits(engine.full_logits(1)[None], of_prompt)
        rows_of = [batch(other, 22, 2, 1, "decode"), batch(tokens, 13, 1, 0, "decode"),
                   batch(other, 31, 1, 2, "decode")]  # fmt: skip
        engine.run(joined(*rows_of))
        assert_same_bits(engine.full_logits(2)[None], of_reply)


# ----- what is read where -----


def test_weights_are_read_where_the_file_is_mapped() -> None:
    """All but what the plan says is copied, and that is small."""
    with on_threads(demo_model_path()) as engine:
        mapped = Path("/proc/self/maps").read_text().splitlines()
        spans = [line.split()[0].split("-") for line in mapped if "demo.gguf" in line]
        inside = outside = 0
        device = engine.device
        assert isinstance(device, CpuDevice)
        for data in device.native.reached:
            at = data.ctypes.data
            stays = any(int(first, 16) <= at < int(end, 16) for first, end in spans)
            inside, outside = inside + stays * data.nbytes, outside + (not stays) * data.nbytes
        lines = {line.item: line for line in engine.plan.lines}
        assert inside == lines["weights"].n_bytes > 20 << 20
        assert lines["weights"].place == "file"
        assert outside == (lines["other weights"].n_bytes if "other weights" in lines else 0)
        assert engine.plan.total("device") + engine.plan.total("host") < inside
    assert not device.native.reached


def logits_of(path: Path, n_tokens: int = 12) -> Any:
    with on_threads(path, ctx_size=32) as engine:
        tokens = tokens_of(engine.n_vocab, n_tokens)
        decoded = rows(engine, tokens)
        ends = prompt(engine, tokens, [5, n_tokens - 5], region=0)
    assert np.abs(ends - decoded[[4, -1]]).max() <= ROUNDED_TOLERANCE * np.abs(decoded).max()
    return decoded


def test_statistics_say_that_experts_are_read_in_the_file() -> None:
    """The CPU has no memory of its own; nothing was copied anywhere."""
    with LLM(device="cpu") as llm:
        llm.generate("x", max_tokens=2)
        text = as_text(llm.expert_statistics)
    assert "\nplacement   all experts in the mapped file (coverage 100.0 %)\n" in text
    assert "uses served from the mapped file\n" in text
    assert "device memory" not in text


def test_types_of_old_files_stay_as_they_are(tmp_path: Path) -> None:
    """In the file: nothing is copied."""
    path = rewrite(model_path("moe_plain"), tmp_path / "uneven.gguf", of_types(UNEVEN))
    with Engine(path, EngineConfig(ctx_size=32)) as engine:
        wanted = rows(engine, tokens_of(engine.n_vocab, 12))
    assert error(logits_of(path), wanted) <= ROUNDED_TOLERANCE
    with on_threads(path, ctx_size=32) as engine:
        assert "other weights" not in {line.item for line in engine.plan.lines}


def test_experts_may_have_tensors_of_their_own(tmp_path: Path) -> None:
    path = rewrite(model_path("mixtral_plain"), tmp_path / "single.gguf", one_by_one)
    np.testing.assert_array_equal(logits_of(path), logits_of(model_path("mixtral_plain")))


def test_options_of_the_cache_are_said_to_have_no_effect() -> None:
    asked: dict[str, Any] = {"expert_slots": 2, "host_pool": "1MiB"}
    with LLM(model_path("moe_plain"), device="cpu", ctx_size=32, **asked) as llm:
        assert llm.plan.notes == tuple(
            f"--{option} has no effect: the CPU reads experts in the file"
            for option in ("expert-slots 2", "host-pool 1MiB")
        )
        assert llm.engine.cache is None and not llm.plan.mode.can_miss
        few = llm.generate([1, 2, 3], max_tokens=8, temp=0, ignore_eos=True).token_ids
    with LLM(model_path("moe_plain"), device="cpu", ctx_size=32, executor="stepped") as llm:
        assert llm.generate([1, 2, 3], max_tokens=8, temp=0, ignore_eos=True).token_ids == few


def test_several_replies_and_drafts_are_those_of_one() -> None:
    prompts = [[1, 2, 3, 4, 2, 3, 4, 2, 3], [9, 8, 7], [5] * 20]
    asked: dict[str, Any] = {"max_tokens": 12, "temp": 0, "ignore_eos": True}
    with LLM(demo_model_path(), device="cpu", ctx_size=64) as llm:
        alone = [llm.generate(one, **asked).token_ids for one in prompts]
    with LLM(demo_model_path(), device="cpu", ctx_size=64, parallel=3, draft="lookup") as llm:
        together = llm.generate(prompts, **asked)
    assert [reply.token_ids for reply in together] == alone
