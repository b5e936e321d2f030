"""Have a model answer with JSON that a schema describes."""

import json

from vkmoe import LLM

BOOK = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 20},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2030},
        "language": {"enum": ["English", "French", "German"]},
    },
    "required": ["title", "year", "language"],
}

with LLM() as llm:
    question = [{"role": "user", "content": "Name a book."}]
    result = llm.chat(question, json_schema=BOOK, max_tokens=100, seed=1)
    book = json.loads(result.content)
    print(book["title"], book["year"], book["language"])
