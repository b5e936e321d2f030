"""Models split over several files: `name-00001-of-00003.gguf` and so on.

Owns the naming rule and the checks that the parts belong together.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from vkmoe.gguf_file.cursor import refuse

__all__ = ["check_part", "part_paths"]

_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_PARTS_HINT = "keep all parts in one directory under their original names"

Lookup = Callable[[str], int | None]


def part_paths(path: Path, lookup: Lookup) -> list[Path]:
    """The files of the model that `path` belongs to, first part first.

    `lookup` reads an integer from the metadata of `path`.  Any part may be given.
    Raises ModelFileError if the name and the metadata disagree or a part is missing.
    """
    found = _NAME.fullmatch(path.name)
    named = int(found["count"]) if found else 1
    told = lookup("split.count")
    if told is None and named > 1:
        refuse(str(path), f"is named as one of {named} parts but has no split.count", _PARTS_HINT)
    if max(told or 1, 1) != named:
        refuse(str(path), f"says it is one of {told} parts, which its name does not", _PARTS_HINT)
    if found is None or named == 1:
        return [path]
    names = [f"{found['stem']}-{index:05d}-of-{named:05d}.gguf" for index in range(1, named + 1)]
    for name in names:
        if not (path.parent / name).exists():
            refuse(str(path), f"part {name} of {named} is missing from {path.parent}", _PARTS_HINT)
    return [path.parent / name for name in names]


def check_part(path: Path, index: int, count: int, lookup: Lookup) -> None:
    """Refuse `path` unless its metadata says that it is part `index` (from 0) of `count`."""
    told_count, told_index = lookup("split.count"), lookup("split.no")
    if told_count != count or told_index != index:
        refuse(
            str(path),
            f"should be part {index + 1} of {count} but says split.no = {told_index}, "
            f"split.count = {told_count}",
            _PARTS_HINT,
        )
