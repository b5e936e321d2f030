"""Chat templates of public models: each renders, and what it writes of a reply is read back."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.needs import missing
from vkmoe.errors import PromptError
from vkmoe.generate.chat.template import ChatTemplate
from vkmoe.generate.tools import ToolFamily, reply_grammar
from vkmoe.generate.tools.families import family_of_template

from .replies import events_of, joined, takes, template, tool

TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
TEXT, WORDS = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
PLACE = {"type": "object", "properties": {"lat": {"type": "number"}, "names": WORDS}}
SEARCH = tool("search", ["city"], city=TEXT, days={"type": "integer"}, exact={"type": "boolean"},
            tags=WORDS, where=PLACE, zip=TEXT)  # fmt: skip
NOW = tool("now")
AWKWARD = 'O\'Hara "x", </tool_call> \\n {"a": 1}\nline <b> & end'
ALL = {"city": "Oslo", "days": 3, "exact": True, "tags": ["a", "b c"],
       "where": {"lat": -1.5, "names": ["x"]}, "zip": "01234"}  # fmt: skip
QUESTION = "Which one?"


class Case(NamedTuple):
    """A reply: calls with their arguments, a text before them, and a thought before that."""

    calls: Sequence[tuple[str, Mapping[str, Any]]]
    text: str = ""
    thought: str = ""


CASES = {
    "every type": Case([("search", ALL)]),
    "awkward texts, like numbers and lists": Case([("search", {"city": AWKWARD, "zip": "5"})]),
    "like other types": Case([("search", {"city": "true", "tags": [], "zip": "[1]"})]),
    "no arguments": Case([("now", {})]),
    "two calls": Case([("search", ALL), ("now", {})]),
    "two calls, the first without arguments": Case([("now", {}), ("search", {"city": "x"})]),
    "after a text": Case([("search", ALL)], "I look."),
    "after a thought": Case([("search", ALL)], "", "Well, well."),
    "after both": Case([("search", {"city": AWKWARD}), ("now", {})], "I look.", "Well\n\nwhy <b>?"),
    "no call": Case([], "I know <b> {x}.", "Well."),
}

CONSTRAINED = ("two calls",)

# What the collection of llama.cpp has (docs/server.md).
N_COLLECTION, N_SHARED = 70, 13
WITHOUT_TOOLS = {
    "HuggingFaceTB-SmolLM3-3B.jinja",
    "google-gemma-2-2b-it.jinja",
    "llama-cpp-rwkv-world.jinja",
    "microsoft-Phi-3.5-mini-instruct.jinja",
}


def sources_of_collection() -> dict[str, str]:
    """The templates of llama.cpp in the source distribution that the build fetches."""
    given = os.environ.get("VKMOE_GGML_SDIST")
    build = Path(__file__).resolve().parents[3] / "build"
    archives = [Path(given)] if given else sorted(build.glob("*/ggml/llama_cpp_python-*.tar.gz"))
    if not archives or not archives[-1].exists():
        missing("the build's source distribution of llama-cpp-python is not there")
    found = {}
    with tarfile.open(archives[-1]) as archive:
        for member in archive:
            path = Path(member.name)
            if path.suffix == ".jinja" and path.parent.name == "templates":
                file = archive.extractfile(member)
                assert file is not None
                found[path.name] = file.read().decode()
    return found


class Rendered(NamedTuple):
    """What a template writes of a case: the reply, and whether the prompt opened its thought."""

    text: str
    in_thought: bool
    wanted: tuple[str, str, list[tuple[str, Any]]]


class Written:
    """A template, and the replies that it writes."""

    def __init__(self, source: str) -> None:
        self.chat = ChatTemplate(source, TOKENS)
        self.family = family_of_template(self.chat)
        self._asked = [{"role": "user", "content": QUESTION}]
        self._prompt = self._render(self._asked, True)
        self.offers_tools = self._prompt != self.chat.render(self._asked)

    def _render(self, messages: list[Any], is_prompt: bool) -> str:
        text = self.chat.render(messages, is_prompt, tools=[SEARCH, NOW])
        return text if is_prompt else text[text.rfind(QUESTION) :]

    def reply(self, case: Case) -> Rendered | None:
        """What it writes of a case, as far as it does; None where it refuses it."""
        calls = [
            {"id": f"call0000{i}", "type": "function", "function": {"name": n, "arguments": a}}
            for i, (n, a) in enumerate(case.calls)
        ]
        message: dict[str, Any] = {"role": "assistant", "content": case.text}
        message |= {"tool_calls": calls} if calls else {}
        message |= {"reasoning_content": case.thought} if case.thought else {}
        try:
            whole = self._render([*self._asked, message], False)
        except PromptError:
            return None
        shown = [call for call in case.calls if call[0] in whole]
        if not shown and calls:
            return None
        text, in_thought = self._cut(whole)
        is_open = case.thought in whole and self.family.begins_in_thought(self._prompt)
        thought = self.family.thought
        if case.thought and is_open and thought is not None and thought[0] not in text:
            in_thought = True
        found = [part if part in whole else "" for part in (case.text, case.thought)]
        return Rendered(text, in_thought, (found[0], found[1], shown))

    def _cut(self, whole: str) -> tuple[str, bool]:
        """The reply in a rendering, and whether a thought was open: what follows the prompt.

        Where it does not follow the whole prompt, it follows the end of it, or all but a thought
        that the prompt opens, or else the text that both share.
        """
        prompt, thought = self._prompt[self._prompt.rfind(QUESTION) :], self.family.thought
        if whole.startswith(prompt):
            return whole[len(prompt) :], self.family.begins_in_thought(prompt)
        closed = prompt.rstrip().removesuffix(thought[0]) if thought else prompt
        if whole.startswith(closed):
            return whole[len(closed) :], False
        for begin in range(len(QUESTION), len(prompt) - 8):
            if whole.startswith(prompt[begin:], len(QUESTION)):
                n_shared = len(QUESTION) + len(prompt) - begin
                return whole[n_shared:], self.family.begins_in_thought(prompt)
        pairs = enumerate(zip(prompt, whole, strict=False))
        n_shared = next((i for i, (one, other) in pairs if one != other), len(prompt))
        tag = whole.rfind("<", 0, n_shared)
        if tag >= 0 and ">" not in whole[tag:n_shared]:
            n_shared = tag
        return whole[n_shared:], self.family.begins_in_thought(whole[:n_shared])

    def without_end(self, reply: str) -> str:
        """A reply without what ends its turn, which models have a token for."""
        ends = ["<|call|>"] if self.family.is_harmony else [*self.family.form.ends]
        for end in (*ends, self.family.form.header, *ends):
            reply = reply.rstrip().removesuffix(end or "\n")
        return reply.rstrip()


def read(pieces: Sequence[str], family: ToolFamily, **options: Any) -> tuple[str, str, list[Any]]:
    content, thought, calls = joined(events_of(pieces, family, tools=[SEARCH, NOW], **options))
    return content, thought, [(call.name, call.arguments) for call in calls]


def check_parsed(written: Written, given: Rendered, step: int) -> None:
    """Whole, letter by letter, and cut off anywhere: never text of a call in the answer."""
    options: dict[str, Any] = {"in_thought": given.in_thought}
    content, thought, calls = read([given.text], written.family, **options)
    parts = tuple(part.strip() for part in (content, thought))
    if given.wanted[0] and not content:  # some have one place for both
        assert thought.endswith(given.wanted[0]) and thought.startswith(given.wanted[1])
    else:
        assert parts == tuple(given.wanted[:2])
    assert [(name, json.loads(text)) for name, text in calls] == given.wanted[2]
    assert read(list(given.text), written.family, **options) == (content, thought, calls)
    options["streams"] = True
    for end in range(len(given.text) % step, len(given.text), step):
        pieces = [given.text[:end], given.text[end:]]
        assert read(pieces, written.family, **options) == (content, thought, calls)
        got = read(pieces[:1], written.family, is_cut=True, **options)
        assert content.startswith(got[0].rstrip()) and thought.startswith(got[1].rstrip())
        for (name, text), (right, whole) in zip(got[2], calls, strict=False):
            assert name == right and whole.startswith(text)


def check_constrained(written: Written, given: Rendered, case: Case) -> None:
    """What is demanded may be written, and nothing else may."""
    reply = written.without_end(given.text)

    def grammar(*tools: Any) -> str:
        return reply_grammar(
            written.family,
            lambda schema: f"%json {json.dumps(schema)}",
            tools,
            in_thought=given.in_thought,
        )

    assert takes(grammar(SEARCH, NOW), reply)
    for wrong in ("I know.", reply + " Well.", reply.replace(case.calls[0][0], "other")):
        assert not takes(grammar(SEARCH, NOW), wrong)
    named = {name for name, _ in given.wanted[2]}
    assert takes(grammar(SEARCH), reply) == (named == {"search"})


def fault(written: Written, step: int) -> str:
    """What is wrong with what is read of a template's replies; "" for nothing.

    Each is cut at every `step`-th letter. Grammars are tried with few where the step is long.
    """
    if written.offers_tools is False and not written.family.has_calls:
        return "no tools"
    n_calls = 0
    for name, case in CASES.items():
        given = written.reply(case)
        if given is None:
            continue
        try:
            check_parsed(written, given, step)
            if case.calls and not given.wanted[0] and (step < 9 or name in CONSTRAINED):
                check_constrained(written, given, case)
        except AssertionError as error:
            return f"{name}: {error}"
        n_calls += len(given.wanted[2])
    return "" if n_calls else "no calls"


def faults(sources: Mapping[str, str], step: int) -> dict[str, str]:
    found = {name: fault(Written(source), step) for name, source in sources.items()}
    return {name: why for name, why in found.items() if why}


STEPS = [251, pytest.param(3, marks=pytest.mark.full)]


@pytest.mark.shared
@pytest.mark.parametrize("step", STEPS)
def test_templates_of_models_make_the_round_trip(shared: Path, step: int) -> None:
    files = (shared / "templates").glob("*.jinja")
    sources = {path.name: path.read_text(encoding="utf-8") for path in files}
    assert len(sources) == N_SHARED
    assert faults(sources, step) == {}


@pytest.mark.parametrize("step", STEPS)
def test_the_collection_makes_the_round_trip(step: int) -> None:
    sources = sources_of_collection()
    assert len(sources) == N_COLLECTION
    found = faults(sources, step)
    assert {name for name, why in found.items() if why == "no tools"} == WITHOUT_TOOLS
    assert found.keys() == WITHOUT_TOOLS
    assert N_COLLECTION - len(found) == 66


def pairs(before: str, behind: str) -> str:
    """Each argument, its value between these texts; `k` is its key."""
    value = "{{ v if v is string else v | tojson }}"
    return "{% for k, v in a.items() %}" + before + value + behind + "{% endfor %}"


OBJECT = '{"name": "{{ f }}", "x": {{ a | tojson }}}'
KIND = "{{ 'text' if v is string else 'json' }}"
# Ways to write a call that no model has, each between marks of its own.
STYLES = {
    "an object": '<@run>{"do": "{{ f }}", "with": {{ a | tojson }}}</@run>',
    "an object in an object": '<@run>{"kind": "f", "f": ' + OBJECT + "}</@run>",
    "a name as a key": '!!{"{{ f }}": {{ a | tojson }}}!!',
    "arguments before the name": '<@run>{"with": {{ a | tojson }}, "name": "{{ f }}"}</@run>',
    "a name before": "<@run>{{ f }}<@with>{{ a | tojson }}<@/run>",
    "a name in brackets": "[RUN]({{ f }}) {{ a | tojson }}[/RUN]",
    "an id before": "<@run id={{ c.id }}>{{ f }}: {{ a | tojson }}</@run>",
    "a number behind": "<@run {{ f }} #{{ loop.index0 }}>{{ a | tojson }}</@run>",
    "attributes": '<@do it="{{ f }}">' + pairs('<@p n="{{ k }}">', "</@p>") + "</@do>",
    "lines": "<@do {{ f }}>\n" + pairs("<@k>{{ k }}</@k>\n<@v>\n", "\n</@v>\n") + "</@do>",
    "elements": "<@do><@name>{{ f }}</@name>" + pairs("<{{ k }}>", "</{{ k }}>") + "</@do>",
    "types": "<@do {{ f }}>" + pairs('<@p {{ k }} is="' + KIND + '">', "</@p>") + "</@do>",
}


@pytest.mark.parametrize("style", STYLES)
def test_forms_that_no_model_has_make_the_round_trip(style: str) -> None:
    call = STYLES[style]
    alone = template(call, between="{{ '\\n' }}", thought="<@hm> </@hm>")
    within = template(call, "<@all>", "", "</@all>", r"<@hm>\n \n</@hm>\n\n")
    for source in (alone, within):
        assert fault(Written(source.replace("<@", "<|").replace("</@", "</")), 17) == ""
