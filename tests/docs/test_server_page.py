"""docs/server.md names every path that the server answers, and everything that it counts."""

from __future__ import annotations

import re
from pathlib import Path

from tests.server.conftest import serving

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text()


def test_every_path_and_count_is_named() -> None:
    with serving(device="vulkan", expert_slots=4) as served:
        served.wait()
        paths = served.client.get("/openapi.json").json()["paths"]
        metrics = served.client.get("/metrics").text
    for path, methods in paths.items():
        name = path.replace("{name}", "NAME").replace("{slot}", "ID")
        for method in methods:
            is_named = f"`{method.upper()} {name}`" in PAGE
            assert is_named or (method == "get" and f"`{name}`" in PAGE), (method, path)
    counts = re.findall(r"^# TYPE (\w+) (?:counter|gauge|histogram)$", metrics, re.MULTILINE)
    counts = [name.removesuffix("_total") for name in counts if not name.endswith("_created")]
    assert len(counts) > 9
    assert not [name for name in counts if f"`{name}`" not in PAGE]
    ways = re.findall(r'vkmoe_expert_bytes_total{way="(\w+)"}', metrics)
    assert ways and not [way for way in ways if f"`{way}`" not in PAGE]
