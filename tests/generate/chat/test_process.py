"""Templates that would never end, or take all memory: one clear error, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from vkmoe.errors import PromptError, UnsupportedModelError
from vkmoe.generate.chat.process import TemplateFailed, TemplateProcess
from vkmoe.generate.chat.template import ChatTemplate

HELLO = [{"role": "user", "content": "Hi"}]
LOOPS = "{% for i in range(99999) %}" * 5 + "{% endfor %}" * 5
MACRO = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}"
POWER = "{% set n = messages | length %}{{ (n + 8) ** ((n + 8) ** (n + 8)) }}"
Started = list["subprocess.Popen[bytes]"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """The processes that a test starts."""
    processes: Started = []
    popen: Callable[..., Any] = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> Any:
        processes.append(popen(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return processes


@pytest.mark.parametrize("endless", [LOOPS, MACRO, POWER])
def test_a_rendering_that_never_ends_is_ended(endless: str, started: Started) -> None:
    source = "{% if spin %}" + endless + "{% else %}fine{% endif %}"
    chat = ChatTemplate(source, seconds=0.5)
    n_threads, began = threading.active_count(), time.monotonic()
    with pytest.raises(PromptError, match=r"longer than 0\.5 seconds") as caught:
        chat.render(HELLO, spin=True)
    assert time.monotonic() - began < 5
    assert "\n" not in str(caught.value)
    assert started[0].returncode == -signal.SIGALRM  # nothing spins on
    assert threading.active_count() == n_threads
    assert chat.render(HELLO) == "fine"
    assert len(started) == 2


def test_a_template_that_never_compiles_is_refused(started: Started) -> None:
    with pytest.raises(UnsupportedModelError, match=r"longer than 0\.5 seconds"):
        ChatTemplate("{{ 9 ** (9 ** 9) }}", seconds=0.5)  # computed by Jinja's compiler
    assert started[0].returncode is not None


def test_a_rendering_cannot_take_all_memory() -> None:
    doubling = "{% set ns = namespace(s='x') %}{% for i in range(40) %}"
    doubling += "{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
    growing = "{% set l = ['x' * 99999] %}{% for i in range(99999) %}{% for j in range(99999) %}"
    growing += "{% set _ = l.append(l[0] ~ j) %}{% endfor %}{% endfor %}"
    for source in (doubling, growing, "{{ 'x'.ljust(10 ** 11) }}"):
        with pytest.raises(PromptError, match=r"MemoryError|process ended|longer than"):
            ChatTemplate(source).render(HELLO)


def test_a_process_that_was_killed_is_started_again(started: Started) -> None:
    process = TemplateProcess("{{ x }}")
    started[0].kill()
    with pytest.raises(TemplateFailed, match="process ended with status -9"):
        process.render({"x": 1}, "2025-01-02")
    assert process.render({"x": 2}, "2025-01-02") == "2"


def test_an_interrupted_rendering_does_not_answer_the_next_one(started: Started) -> None:
    process = TemplateProcess(
        "{% if x == 1 %}" + LOOPS.replace("99999", "9999") + "{% endif %}{{ x }}"
    )
    main = threading.get_ident()
    threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        process.render({"x": 1}, "2025-01-02")
    assert started[0].returncode == -signal.SIGKILL
    assert process.render({"x": 2}, "2025-01-02") == "2"


def test_the_process_ends_with_the_template(started: Started) -> None:
    chat = ChatTemplate("x")
    assert started[0].poll() is None
    del chat
    gc.collect()
    assert started[0].returncode is not None


def test_threads_get_their_own_answers() -> None:
    chat = ChatTemplate("{{ x }}")
    wrong: list[int] = []

    def ask(x: int) -> None:
        wrong.extend(x for _ in range(20) if chat.render(HELLO, x=x) != str(x))

    threads = [threading.Thread(target=ask, args=(x,)) for x in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_template_sees_nothing_of_this_process() -> None:
    """Ctrl-C at a terminal goes to a whole group of processes: it must not end the worker."""
    process = TemplateProcess("x")
    inner = process._process
    assert inner is not None
    assert os.getpgid(inner.pid) != os.getpgid(0)
