"""Of a repository's files the one is downloaded that is meant, or that suits the machine best."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

import pytest

from tests.catalogue.conftest import NAME
from tests.catalogue.hub_server import FakeHub
from tests.catalogue.test_download import got
from tests.engine.tiny import model_path
from vkmoe.catalogue import choose, offers
from vkmoe.catalogue.caches import part_names
from vkmoe.catalogue.choose import best_offer
from vkmoe.catalogue.hub import HubFile, Repository
from vkmoe.catalogue.offers import Offer, guessers_of, offers_of
from vkmoe.config import EngineConfig
from vkmoe.errors import DownloadError, OutOfMemoryError, UnsupportedModelError

NO_DIGEST = "0" * 64


def repository(*names: str) -> Repository:
    """A repository with these files, each a byte larger than the one before."""
    found = [HubFile(name, 1 + index, NO_DIGEST) for index, name in enumerate(names)]
    gguf = tuple(sorted(file for file in found if file.name.endswith(".gguf")))
    others = tuple(file.name for file in found if not file.name.endswith(".gguf"))
    return Repository(NAME, "0" * 40, gguf, others)


def chosen(offers: Sequence[Offer]) -> list[tuple[str, list[str]]]:
    return [(offer.quant, [file.name for file in offer.files]) for offer in offers]


def test_files_that_go_with_a_model_are_not_offered() -> None:
    """Among them drafters, which may have the same quant; a model's parts are one."""
    offers = offers_of(
        repository(
            *("README.md", "mmproj-F16.gguf", "mtp-x-Q8_0.gguf", "x-imatrix.gguf"),
            *("gemma-assistant-Q8_0.gguf", "gemma-it-Q8_0.gguf"),
            *("Q6_K/x-Q6_K-00002-of-00002.gguf", "Q6_K/x-Q6_K-00001-of-00002.gguf"),
            *("x-F16-00001-of-00002.gguf", "a/b/c/x-Q2_K.gguf"),
        )
    )
    parts = [f"Q6_K/x-Q6_K-0000{n}-of-00002.gguf" for n in (1, 2)]
    assert chosen(offers) == [("Q8_0", ["gemma-it-Q8_0.gguf"]), ("Q6_K", parts)]
    alone = repository("my-assistant.gguf", "notes.txt")
    assert chosen(offers_of(alone)) == [("", ["my-assistant.gguf"])]
    assert guessers_of(alone, offers_of(alone)[0]) == []


