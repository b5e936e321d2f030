"""Let a model continue a text."""

from vkmoe import LLM

with LLM() as llm:  # the demo model, which writes Python; yours: LLM("model.gguf")
    result = llm.generate("def main():", max_tokens=32, temp=0.7, seed=1)
    print(result.text)
    print(f"ended by {result.finish_reason}, {result.statistics.decode_rate:.0f} tokens/s")
