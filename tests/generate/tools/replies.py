"""What the tests of replies share: families, tools, and what becomes of a reply cut into pieces."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import llguidance

from vkmoe.generate.chat.template import ChatTemplate
from vkmoe.generate.tools import (
    Content,
    ReplyEvent,
    ReplyParser,
    Thought,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    ToolFamily,
)
from vkmoe.generate.tools.families import family_of_template


def tool(name: str, required: Sequence[str] = (), **properties: Any) -> dict[str, Any]:
    """A tool as OpenAI's API has it."""
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": schema},
    }


ADD = tool("add", a={"type": "number"}, b={"type": "number"}, note={"type": "string"})
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [ADD, NOW]
THINK = ("<think>", "</think>")


class DeepSeekMarks:
    """The marks of DeepSeek's models."""

    calls, calls_end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    call, call_end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    separator = "<｜tool▁sep｜>"


D = DeepSeekMarks()


def template(
    call: str, begin: str = "", between: str = "", end: str = "", thought: str = ""
) -> str:
    """A chat template that writes each call `f` with arguments `a` as `call` does."""
    first, _, last = thought.partition(" ")
    opened = f"{{{{ '{first}' + m.reasoning_content + '{last}' }}}}" if thought else ""
    return (
        "{% for m in messages %}<|turn|>{{ m.role }}\n"
        "{% if m.reasoning_content %}" + opened + "{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% set f = c.function.name %}{% set a = c.function.arguments %}"
        "{% if loop.first %}" + begin + "{% else %}" + between + "{% endif %}"
        + call + "{% if loop.last %}" + end + "{% endif %}{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    )  # fmt: skip


_LINE = "{{ '\\n' }}"  # which Jinja leaves there
_OBJECT = '{"name": "{{ f }}", "arguments": {{ a | tojson }}'
_TAGGED = (
    "<tool_call>\n<function={{ f }}>\n{% for k, v in a.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
_THINK = r"<think>\n \n</think>\n\n"
_ONE_ONLY = "{% if loop.length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
TEMPLATES = {
    "hermes": template(
        "<tool_call>\n" + _OBJECT + "}\n</tool_call>", between=_LINE, thought=_THINK
    ),
    "qwen-coder": template(_TAGGED, between=_LINE, thought=_THINK),
    "harmony": "<|channel|><|message|>",
    "mistral": template(_OBJECT + ', "id": "{{ c.id }}"}', "[TOOL_CALLS][", ", ", "]"),
    "mistral-args": template(
        "[TOOL_CALLS]{{ f }}[CALL_ID]{{ c.id }}[ARGS]{{ a | tojson }}", thought="[THINK] [/THINK]"
    ),
    "deepseek-v3": template(
        D.call + "function" + D.separator + "{{ f }}\n```json\n{{ a | tojson }}\n```" + D.call_end,
        D.calls, _LINE, D.calls_end, "<think> </think>",
    ),
    "deepseek-v3.1": template(
        D.call + "{{ f }}" + D.separator + "{{ a | tojson }}" + D.call_end,
        D.calls, "", D.calls_end, "<think> </think>",
    ),
    "llama": template(_ONE_ONLY + '{"name": "{{ f }}", "parameters": {{ a | tojson }}}'),
    "elements": template(
        "<|do|><name>{{ f }}</name>{% for k, v in a.items() %}<{{ k }}>"
        "{{ v if v is string else v | tojson }}</{{ k }}>{% endfor %}<|done|>"
    ),
    "none": "{% for m in messages %}{{ m.content }}{% endfor %}",
}  # fmt: skip


class Families(Mapping[str, ToolFamily]):
    """The families of the templates, each found when it is first asked for."""

    def __init__(self) -> None:
        self._found: dict[str, ToolFamily] = {}

    def __getitem__(self, name: str) -> ToolFamily:
        if name not in self._found:
            self._found[name] = family_of_template(ChatTemplate(TEMPLATES[name]))
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(TEMPLATES)

    def __len__(self) -> int:
        return len(TEMPLATES)


FAMILIES = Families()


class Call(NamedTuple):
    """A whole call."""

    id: str
    name: str
    arguments: str
    has_ended: bool


class Reply(NamedTuple):
    """A reply, joined."""

    content: str
    thought: str
    calls: list[Call]


def events_of(
    pieces: Iterable[str], family: ToolFamily, is_cut: bool = False, **options: Any
) -> list[ReplyEvent]:
    """The events of a reply that comes in `pieces`; ids count."""
    ids = itertools.count()
    options = {"tools": TOOLS, **options}
    parser = ReplyParser(family, **options, make_id=lambda: f"id{next(ids)}")
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish(is_cut)


def joined(events: Iterable[ReplyEvent]) -> Reply:
    """The reply that events make; calls must begin, go on and end in order."""
    content = thought = ""
    calls: list[Call] = []
    for event in events:
        match event:
            case Content(text):
                content += text
            case Thought(text):
                thought += text
            case ToolCallBegin(index, call_id, name):
                assert index == len(calls)
                assert not calls or calls[-1].has_ended
                calls.append(Call(call_id, name, "", False))
            case ToolCallArguments(index, text):
                assert index == len(calls) - 1 and not calls[-1].has_ended
                calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + text)
            case ToolCallEnd(index):
                assert index == len(calls) - 1 and not calls[-1].has_ended
                calls[-1] = calls[-1]._replace(has_ended=True)
    assert all(call.has_ended for call in calls)
    return Reply(content, thought, calls)


def in_pieces(text: str, cuts: Iterable[int]) -> list[str]:
    """`text`, cut at these places modulo its length."""
    places = sorted({cut % (len(text) + 1) for cut in cuts})
    return [text[i:j] for i, j in itertools.pairwise([0, *places, len(text)])]


def takes(grammar: str, text: str) -> bool:
    """Whether a grammar takes all of `text`, and may end there."""
    tokenizer = llguidance.LLTokenizer("byte")
    source = llguidance.grammar_from("lark", grammar)
    assert llguidance.LLMatcher.validate_grammar(source, tokenizer) == ""
    matcher = llguidance.LLMatcher(tokenizer, source)
    ids = tokenizer.tokenize_str(text)
    taken = matcher.try_consume_tokens(ids)
    return bool(taken == len(ids) and matcher.is_accepting())