def test_files_that_guess_tokens_ahead_are_named_and_not_downloaded(
    hub: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vkmoe")
    hub.files["mtp-Tiny-Q8_0.gguf"] = hub.files["a/tiny-assistant-F16.gguf"] = b"GGUF"
    path = got()
    assert "a/tiny-assistant-F16.gguf, mtp-Tiny-Q8_0.gguf would guess tokens" in caplog.text
    assert f"`hf download {NAME} NAME`" in caplog.text
    assert [x.name for x in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("quant", "found"),
    [("q4_k_m", "Q4_K_M"), ("Q4_K_XL", "UD-Q4_K_XL"), ("UD-Q4_K_XL", "UD-Q4_K_XL")],
)
def test_a_quant_is_meant_in_any_case_and_without_its_makers_mark(quant: str, found: str) -> None:
    (offer,) = offers_of(repository("x-Q4_K_M.gguf", "x-UD-Q4_K_XL.gguf"), quant)
    assert offer.full_name == f"{NAME}:{found}"


def test_what_is_not_there_is_said_with_what_is() -> None:
    with pytest.raises(DownloadError, match=f"{NAME} has no Q2_K") as caught:
        offers_of(repository("x-Q8_0.gguf", "x-Q4_K_M.gguf"), "q2_k")
    assert caught.value.hint == "it has Q4_K_M, Q8_0"
    others = ["a.safetensors", "\x1b[2J", *(f"{n}.json" for n in range(20))]
    with pytest.raises(DownloadError, match="no model in the GGUF format") as caught:
        offers_of(repository(*others))
    assert caught.value.hint.startswith("it has a.safetensors, \\x1b[2J, 0.json")
    assert "and 10 more" in caught.value.hint


def test_parts_that_names_announce_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub may list many files, each of which says that it is one of 99,999."""
    made = []

    def counted(first: PurePath) -> Iterator[str]:
        made.append(first)
        for name in part_names(first):
            yield name
            made.append(first)

    monkeypatch.setattr(offers, "part_names", counted)
    files = [f"{n}-Q8_0-00001-of-99999.gguf" for n in range(50)]
    single = "x-Q4_0-00001-of-00000.gguf"
    assert chosen(offers_of(repository(*files, single))) == [("Q4_0", [single])]
    assert len(made) < 200


# ----- the best one for a machine -----


def planner(most: int) -> Callable[[EngineConfig, Path], Any]:
    """What plans files as if a machine had memory for `most` bytes; the header is the size."""

    def rate(size: int) -> Any:
        if size > 1000:
            raise OutOfMemoryError("too large")
        return choose.Rated("cache", size > most, 100 / size)

    return lambda config, disk: rate


class Opened:
    """Stands for an open model: its size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __enter__(self) -> int:
        return self.size

    def __exit__(self, *error: object) -> None:
        pass


def best_of(sizes: dict[str, int], most: int, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """The quant that is chosen, and how many headers that took; size 7 cannot be run."""
    offers = [Offer(NAME, quant, (HubFile("x", n, NO_DIGEST),)) for quant, n in sizes.items()]
    looked_at = []

    def open_model(size: Any) -> Opened:
        looked_at.append(size)
        if size % 10 == 7:
            raise UnsupportedModelError("what is that")
        return Opened(size)

    monkeypatch.setattr(choose, "_planner", planner(most))
    monkeypatch.setattr(choose, "open_model", open_model)
    size_of: Any = lambda offer: offer.n_bytes  # noqa: E731
    return best_offer(offers, EngineConfig(), Path(), size_of).quant, len(looked_at)


def test_the_largest_that_is_whole_in_memory_is_found_by_few_headers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If all read their file, it is the fastest; an unquantised one where there is no other."""
    sizes = {f"Q{n}_0": 10 * n for n in range(1, 26)}
    for most in (10, 60, 125, 130, 250, 999):
        best, n_headers = best_of(sizes | {"F16": 260}, most, monkeypatch)
        assert best == f"Q{min(most // 10, 25)}_0" and n_headers <= 5
    assert best_of(sizes, 1, monkeypatch)[0] == "Q1_0"
    assert best_of({"F16": 20, "BF16": 30}, 25, monkeypatch)[0] == "F16"
    large = {"Q2_0": 900, "Q3_0": 1100, "Q4_0": 1200, "Q5_0": 1300, "Q6_0": 1400, "Q7_0": 1500}
    assert best_of(large, 1000, monkeypatch)[0] == "Q2_0"
    assert best_of({"Q2_0": 20, "Q3_0": 37, "Q4_0": 47}, 30, monkeypatch)[0] == "Q2_0"
    odd = {f"Q{n}_0": 10 * n + 7 for n in range(20)}
    with pytest.raises(UnsupportedModelError, match="what is that"):
        best_of(odd, 100, monkeypatch)


def test_the_best_quant_of_a_repository_is_downloaded(
    hub: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vkmoe")
    hub.files["Tiny-MoE-BF16.gguf"] = model_path("moe_plain").read_bytes() + bytes(1 << 20)
    assert got(NAME).name == "Tiny-MoE-Q8_0.gguf"
    assert f"{NAME}:Q8_0 was chosen for this machine, of Q4_K_M, Q8_0, BF16" in caplog.text
    assert hub.starts("BF16") == []
