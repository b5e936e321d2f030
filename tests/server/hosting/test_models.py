"""Several models behind one address: swaps, sleep, and what a request meets meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import Served, listening, serving
from vkmoe.canary import check
from vkmoe.config import EngineConfig
from vkmoe.errors import VkmoeError
from vkmoe.facts import MemoryPlan
from vkmoe.llm import LLM
from vkmoe.llm.engine_thread import EngineThread
from vkmoe.placement import remembered
from vkmoe.server.hosting.models import Hosted, Models
from vkmoe.server.service import Service
from vkmoe.server.settings import ServerSettings

TEXT = "/v1/completions"
LONG = {"prompt": "def", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


def hosted(
    name: str,
    has_room: bool = False,
    load: Callable[[], LLM] | None = None,
    **settings: Any,
) -> Hosted:
    """A model that is loaded when it is needed, beside others if there is room."""
    config = EngineConfig(ctx_size=256, parallel=2)
    given: dict[str, Any] = {"timeout": 0.0, "alias": name}
    stated = ServerSettings(**given | settings)
    engine = EngineThread(load or (lambda: LLM(None, config)), stated.max_queue, is_asleep=True)
    return Hosted(Service(engine, name, stated), lambda others: has_room)


def ask(served: Served, model: str, **body: Any) -> httpx.Response:
    common = {"prompt": "x = [", "max_tokens": 8, "temperature": 0, "model": model}
    return served.post(TEXT, common | body)


def states(models: Models) -> list[str]:
    return [each.service.engine.state for each in models.hosted]


def test_swaps_fail_no_request() -> None:
    """Four clients ask for two models, of which one may be there, in turns of their own.

    A model that was loaded serves at least those who waited for it before the other one comes.
    """
    models = Models([hosted(name, has_room=True, timeout=60.0) for name in "ab"], most=1)
    n_loaded: list[int] = []

    def client(index: int) -> list[str]:
        found = []
        for turn in range(4):
            answer = ask(served, "ab"[(index + turn // 2) % 2])
            assert answer.status_code == 200, answer.text
            n_loaded.append(states(models).count("ready"))
            found.append(answer.json()["choices"][0]["text"])
        return found

    with listening(models) as served, ThreadPoolExecutor(4) as threads:
        texts = [text for texts in threads.map(client, range(4)) for text in texts]
    assert len(set(texts)) == 1 and max(n_loaded) == 1


def test_a_reply_that_was_accepted_ends_before_its_model_is_unloaded() -> None:
    models = Models([hosted("a"), hosted("b")])
    with listening(models) as served, ThreadPoolExecutor(2) as threads:
        body = LONG | {"model": "a", "stream": True}
        with httpx.stream("POST", served.address + TEXT, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            other = threads.submit(ask, served, "b")
            time.sleep(0.2)
            assert states(models) == ["ready", "asleep"] and not other.done()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        assert other.result(60).status_code == 200
        assert states(models) == ["asleep", "ready"]


def test_a_swap_ends_whole_also_where_waiting_for_it_took_too_long() -> None:
    """Else a model could sleep under requests that came after the one that gave up."""
    models = Models([hosted("b"), hosted("a")])
    with listening(models) as served, ThreadPoolExecutor(1) as threads:
        body = LONG | {"model": "a", "stream": True}
        with httpx.stream("POST", served.address + TEXT, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            models._patience = 0.2
            late = ask(served, "b")
            assert (late.status_code, late.json()["error"]["code"]) == (503, "timeout")
            models._patience = None
            other = threads.submit(ask, served, "a")
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert other.result(60).status_code == 200
        counted = served.client.get("/v1/models").json()["data"][0]
        assert counted["meta"], "b was loaded in between"


def test_models_that_have_room_stay_and_the_least_recently_used_one_leaves() -> None:
    seen: list[int] = []

    def room_for_two(plans: Sequence[MemoryPlan]) -> bool:
        seen.append(len(plans))
        return len(plans) < 2

    models = Models([hosted(name) for name in "abc"])
    for each in models.hosted:
        each.has_room = room_for_two
    with listening(models) as served:
        for name in "aba":
            assert ask(served, name).status_code == 200
        assert states(models) == ["ready", "ready", "asleep"]
        assert ask(served, "c").status_code == 200
        assert states(models) == ["ready", "asleep", "ready"] and seen == [1, 2, 1]
        assert served.client.get("/v1/models").json()["data"][1]["status"] == {"value": "unloaded"}


def test_kernels_are_compared_at_the_first_load_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both models are of one file, and each is loaded twice; requests meet no wrong kernel."""
    compared, compare = list[int](), check._Search._compare

    def counting(search: Any, unknown: Sequence[Any]) -> None:
        compared.append(len(unknown))
        compare(search, unknown)

    monkeypatch.setenv("VKMOE_DEVICE", "vulkan")
    monkeypatch.setattr(check._Search, "_compare", counting)
    monkeypatch.setattr("vkmoe.engine.passing", check.passing)
    monkeypatch.setattr(
        remembered, "remembered_path", lambda device, what="tuning": tmp_path / f"{what}.json"
    )
    models = [hosted(name, load=lambda: LLM(None, ctx_size=256)) for name in "ab"]
    with listening(Models(models)) as served:
        texts = {ask(served, name).json()["choices"][0]["text"] for name in "abab"}
    assert len(texts) == 1 and len(compared) == 1 and compared[0] > 20


