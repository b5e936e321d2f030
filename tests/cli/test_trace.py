"""`vkmoe trace` with the demo model: what is recorded, and when nothing is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.engine.tiny import model_path
from vkmoe.batch import RunResult, TokenBatch
from vkmoe.experts.records.trace import read_trace
from vkmoe.llm import LLM

from .conftest import Run

pytestmark = pytest.mark.usefixtures("one_device", "demo")

PROMPT = "def add(a, b):\n"
COMMON = ("-p", PROMPT, "-n", "5", "--temp", "0", "--ignore-eos")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.jsonl"


def test_the_routing_of_prompt_and_reply_is_recorded(run: Run, demo_llm: LLM, path: Path) -> None:
    done = run("trace", *COMMON, "-o", str(path))
    assert done.code == 0
    trace = read_trace(path)
    n_prompt = len(demo_llm.tokenizer.encode(PROMPT))
    # The last token of a reply is chosen, but not run.
    assert trace.is_prompt.tolist() == [True] * n_prompt + [False] * 4
    header = trace.header
    assert header.model == demo_llm.spec.name
    assert (header.n_layers, header.n_experts, header.n_used) == (6, 32, 4)
    assert demo_llm.engine.profiler is not None
    assert header.layer_numbers == demo_llm.engine.profiler.layer_numbers
    assert sum(header.span_bytes) * 32 == experts_bytes(demo_llm)
    size = path.stat().st_size / 1024
    assert f"routing of {trace.n_tokens} tokens is in {path}, {size:.1f} KiB" in done.err
    # The same tokens, run by hand.
    reply = demo_llm.generate(PROMPT, max_tokens=5, temp=0, ignore_eos=True)
    assert done.out == reply.text + "\n"
    demo_llm.forget()
    for position, token in enumerate([*demo_llm.tokenizer.encode(PROMPT), *reply.token_ids[:-1]]):
        demo_llm.engine.run_token(token, position)
        assert np.array_equal(trace.routing[position], demo_llm.engine.routing()), position


def experts_bytes(llm: LLM) -> int:
    """Bytes of the experts' spans, by the weights the engine runs with."""
    from vkmoe.weights.sizes import weight_bytes

    return weight_bytes(llm.engine.model.tensors).experts


def test_the_text_is_that_of_generate(run: Run, demo_llm: LLM, path: Path) -> None:
    options = ("-p", PROMPT, "-n", "6", "--seed", "3", "--stop", "zzz")
    traced = run("trace", *options, "-o", str(path))
    assert demo_llm.scheduler.after_run is None, "the model is still watched"
    assert traced.out == run("generate", *options).out
    assert "ended by" in traced.err


def test_tokens_are_named_only_where_that_is_asked_for(
    run: Run, demo_llm: LLM, path: Path, tmp_path: Path
) -> None:
    """The same token has one name in a file, and under one salt; no name tells the token."""
    ids = demo_llm.tokenizer.encode(PROMPT)
    found = []
    for words in ((), ("--with-ids",), ("--with-ids",), ("--salt", "s"), ("--salt", "s")):
        demo_llm.forget()
        options = ("-p", PROMPT, "-n", "1", "-q", "--overwrite", "-o", str(path))
        assert run("trace", *options, *words).code == 0
        found.append(read_trace(path).ids)
        assert ("token" in path.read_text()) == bool(words)
    plain, one, other, salted, again = found
    assert plain is None
    names = [each.tolist() for each in (one, other, salted, again) if each is not None]
    for these in names:
        assert len(these) == len(ids) and len(set(these)) == len(set(ids))
        assert len(set(zip(these, ids, strict=True))) == len(set(ids)), "one name for each token"
        assert not set(these) & set(range(demo_llm.spec.n_vocab))
    assert names[2] == names[3] and names[0] != names[1] and names[0] != names[2]


