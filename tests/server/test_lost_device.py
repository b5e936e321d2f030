"""A device that is lost ends the replies under way with one error each, and the model is loaded
once more.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import uvicorn

from tests.server.conftest import Served, serving
from vkmoe.engine import Engine
from vkmoe.errors import DeviceLostError
from vkmoe.generate.loop import Generation
from vkmoe.llm.engine_thread import EngineThread
from vkmoe.server.transport.serving import Server

ASKED = {"prompt": "def main():", "max_tokens": 8, "temperature": 0}


class Failing:
    """The engine's `run`, which loses the device after so many runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_left, run = -1, Engine.run

        def failing(engine: Engine, batch: Any) -> Any:
            self.n_left -= self.n_left >= 0
            if self.n_left == 0:
                raise DeviceLostError("the device was lost", "try again")
            return run(engine, batch)

        monkeypatch.setattr(Engine, "run", failing)


def health(served: Served) -> tuple[int, str]:
    answer = served.client.get("/health")
    return answer.status_code, answer.json().get("error", {}).get("message", "")


def test_the_model_is_loaded_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    failing, tell = Failing(monkeypatch), EngineThread._tell

    def slowly(engine: EngineThread, generation: Generation) -> None:
        tell(engine, generation)
        time.sleep(0.2 * (generation.error is not None))  # a client asks for more meanwhile

    monkeypatch.setattr(EngineThread, "_tell", slowly)
    # Else the server ends within a tick of losing the model, amid what is asked of it here.
    monkeypatch.setattr(Server, "on_tick", uvicorn.Server.on_tick)
    with serving() as served:
        served.wait()
        wanted = served.post("/v1/completions", ASKED).json()["choices"][0]["text"]
        failing.n_left = 4
        with served.client.stream(
            "POST", "/v1/completions", json={**ASKED, "stream": True}
        ) as answer:
            lines = [line for line in answer.iter_lines() if line]
        error = json.loads(lines[-1].removeprefix("data: "))["error"]
        assert "the device was lost" in error["message"] and len(lines) > 1
        served.wait()
        assert served.engine.n_restarts == 1 and not served.engine.has_failed
        assert served.post("/v1/completions", ASKED).json()["choices"][0]["text"] == wanted
        failing.n_left = 1
        answer = served.post("/v1/completions", ASKED)
        assert answer.status_code == 500 and "lost" in answer.json()["error"]["message"]
        served.engine.join()
        assert served.engine.has_failed
        assert health(served) == (503, "the model is not there: the device was lost")
        assert served.post("/v1/completions", ASKED).status_code == 503