@pytest.mark.parametrize(("max_queue", "n_waiting"), [(0, 1), (2, 2)])
def test_waiting_is_bounded(max_queue: int, n_waiting: int) -> None:
    """By --max-queue and by --timeout; a name of none is refused at once."""
    limits: dict[str, Any] = {"max_queue": max_queue, "timeout": 600.0}
    gate = threading.Event()

    def slowly() -> LLM:
        assert gate.wait(60)
        return LLM(None, ctx_size=256)

    models = Models([hosted("a", **limits), hosted("b", load=slowly, **limits)])
    with listening(models) as served, ThreadPoolExecutor(n_waiting) as threads:
        assert ask(served, "a").status_code == 200
        assert models._patience == limits["timeout"]
        models._patience = 1.0  # less than a driver may need to compile what the first reply takes
        waiting = [threads.submit(ask, served, "b") for _ in range(n_waiting)]
        while models._n_waiting < n_waiting:
            time.sleep(0.01)
        full = ask(served, "b")
        assert (full.status_code, full.json()["error"]["code"]) == (503, "queue_full")
        for each in waiting:
            late = each.result(30)
            assert (late.status_code, late.json()["error"]["code"]) == (503, "timeout")
        unknown = ask(served, "d")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        models._patience = None
        gate.set()
        assert ask(served, "b").status_code == 200


def test_a_model_that_cannot_be_loaded_stays_asleep_and_may_be_tried_again() -> None:
    faults = [VkmoeError("the file is damaged", "fetch it again")]

    def load() -> LLM:
        if faults:
            raise faults.pop()
        return LLM(None, ctx_size=256)

    models = Models([hosted("a"), hosted("b", load=load)])
    with listening(models) as served:
        failed = ask(served, "b")
        assert failed.status_code == 500 and "damaged: fetch it again" in failed.text
        assert [ask(served, name).status_code for name in "ab"] == [200, 200]


def until_asleep(served: Served) -> None:
    for _ in range(200):
        if served.engine.state == "asleep":
            break
        time.sleep(0.02)
    assert served.engine.state == "asleep"


def test_a_profile_that_cannot_be_kept_fails_no_swap(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    folder.mkdir()
    config = EngineConfig(ctx_size=256, expert_profile=str(folder / "a.json"))
    models = Models([hosted("a", load=lambda: LLM(None, config)), hosted("b")])
    with listening(models) as served:
        assert ask(served, "a").status_code == 200
        folder.rmdir()
        assert [ask(served, name).status_code for name in "ba"] == [200, 200]
        folder.mkdir()  # for the end


def test_a_model_that_is_idle_sleeps_until_a_request_needs_it() -> None:
    with serving(settings={"sleep_idle_seconds": 0}) as served:
        served.wait()
        until_asleep(served)  # no request ever used it
        wanted = ask(served, "any").json()["choices"]
        counts = served.client.get("/metrics").text
        until_asleep(served)
        assert served.client.get("/props").json()["is_sleeping"]
        assert served.client.get("/health").status_code == 200
        assert [slot["is_processing"] for slot in served.client.get("/slots").json()] == [False] * 2
        (model,) = served.client.get("/v1/models").json()["data"]
        assert model["meta"]["n_vocab"] == 4096 and model["status"] == {"value": "unloaded"}
        assert sums(served.client.get("/metrics").text) == sums(counts)
        assert served.engine.state == "asleep"
        again = ask(served, "any").json()["choices"]
        assert again == wanted


def test_a_model_that_is_not_to_be_kept_is_still_not_unloaded_under_a_request() -> None:
    """It leaves once its last request has ended; a later request takes that back."""
    models = Models([hosted("a"), hosted("b")])
    with listening(models) as served, ThreadPoolExecutor(2) as threads:
        body = LONG | {"model": "a", "stream": True}
        with httpx.stream("POST", served.address + TEXT, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            also = threads.submit(ask, served, "a", max_tokens=200, ignore_eos=True)
            while models.hosted[0].n_users < 2:
                time.sleep(0.01)
            models.hosted[0].keep_seconds = 0
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert also.result(60).json()["usage"]["completion_tokens"] == 200
        until_asleep(served)
        assert ask(served, "a").status_code == 200
        time.sleep(0.6)
        assert states(models)[0] == "ready", "what was asked before holds no more"


def sums(text: str) -> list[str]:
    """The counts, without rates that begin anew."""
    return [line for line in text.splitlines() if line[0] != "#" and "seconds " not in line]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
def test_all_that_needs_the_model_wakes_it(path: str) -> None:
    models = Models([hosted("a"), hosted("b")])
    body = {"content": "x", "messages": [{"role": "user", "content": "x"}], "model": "b"}
    with listening(models) as served:
        assert served.post(path, body).status_code == 200
        assert states(models) == ["asleep", "ready"]
