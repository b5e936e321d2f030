"""Render chat templates with Hugging Face transformers and store what came out.

    pip install transformers jinja2
    python tests/generate/make_chat_fixtures.py path/to/shared/templates

Writes chat_renderings.json beside this file: the inputs, and per template the text. The templates
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
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TOOL_TURNS = [
    {"role": "user", "content": "1+2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
]
CASES: dict[str, dict[str, Any]] = {
    "one message": {"messages": HELLO},
    "no generation prompt": {"messages": HELLO, "add_generation_prompt": False},
    "three turns": {"messages": THREE_TURNS},
    "thinking off": {"messages": THREE_TURNS, "enable_thinking": False},
    "a tool, called": {"messages": TOOL_TURNS, "tools": [TOOL]},
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
    target = Path(__file__).with_name("chat_renderings.json")
    target.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
