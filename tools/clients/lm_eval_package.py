"""Checks lm-eval: texts by chats and completions, and likelihoods of texts and of token ids.

It has no streams, tools or forms.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import httpx
from lm_eval import simple_evaluate

from tools.clients.asked import MODEL

PROMPT = "import os\nimport "
ITEM = {"prompt": PROMPT, "choices": ["banana", "sys"], "best": 1}
N_TOKENS = 12


def chat(address: str) -> None:
    short = {"max_gen_toks": N_TOKENS, "until": ["\n\n\n\n"]}
    writing = {"output_type": "generate_until", "generation_kwargs": short}
    body = {"model": MODEL, "temperature": 0, "max_tokens": N_TOKENS}
    choosing = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}"}
    for kind, path, asked in (
        ("local-completions", "completions", {"prompt": PROMPT}),
        ("local-chat-completions", "chat/completions", {"messages": [_said(PROMPT)]}),
    ):
        url = f"{address}/v1/{path}"
        (choice,) = httpx.post(url, json=body | asked).json()["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert _replies(kind, url, writing, is_chat="messages" in asked) == [[text]]
    for with_ids in (True, False):
        likelihoods = _replies(
            "local-completions", f"{address}/v1/completions", choosing, tokenized_requests=with_ids
        )
        (banana, _), (sys, is_likeliest) = (each[0] for each in likelihoods)
        assert float(banana) < float(sys) < 0 and is_likeliest in (True, "True")


def _said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _replies(
    kind: str, url: str, task: dict[str, Any], is_chat: bool = False, **more: Any
) -> list[Any]:
    """Evaluate a task with one item, and return the replies that its requests had."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        Path(file.name).write_text(json.dumps(ITEM))
        whole = {
            "task": "imports",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": file.name}},
            "test_split": "test",
            "doc_to_text": "{{prompt}}",
            "doc_to_target": "{{best}}",
            "target_delimiter": "",
            **task,
        }
        found = simple_evaluate(
            model=kind,
            model_args={"model": MODEL, "base_url": url, **more},
            tasks=[whole],
            apply_chat_template=is_chat,
            bootstrap_iters=0,
        )
    assert found is not None
    (sample,) = found["samples"]["imports"]
    return list(sample["resps"])
