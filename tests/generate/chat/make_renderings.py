"""Render chat templates with Hugging Face transformers and store what came out.

    pip install transformers jinja2
    python tests/generate/chat/make_renderings.py path/to/shared/templates

Writes renderings.json beside this file: the inputs, and per template the text. The templates
themselves are not stored.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

DATE = "2025-01-02"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
HELLO = [{"role": "user", "content": 'Say "Hi" to <b>{{ x }}</b> ü\nplease '}]
THREE_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"},
    {"role": "user", "content": "And 3+3?"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add <two> numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number", "description": "é"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}
CALL = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1, "b": 2}},
}
SECOND_CALL = {
    "id": "call67890",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 3, "b": 4, "note": "é <x>"}},
}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "call12345", "content": "3"}
TOOL_TURNS = [
    {"role": "user", "content": "1+2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    RESULT,
]
SEVERAL_CALLS = [
    {"role": "system", "content": "Use the tool."},
    {"role": "user", "content": "1+2? 3+4?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, SECOND_CALL]},
    RESULT,
    {"role": "tool", "name": "add", "tool_call_id": "call67890", "content": "7"},
    {"role": "assistant", "content": "3 and 7."},
    {"role": "user", "content": "Thanks"},
]
WITH_REASONS = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4", "reasoning_content": "two\ntwos", "thinking": "hm"},
    {"role": "user", "content": "Sure?"},
]
MANY_TURNS = [
    {"role": "user", "content": "  Hello  "},
    {"role": "assistant", "content": "Hi!\n"},
    {"role": "user", "content": "你好 👋🏽\n\n```py\nprint(1)\n```"},
    {"role": "assistant", "content": "<think>why\nnot</think>Fine."},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": "<|im_end|> is a mark"},
    {"role": "user", "content": "Bye {{ now }} {% raw %}"},
]
SYSTEM = [
    {"role": "system", "content": " Be <brief>.\nAlways. "},
    {"role": "user", "content": "Hi"},
]
DEVELOPER = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
CASES: dict[str, dict[str, Any]] = {
    "one message": {"messages": HELLO},
    "no generation prompt": {"messages": HELLO, "add_generation_prompt": False},
    "one message, thinking on": {"messages": HELLO, "enable_thinking": True},
    "one message, thinking off": {"messages": HELLO, "enable_thinking": False},
    "a system message": {"messages": SYSTEM},
    "a developer message": {"messages": DEVELOPER},
    "only a system message": {"messages": SYSTEM[:1]},
    "three turns": {"messages": THREE_TURNS},
    "thinking on": {"messages": THREE_TURNS, "enable_thinking": True},
    "thinking off": {"messages": THREE_TURNS, "enable_thinking": False},
    "many turns": {"messages": MANY_TURNS},
    "many turns, no generation prompt": {"messages": MANY_TURNS, "add_generation_prompt": False},
    "many turns, thinking on": {"messages": MANY_TURNS, "enable_thinking": True},
    "many turns, thinking off": {"messages": MANY_TURNS, "enable_thinking": False},
    "an answer with its reasons": {"messages": WITH_REASONS},
    "the answer is last": {"messages": WITH_REASONS[:2], "add_generation_prompt": False},
    "DeepSeek thinks": {"messages": MANY_TURNS, "thinking": True},
    "DeepSeek does not think": {"messages": MANY_TURNS, "thinking": False},
    "much reasoning": {"messages": SYSTEM, "reasoning_effort": "high"},
    "little reasoning": {"messages": THREE_TURNS, "reasoning_effort": "low"},
    "another identity": {"messages": HELLO, "model_identity": "You are a <test>."},
    "built-in tools": {"messages": SYSTEM, "builtin_tools": ["browser", "python"]},
    "another date": {"messages": SYSTEM, "date_string": "1 Apr 2020"},
    "a tool, offered": {"messages": SYSTEM, "tools": [TOOL]},
    "a tool, called": {"messages": TOOL_TURNS, "tools": [TOOL]},
    "a tool, called, thinking on": {
        "messages": TOOL_TURNS,
        "tools": [TOOL],
        "enable_thinking": True,
    },
    "tools before the system message": {
        "messages": SYSTEM,
        "tools": [TOOL],
        "tools_in_user_message": False,
    },
    "several calls": {"messages": SEVERAL_CALLS, "tools": [TOOL]},
    "two users in a row": {"messages": [*HELLO, *HELLO]},
}


class _FixedDate(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _FixedDate:
        return cls.fromisoformat(DATE)


def rendered(source: str, case: dict[str, Any]) -> str | None:
    """What transformers makes of it, or None where the template raises."""
    from transformers.utils import chat_template_utils  # type: ignore[import-not-found,unused-ignore]

    chat_template_utils.datetime = _FixedDate
    options = {"add_generation_prompt": True, **TOKENS, **case}
    messages = options.pop("messages")
    try:
        texts, _ = chat_template_utils.render_jinja_template(
            [messages], chat_template=source, **options
        )
    except Exception as error:  # whatever a template raises
        print(f"  raises {error!r}")
        return None
    return str(texts[0])


def main() -> None:
    """Render every case with every template of the folder given."""
    texts: dict[str, dict[str, str | None]] = {}
    for path in sorted(Path(sys.argv[1]).glob("*.jinja")):
        print(path.name)
        texts[path.name] = {name: rendered(path.read_text(), case) for name, case in CASES.items()}
    document = {"date": DATE, "tokens": TOKENS, "cases": CASES, "texts": texts}
    target = Path(__file__).with_name("renderings.json")
    target.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
