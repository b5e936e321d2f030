"""Print a reply while the model writes it."""

from vkmoe import LLM

with LLM() as llm:
    for piece in llm.stream("class Queue:", max_tokens=48, stop="\n\n\n", seed=1):
        print(piece.text, end="", flush=True)
print()
