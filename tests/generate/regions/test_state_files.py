"""Files with the state of a conversation: they hold all of it, and damaged ones are refused."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path
from zlib import crc32

import pytest

from tests.generate.fake_model import N_VOCAB, FakeModel
from tests.generate.regions.test_regions import add, fill
from vkmoe.errors import StateFileError, UsageError
from vkmoe.generate.regions.state_files import MAGIC
from vkmoe.generate.scheduler import Scheduler

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
N_HEAD = len(MAGIC) + 4 + 32 + 8 + 3 * 4


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file of a prompt and two tokens of its reply."""
    model = FakeModel(1)
    scheduler = Scheduler(model)
    regions = scheduler.regions
    fill(model, regions, PROMPT)
    add(model, regions, 0, [7, 8], "decode")
    counts = scheduler.save(0, tmp_path / "a.state")
    assert counts == (10, (tmp_path / "a.state").stat().st_size)
    return tmp_path / "a.state"


def with_head(data: bytes, **changes: int) -> bytes:
    """A file whose header says something else, with the checksum that belongs to it."""
    names = ("version", "fingerprint", "n_bytes", "n_tokens", "n_prompt_rows", "n_stops")
    values = dict(zip(names, struct.unpack("<I32sQIII", data[len(MAGIC) : N_HEAD]), strict=True))
    n_before = N_HEAD + 4 * values["n_tokens"]
    head = MAGIC + struct.pack("<I32sQIII", *(values | changes).values()) + data[N_HEAD:n_before]
    return head + struct.pack("<I", crc32(head)) + data[n_before + 4 :]


def test_a_region_comes_back_with_its_tokens(saved: Path) -> None:
    """A prompt goes on from the rows that were run as a prompt's; what was there before is kept."""
    model = FakeModel(2, most_kept=100)
    scheduler = Scheduler(model)
    regions = scheduler.regions
    others = list(range(100, 140))
    fill(model, regions, others)
    assert scheduler.restore(0, saved).n_tokens == 10
    assert regions.tokens(0) == (*PROMPT, 7, 8) and len(model.rows[0]) == 10
    again = saved.parent / "b.state"
    assert scheduler.save(0, again).n_tokens == 10
    assert again.read_bytes() == saved.read_bytes()
    assert regions.take([*PROMPT, 7, 8, 9]) == 0
    assert regions.keep(0, [*PROMPT, 7, 8, 9]) == len(PROMPT)
    assert regions.kept.prompts[0].tokens.tolist() == others


def test_no_damage_goes_unnoticed(saved: Path) -> None:
    """A bit that flips anywhere, a byte that is missing or too many; that of rows empties a region,
    that of the header changes nothing."""
    sound = saved.read_bytes()
    model = FakeModel(1)
    scheduler = Scheduler(model)
    n_before = N_HEAD + 4 * 10 + 4
    damaged = [sound[:n] for n in range(0, len(sound), 7)] + [sound[:-1], sound + b"x"]
    for index in range(len(sound)):
        damaged.append(bytes([*sound[:index], sound[index] ^ 1 << index % 8, *sound[index + 1 :]]))
    for number, data in enumerate(damaged):
        scheduler.erase(0)
        fill(model, scheduler.regions, PROMPT[:3])
        saved.write_bytes(data)
        with pytest.raises(StateFileError) as caught:
            scheduler.restore(0, saved)
        assert str(saved) in str(caught.value) and caught.value.hint
        of_rows = len(data) == len(sound) and number - (len(damaged) - len(sound)) >= n_before
        assert len(model.rows[0]) == (0 if of_rows else 3), number
        assert scheduler.regions.n_rows(0) == len(model.rows[0])
    saved.write_bytes(sound)
    assert scheduler.restore(0, saved).n_tokens == 10


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "version 2"),
        ({"fingerprint": b"y" * 32}, "another model"),
        ({"n_prompt_rows": 11}, "contradict"),
        ({"n_tokens": 1 << 31}, "size"),
        ({"n_stops": 1 << 31}, "size"),
        ({"n_bytes": 1 << 62}, "size"),
        ({"n_bytes": 72}, "size"),
        ({"n_tokens": 9, "n_stops": 1}, "contradict"),
        ({"n_tokens": 0, "n_stops": 10, "n_prompt_rows": 0}, "0 tokens"),
    ],
)
def test_a_header_that_lies_is_refused(saved: Path, changes: dict[str, int], words: str) -> None:
    """Though its checksum is right, and before memory is taken."""
    saved.write_bytes(with_head(saved.read_bytes(), **changes))
    check_refused(saved, words)


