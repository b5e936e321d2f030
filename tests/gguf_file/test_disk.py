"""How fast a file is read is measured without a model."""

from __future__ import annotations

from pathlib import Path

from vkmoe.gguf_file.disk import read_speed


def test_the_speed_of_a_disk_is_measured_by_pieces_of_a_file(tmp_path: Path) -> None:
    """A short file is read whole; one that is not there has no speed, and is no error."""
    path = tmp_path / "model.gguf"
    for n_bytes in (1, 20 << 20):
        path.write_bytes(bytes(n_bytes))
        assert read_speed(path) > 0
    assert read_speed(tmp_path / "none") == 0
    assert read_speed(tmp_path) == 0
