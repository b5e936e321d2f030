"""The models of a folder, or of a TOML file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.errors import ModelFileError, UsageError
from vkmoe.llm import demo_model_path
from vkmoe.server.hosting.roster import Peer, read_roster

ENGINE, SAMPLING = EngineConfig(ctx_size=64, device="cpu"), SamplingConfig(temp=0.1)


def test_a_folder_has_a_model_for_each_file(tmp_path: Path) -> None:
    for name in ("b", "a"):
        shutil.copy(demo_model_path(), tmp_path / f"{name}.gguf")
    found = read_roster(tmp_path, ENGINE, SAMPLING).models
    assert [(x.name, Path(x.model).name) for x in found] == [("a", "a.gguf"), ("b", "b.gguf")]
    assert all((x.engine, x.sampling) == (ENGINE, SAMPLING) for x in found)
    (tmp_path / "c").mkdir()
    for file in ("c/a.gguf", "c/d-00001-of-00002.gguf", "c/mmproj-a.gguf", "x,y.gguf"):
        shutil.copy(demo_model_path(), tmp_path / file)
    names = [x.name for x in read_roster(tmp_path, ENGINE, SAMPLING).models]
    assert names == ["a", "b", "c/a", "d", "x,y"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelFileError, match="has no model"):
        read_roster(tmp_path / "empty", ENGINE, SAMPLING)


def test_a_file_has_options_for_each_model_and_names_other_servers(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    (tmp_path / "m.gguf").touch()
    file = tmp_path / "models.toml"
    file.write_text(
        """
        peers = ["http://a:1/v1", {url = "https://b/", api_key = "k"}]
        [models.one]
        model = "m.gguf"
        ctx_size = 128
        aliases = ["first"]
        chat_template_file = "own.jinja"
        [models."owner/two"]
        model = "owner/two:Q4_K_M"
        temp = 0.5
        """
    )
    found = read_roster(file, ENGINE, SAMPLING)
    one, two = found.models
    assert (one.model, one.aliases) == (str(tmp_path / "m.gguf"), ("first",))
    assert (one.engine.ctx_size, one.engine.device, one.sampling.temp) == (128, "cpu", 0.1)
    assert one.chat_template == "{{ messages }}"
    assert (two.name, two.model) == ("owner/two", "owner/two:Q4_K_M")
    assert (two.engine.ctx_size, two.sampling.temp) == (64, 0.5)
    assert found.peers == (Peer("http://a:1"), Peer("https://b", "k"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models = ", "it is no TOML"),
        ("model = 1", "it has 'model'"),
        ("", "it has no model"),
        ("[models]\na = 1", "models are no tables"),
        ("[models.a]\n", "models.a has no model"),
        ("[models.a]\nmodel = 'x'\nctx = 1", "models.a has 'ctx', which is no option"),
        ("[models.a]\nmodel = 'x'\nctx_size = 0", "ctx_size"),
        ("[models.a]\nmodel = 'x'\nctx_size = 'many'", "ctx_size"),
        ("[models.a]\nmodel = 'x'\naliases = 'b'", "aliases is no list"),
        ("[models.a]\nmodel = 'x'\naliases = ['b']\n[models.b]\nmodel = 'y'", "two models are"),
        ("[models.a]\nmodel = 'x'\nchat_template_file = 'none'", "chat_template_file of models.a"),
        ("peers = 'x'\n[models.a]\nmodel = 'x'", "peers is no list"),
        ("peers = ['x']\n[models.a]\nmodel = 'x'", "'x' is no server"),
        ("[models.a]\nmodel = 'x'\naliases = ['b', 'b:latest']", "two models are"),
        ("[models.a]\nmodel = 'none.gguf'", "models.a: there is no file"),
        ("peers = ['http://[::1']\n[models.a]\nmodel = 'x'", "is no server"),
        ("peers = ['http://h:99999']\n[models.a]\nmodel = 'x'", "is no server"),
        ("peers = ['http://']\n[models.a]\nmodel = 'x'", "is no server"),
        ("peers = [{url='http://h', key='k'}]\n[models.a]\nmodel='x'", "http://h has 'key'"),
        ("peers = [{url='http://h', api_key=7}]\n[models.a]\nmodel='x'", "api_key of http://h"),
        ("#" * (2 << 20), "larger than 1 MiB"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"models\.toml") as caught:
        read_roster(file, ENGINE, SAMPLING)
    assert message in str(caught.value) and "\n" not in str(caught.value) and caught.value.hint
