"""Models are found by what users call them: in the caches of other programs, and nowhere else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.engine.tiny import model_path
from vkmoe.catalogue import KeptModel, find_model, kept_models, quant_of
from vkmoe.cli.app import app
from vkmoe.errors import ModelFileError
from vkmoe.llm import LLM

DIGEST = "ab" * 32
NAME, SMALL, LARGE = "some-one/Tiny-MoE-GGUF", "Tiny-MoE-Q4_K_M.gguf", "Tiny-MoE-Q8_0.gguf"
HUGGING_FACE = ".cache/huggingface/hub/models--some-one--Tiny-MoE-GGUF/snapshots/"
# Where programs keep the file, and what its folder has besides.
KEPT = {
    "Hugging Face": HUGGING_FACE + "0a1b/" + LARGE,
    "llama.cpp": ".cache/llama.cpp/some-one_Tiny-MoE-GGUF_" + LARGE,
    "LM Studio": ".lmstudio/models/some-one/Tiny-MoE-GGUF/" + LARGE,
    "Ollama": f".ollama/models/blobs/sha256-{DIGEST}",
}


def put(home: Path, place: str, name: str = "moe_plain") -> Path:
    """A model's file at a place below the home."""
    path = home / place
    path.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(model_path(name), path))


def keep(home: Path, program: str) -> Path:
    """The file as a program keeps it, with what it writes beside it."""
    if program == "llama.cpp":
        (home / ".cache/llama.cpp").mkdir(parents=True)
        manifest = "manifest=some-one=Tiny-MoE-GGUF=Q8_0.json"
        (home / ".cache/llama.cpp" / manifest).write_text("{}")
    if program == "Ollama":
        write_manifest(home, f"sha256:{DIGEST}")
    return put(home, KEPT[program])


def write_manifest(home: Path, digest: object, root: str = ".ollama/models") -> None:
    path = home / root / "manifests/registry.ollama.ai/some-one/Tiny-MoE-GGUF/q8_0"
    path.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.params", "digest": "sha256:" + "0" * 64},
        {"mediaType": "application/vnd.ollama.image.model", "digest": digest},
    ]
    path.write_text(json.dumps({"layers": layers}))


def none(models: Sequence[KeptModel]) -> KeptModel:
    raise AssertionError(f"there was nothing to choose: {models}")


def largest(models: Sequence[KeptModel]) -> KeptModel:
    return max(models, key=lambda model: model.n_bytes)


@pytest.mark.parametrize("program", KEPT)
def test_a_name_leads_to_the_file_that_a_program_keeps(program: str, home: Path) -> None:
    path = keep(home, program)
    (model,) = kept_models()
    assert (model.name, model.quant, model.program) == (NAME, "Q8_0", program)
    assert model.n_bytes == path.stat().st_size
    for wanted in (NAME, f"{NAME}:Q8_0", f"{NAME.lower()}:q8_0", f"{NAME}:latest"):
        for before in ("", "hf.co/", "https://huggingface.co/"):
            assert find_model(before + wanted, none) == path
    with pytest.raises(ModelFileError, match=f"called {NAME}:Q2_K") as caught:
        find_model(f"{NAME}:Q2_K", none)
    assert caught.value.hint == f"there is {NAME}:Q8_0"


@pytest.mark.parametrize(
    ("variable", "below"),
    [
        ("LLAMA_CACHE", ""),
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ],
)
def test_variables_say_where_a_cache_is(
    variable: str, below: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, str(home / "elsewhere"))
    folder = Path("elsewhere", below, *Path(HUGGING_FACE).parts[3:])
    path = put(home, str(folder / "0a1b" / SMALL))
    assert find_model(NAME, none) == path
    other = put(home, KEPT["Hugging Face"])
    is_one_more = variable == "LLAMA_CACHE"
    assert [x.path for x in kept_models()] == [path, *[other] * is_one_more]


def test_a_model_in_parts_is_one_and_files_beside_it_are_none(home: Path) -> None:
    folder = HUGGING_FACE + "0a1b/"
    paths = [put(home, f"{folder}Q8_0/Tiny-Q8_0-0000{i}-of-00002.gguf") for i in (1, 2)]
    for beside in (
        *("mmproj-Tiny-F16.gguf", "Tiny.mmproj-f16.gguf", "mtp-Tiny-F16.gguf"),
        *("Tiny-assistant-Q8_0.gguf", "imatrix_unsloth.gguf"),
    ):
        put(home, folder + beside)
    (model,) = kept_models()
    assert (model.path, model.quant) == (paths[0], "Q8_0")
    assert model.n_bytes == 2 * paths[0].stat().st_size
    assert find_model(home / folder, none) == paths[0]


def test_a_projector_in_the_old_cache_of_llama_cpp_is_no_model(home: Path) -> None:
    path = keep(home, "llama.cpp")
    put(home, ".cache/llama.cpp/some-one_Tiny-MoE-GGUF_mmproj-Tiny-F16.gguf")
    assert [model.path for model in kept_models()] == [path]


def test_a_service_of_ollama_and_a_folder_chosen_in_lm_studio_count_too(home: Path) -> None:
    write_manifest(home, f"sha256:{DIGEST}", "system/ollama")
    put(home, f"system/ollama/blobs/sha256-{DIGEST}")
    put(home, f"large/disk/some-one/Other-GGUF/{LARGE}")
    (home / ".lmstudio").mkdir()
    settings = home / ".lmstudio/settings.json"
    settings.write_text(json.dumps({"downloadsFolder": str(home / "large/disk")}))
    found = {model.name: model.program for model in kept_models()}
    assert found == {"some-one/Other-GGUF": "LM Studio", NAME: "Ollama"}
    for damaged in ("[]", '{"downloadsFolder": 7}', '{"downloadsFolder": "large/disk"}', "{"):
        settings.write_text(damaged)
        assert [model.name for model in kept_models()] == [NAME]