def test_a_file_with_holes_takes_no_memory(saved: Path) -> None:
    """It may say that it has more tokens than memory holds, and be as long as that without them."""
    n_tokens = 1 << 23
    saved.write_bytes(with_head(saved.read_bytes(), n_tokens=n_tokens, n_bytes=0)[:N_HEAD])
    os.truncate(saved, N_HEAD + 4 * n_tokens + 2 * 4)
    check_refused(saved, f"has {n_tokens} tokens")


def check_refused(path: Path, words: str) -> None:
    """Check that a file is refused, and that this takes no memory."""
    scheduler = Scheduler(FakeModel(1))
    tracemalloc.start()
    try:
        with pytest.raises(StateFileError, match=words):
            scheduler.restore(0, path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_tokens_that_the_model_does_not_have_are_refused(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    for token in (N_VOCAB, -1):
        data[N_HEAD : N_HEAD + 4] = struct.pack("<i", token)
        saved.write_bytes(with_head(bytes(data)))
        with pytest.raises(StateFileError, match="contradict"):
            Scheduler(FakeModel(1)).restore(0, saved)


def test_a_context_that_is_too_short_is_named(saved: Path) -> None:
    with pytest.raises(StateFileError, match="10 tokens") as caught:
        Scheduler(FakeModel(1, ctx_size=9)).restore(0, saved)
    assert "--ctx-size" in caught.value.hint


def test_a_region_in_use_is_left_alone(saved: Path) -> None:
    model = FakeModel(2)
    scheduler = Scheduler(model)
    region = scheduler.regions.take(PROMPT)
    for call in (scheduler.save, scheduler.restore):
        with pytest.raises(UsageError, match="in use"):
            call(region, saved)
        with pytest.raises(UsageError, match="no region 2"):
            call(2, saved)
    with pytest.raises(UsageError, match="in use"):
        scheduler.erase(region)
    with pytest.raises(StateFileError, match="nothing is in region"):
        scheduler.save(1 - region, saved)


def test_only_a_saved_state_is_replaced(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither another file nor what is no file; and where writing fails the old file stays."""
    model = FakeModel(1)
    scheduler = Scheduler(model)
    fill(model, scheduler.regions, PROMPT)
    other, empty, pipe = tmp_path / "model.gguf", tmp_path / "empty", tmp_path / "pipe"
    other.write_bytes(b"GGUF of someone")
    empty.touch()
    os.mkfifo(pipe)
    assert scheduler.save(0, empty).n_tokens == scheduler.save(0, saved).n_tokens == len(PROMPT)
    for path, words in (
        (other, "another kind of file"),
        (pipe, "not a plain file"),
        (tmp_path, "not a plain file|directory"),
        (tmp_path / "no" / "folder", "No such file"),
        (Path("a\0b"), "null"),
    ):
        with pytest.raises(StateFileError, match=words):
            scheduler.save(0, path)
        with pytest.raises(StateFileError):
            scheduler.restore(0, path)
    assert other.read_bytes() == b"GGUF of someone"
    before = saved.read_bytes()
    monkeypatch.setattr(model, "write_text", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scheduler.save(0, saved)
    assert saved.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.state", "empty", "model.gguf", "pipe"
    ]  # fmt: skip
