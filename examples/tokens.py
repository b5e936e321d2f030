"""Turn text into tokens and back, and see the prompt that a chat becomes."""

from vkmoe import LLM

with LLM() as llm:
    tokens = llm.tokenize("def main():", add_special=False)
    print(tokens)
    print([llm.detokenize([token]) for token in tokens])
    assert llm.detokenize(tokens) == "def main():"
    print(repr(llm.apply_template([{"role": "user", "content": "Hello"}])))
    print(f"the vocabulary has {llm.spec.n_vocab} tokens")