def test_a_file_counts_once_and_is_that_of_the_newest_snapshot(home: Path) -> None:
    old, new, same = (put(home, f"{HUGGING_FACE}{x}/{LARGE}") for x in ("9f", "1a", "5c"))
    same.unlink()
    same.symlink_to(new)
    for changed_at, path in enumerate((same, old, new)):
        os.utime(path.parent, (changed_at, changed_at))
    (model,) = kept_models()
    assert model.path == new
    put(home, KEPT["LM Studio"])
    assert [model.program for model in kept_models()] == ["Hugging Face", "LM Studio"]
    assert find_model(NAME, none) == new, "one quant, kept twice"


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("a-Q4_K_M.gguf", "Q4_K_M"),
        ("Qwen3-30B-A3B-UD-Q4_K_XL-00001-of-00002.gguf", "UD-Q4_K_XL"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("m.IQ2_XXS.gguf", "IQ2_XXS"),
        ("qwen3-8b.gguf", ""),
        ("q3.gguf", ""),
        ("x-f16.gguf", "F16"),
        ("qwen2.5-7b-instruct-fp16-00001-of-00004.gguf", "FP16"),
    ],
)
def test_quants_are_read_from_names_of_files(name: str, quant: str) -> None:
    assert quant_of(Path(name)) == quant


def test_what_is_not_there_is_said(home: Path, tmp_path: Path) -> None:
    for wanted in ("some-one/Other", "some-one/Other:Q4_K_M"):
        with pytest.raises(ModelFileError, match="no model on this machine") as caught:
            find_model(wanted, none)
        assert "no cache of Hugging Face" in caught.value.hint
    keep(home, "LM Studio")
    with pytest.raises(ModelFileError) as caught:
        find_model("some-one/Other", none)
    assert caught.value.hint == f"there is {NAME}; or give a file's path"
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelFileError, match="has no model"):
        find_model(empty, none)
    put(home, f"empty/{SMALL}"), put(home, f"empty/{LARGE}")
    with pytest.raises(ModelFileError, match="has 2 models") as mistake:
        find_model(empty, none)
    assert mistake.value.hint == f"name one: {SMALL}, {LARGE}"
    for path in ("missing.gguf", "missing", "a/b/missing.gguf", str(empty / SMALL), "~/x.gguf"):
        assert find_model(path, none) == Path(path).expanduser()
    for path in ("~no-one-here/x", "x" * 5000, "x\0"):
        assert find_model(path, none) == Path(path), "no path at all is an error of its own"


@pytest.mark.parametrize(
    "digest", ["sha256:../../../../secret", "sha256:" + "c" * 64, "", None, 7, ["sha256:" + DIGEST]]
)
def test_a_manifest_leads_to_blobs_alone(digest: object, home: Path) -> None:
    put(home, "secret")
    put(home, KEPT["Ollama"])
    write_manifest(home, digest)
    assert list(kept_models()) == []


@pytest.mark.parametrize("text", ["", "[]", "{", '{"layers": 3}', '{"layers": [{}]}', "[" * 10_000])
def test_a_damaged_manifest_has_no_model(text: str, home: Path) -> None:
    keep(home, "Ollama")
    (path,) = home.glob(".ollama/models/manifests/*/*/*/*")
    path.write_text(text)
    assert list(kept_models()) == []


def test_python_and_the_command_line_take_names(home: Path) -> None:
    """Of the two files the larger one replies without being read; the device says so, too."""
    folder = HUGGING_FACE + "0a1b/"
    put(home, folder + SMALL, "olmoe_plain"), put(home, folder + LARGE, "moe_odd")
    by_size = largest(list(kept_models())).path
    with LLM(NAME, ctx_size=32, device="cpu") as llm:
        assert Path(llm.engine.model.file.path) == by_size
    with LLM(f"{NAME}:Q4_K_M", ctx_size=32, device="cpu") as llm:
        assert Path(llm.engine.model.file.path) == home / folder / SMALL
    for asked, file in (([NAME], by_size), (["-hf", f"{NAME}:Q4_K_M"], home / folder / SMALL)):
        result = CliRunner().invoke(app, ["info", *asked, "--device", "cpu"])
        assert result.exit_code == 0 and str(file) in result.output, result.output
        assert (f"{NAME}:Q8_0 was chosen" in result.stderr) == (asked == [NAME])


def test_models_on_this_machine_are_listed(home: Path) -> None:
    """With what their plans say; of those that cannot be run, why."""
    run = CliRunner().invoke
    assert "no model is kept here" in run(app, ["models"]).stderr
    folder = HUGGING_FACE + "0a1b/"
    put(home, folder + LARGE)
    (home / folder / SMALL).write_bytes(b"GGUF" + b"\0" * 60)
    bad, good = run(app, ["models", "--device", "cpu"]).stdout.splitlines()
    assert bad.startswith(f"{NAME}:Q4_K_M") and "cannot be run" in bad
    assert good.startswith(f"{NAME}:Q8_0") and " resident " in good and "tok/s" in good
    assert good.endswith("Hugging Face")
    first, second = json.loads(run(app, ["models", "--device", "cpu", "--json"]).stdout)
    assert "error" in first and second["path"] == str(home / folder / LARGE)
    assert second["tokens_per_second"] > 0 and second["reads_file"] is False
