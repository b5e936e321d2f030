"""What tests of the catalogue share: a home of their own, and a hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from tests.catalogue.hub_server import FakeHub
from tests.engine.tiny import model_path
from vkmoe.catalogue import caches, download

VARIABLES = (
    *("LLAMA_CACHE", "OLLAMA_MODELS", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"),
    *("HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
)
NAME = "some-one/Tiny-MoE-GGUF"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, where no variable leads elsewhere; no hub can be reached from it."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(caches, "OLLAMA_OF_SYSTEM", tmp_path / "system/ollama")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with two quants of a tiny model, which is asked instead of Hugging Face's."""
    files = {
        "README.md": b"# Tiny\n",
        "Tiny-MoE-Q4_K_M.gguf": model_path("olmoe_plain").read_bytes(),
        "Tiny-MoE-Q8_0.gguf": model_path("moe_odd").read_bytes(),
        "mmproj-Tiny-F16.gguf": b"GGUF",
    }
    with FakeHub(NAME, files) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(download, "WAITS", (0.0, 0.0, 0.0))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        huggingface_hub.close_session()
        yield hub
        huggingface_hub.close_session()
        hub.shutdown()
