"""Holds the chat templates that have a name of their own, for files without one or a wrong one.

They write messages alone, no tools.
"""

from __future__ import annotations


def _turns(turn: str, opening: str) -> str:
    """Write a template: how a message is written, and how the next one of the model begins."""
    each = "{% for message in messages %}" + turn + "{% endfor %}"
    return each + "{% if add_generation_prompt %}" + opening + "{% endif %}"


NAMED_TEMPLATES = {
    "chatml": _turns(
        "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n",
        "<|im_start|>assistant\n",
    ),
    "gemma": _turns(
        "<start_of_turn>{{ 'model' if message.role == 'assistant' else 'user' }}\n"
        "{{ message.content | trim }}<end_of_turn>\n",
        "<start_of_turn>model\n",
    ),
    "llama3": _turns(
        "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
        "{{ message.content | trim }}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
}
