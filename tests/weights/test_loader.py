"""Loading with a host pool that does not hold all experts: all else is loaded, they stay in the
file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.tiny import model_path
from tests.live import live_objects
from vkmoe.config import EngineConfig
from vkmoe.errors import ModelFileError
from vkmoe.experts.store.copies import Copy
from vkmoe.experts.store.slots import SlotManager
from vkmoe.gguf_file import GgufFile
from vkmoe.gpu.device import Device
from vkmoe.models import ModelFile, open_model
from vkmoe.placement.decide import Decision, decide
from vkmoe.weights.loader import LoadedWeights, load_weights
from vkmoe.weights.placer import Progress

POOL_BYTES = 200_000  # of 16 experts of 24,576 bytes: some


class Opened(NamedTuple):
    """A model file on a device, and what was decided."""

    model: ModelFile
    device: Device
    few: Decision  # with a small pool
    whole: Decision

    def load(self, decision: Decision, progress: Progress | None = None) -> LoadedWeights:
        return load_weights(self.device, self.model, decision.plan, progress)


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device() as opened:
        yield opened


@pytest.fixture
def opened(device: Device, tmp_path: Path) -> Iterator[Opened]:
    path = tmp_path / "model.gguf"
    path.write_bytes(model_path("moe_plain").read_bytes())
    with open_model(path) as file:
        few, whole = (
            decide(EngineConfig(ctx_size=16, host_pool=pool), file, device.info)
            for pool in (str(POOL_BYTES), None)
        )
        yield Opened(file, device, few, whole)


def reads_for(decision: Decision, places: SlotManager, n_experts: int = 8) -> list[Copy]:
    """The last experts of the last layer into the pool's places."""
    (pool,) = decision.host_pools
    last = 2 * n_experts - 1
    return [(last - i, places.all[i].memory, pool.slot_bytes) for i in range(pool.capacity)]


def test_experts_are_left_where_they_are(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of their bytes are looked at, no memory is theirs, and the table leads nowhere."""
    touched: list[str] = []
    data = GgufFile.data

    def noted(file: GgufFile, name: str) -> NDArray[np.uint8]:
        touched.append(name)
        return data(file, name)

    monkeypatch.setattr(GgufFile, "data", noted)
    n_before = live_objects().get("memory", 0)
    loaded = opened.load(opened.few)
    assert live_objects()["memory"] - n_before == 2  # the trunk and the table
    assert touched and not [name for name in touched if "_exps" in name]
    assert loaded.reader is not None and loaded.homes == []
    assert not loaded.table.entries.any()
    assert all(layer.feed_forward.block.ranges == () for layer in loaded.weights.layers)
    assert all(layer.feed_forward.block.shape.span_bytes for layer in loaded.weights.layers)
    loaded.close()
    loaded.close()
    assert live_objects().get("memory", 0) == n_before


def test_places_are_filled_with_the_loader_s_bytes(opened: Opened) -> None:
    """And progress goes on until all is there."""
    steps: list[tuple[int, int]] = []
    loaded = opened.load(opened.few, lambda done, total: steps.append((done, total)))
    assert steps[-1][0] < steps[-1][1]
    with SlotManager(opened.device, opened.few.host_pools, intent="host") as places:
        reads = reads_for(opened.few, places)
        assert 0 < len(reads) < 16
        loaded.fill(reads)
        whole = opened.load(opened.whole)
        for number, place, n_bytes in reads:
            home = whole.homes[number // 8][number % 8]
            expected = home.buffer.view()[home.offset : home.offset + n_bytes]
            found = place.buffer.view()[place.offset : place.offset + n_bytes]
            assert np.array_equal(found, expected), number
        whole.close()
    (total,) = {total for _, total in steps}
    assert steps == sorted(steps) and total * 99 // 100 < steps[-1][0] <= total
    loaded.close()


def test_with_room_for_all_nothing_is_read_from_the_file_later(opened: Opened) -> None:
    loaded = opened.load(opened.whole)
    assert loaded.reader is None and len(loaded.homes) == 2
    assert loaded.table.entries.all()
    loaded.close()


def test_a_file_replaced_before_loading_leaves_nothing_allocated(opened: Opened) -> None:
    path = opened.model.file.path
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)
    before, n_open = live_objects(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(ModelFileError, match="is not the file that was opened"):
        opened.load(opened.few)
    assert live_objects() == before and len(os.listdir("/proc/self/fd")) == n_open


def test_a_file_cut_off_before_filling_is_an_error_and_leaves_no_thread(opened: Opened) -> None:
    loaded = opened.load(opened.few)
    with SlotManager(opened.device, opened.few.host_pools, intent="host") as places:
        os.truncate(opened.model.file.path, 4096)
        with pytest.raises(ModelFileError, match="ends after 4096 bytes"):
            loaded.fill(reads_for(opened.few, places))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("load")]
    loaded.close()