def test_every_prompt_source_gives_the_same_trace(
    run: Run, demo_llm: LLM, path: Path, tmp_path: Path
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(PROMPT)
    traces = set()
    for source in (("-p", PROMPT), ("-f", str(prompt)), ("-",)):
        demo_llm.forget()
        options = ("-n", "1", "-q", "--overwrite", "-o", str(path))
        assert run("trace", *source, *options, stdin=PROMPT.encode()).err == ""
        traces.add(path.read_text())
    assert len(traces) == 1


def test_a_full_disk_is_one_error_that_names_the_trace(run: Run) -> None:
    done = run("trace", *COMMON, "-q", "-o", "/dev/full")
    assert done.code == 1
    message, hint = done.err.splitlines()
    assert message == "error: the trace /dev/full cannot be written: No space left on device"
    assert hint.startswith("hint: ")


def test_ctrl_c_leaves_what_was_recorded(
    run: Run, demo_llm: LLM, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_tokens = len(demo_llm.tokenizer.encode(PROMPT)) + 2
    interrupt_at(demo_llm, n_tokens, monkeypatch)
    done = run("trace", *COMMON, "-o", str(path))
    assert done.code == 130
    assert "Traceback" not in done.err
    assert f"routing of {n_tokens} tokens is in {path}" in done.err
    assert (read_trace(path).n_tokens, read_trace(path).notes) == (n_tokens, ())


def interrupt_at(llm: LLM, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = llm.engine.run

    def interrupted(batch: TokenBatch) -> RunResult:
        if position in batch.positions:
            raise KeyboardInterrupt
        return run(batch)

    monkeypatch.setattr(llm.engine, "run", interrupted)


def test_a_file_that_is_there_stays_unless_told_otherwise(run: Run, path: Path) -> None:
    path.write_text("precious")
    refused = run("trace", *COMMON, "-o", str(path))
    assert (refused.code, refused.out) == (2, "")
    assert f"{path} is there already" in refused.err
    assert "--overwrite" in refused.err.splitlines()[1]
    assert path.read_text() == "precious"
    failed = run("trace", "-p", "x " * 500, "-o", str(path), "--overwrite")
    assert failed.code == 1
    assert path.read_text() == "precious", "replaced before there was a token to record"
    assert run("trace", *COMMON, "-o", str(path), "--overwrite").code == 0
    assert read_trace(path).n_tokens > 4


@pytest.mark.parametrize(
    ("output", "options", "message"),
    [
        ("blob", (), "--output blob would overwrite a model"),
        ("prompt", ("-f", "prompt"), "--output prompt would overwrite prompt, which is read"),
        ("new", ("--expert-stats", "new"), "--output and --expert-stats would both write new"),
    ],
)
def test_no_trace_takes_the_place_of_what_is_needed(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    output: str,
    options: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr("vkmoe.cli.notes._load", None)
    monkeypatch.chdir(tmp_path)
    model = shutil.copy(model_path("moe_plain"), "blob")
    Path("prompt").write_text(PROMPT)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    prompt = () if "-f" in options else ("-p", PROMPT)
    done = run("trace", model, *prompt, "-o", output, *options, "--overwrite")
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[0].startswith(f"error: {message}")
    assert done.err.splitlines()[1].startswith("hint: ") and "--overwrite" not in done.err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_keeps_nothing_may_be_named_twice(run: Run) -> None:
    null = os.devnull
    done = run("trace", *COMMON, "-o", null, "--expert-stats", null)
    assert done.code == 0, done.err


def test_without_a_name_the_file_is_trace_jsonl(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "is in trace.jsonl" in run("trace", *COMMON).err
    assert read_trace(tmp_path / "trace.jsonl").n_tokens > 4


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((str(model_path("dense_tied")), "-p", "x"), 1, "no routing to record"),
        (("/nowhere.gguf", "-p", "x"), 1, "/nowhere.gguf"),
        (("-p", "x", "-o", "/nowhere/t.jsonl"), 1, "the trace cannot be written: no folder"),
        (("-p", "x", "-o", "/"), 1, "the trace cannot be written: / is a folder"),
        (("-p", "x", "--draft", "lookup"), 2, "--draft lookup runs tokens that the reply may not"),
        (("-p", "x", "-o", "-"), 2, "--output - would mix the trace with the reply"),
        ((), 2, "no prompt given"),
        (("-p", "x", "-v", "-q"), 2, "--verbose and --quiet contradict"),
    ],
)
def test_mistakes_are_said_before_a_model_is_loaded(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr("vkmoe.cli.notes._load", None)
    monkeypatch.chdir(tmp_path)
    done = run("trace", *arguments)
    assert (done.code, done.out) == (code, "")
    assert message in done.err.splitlines()[0]
    assert not list(tmp_path.iterdir())
