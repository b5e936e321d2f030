"""Find out which of several texts a model takes for the likeliest, by their log-probabilities."""

from vkmoe import LLM

PROMPT = "import"
CHOICES = [" os\n", " banana\n", " sys\n"]

with LLM() as llm:
    n_prompt = len(llm.tokenize(PROMPT))
    texts = [PROMPT + choice for choice in CHOICES]
    # Nothing is generated: how likely each token of a text is follows from those before it.
    results = llm.generate(texts, scores_prompt=True, n_logprobs=0, max_tokens=0)
    for choice, result in zip(CHOICES, results, strict=True):
        # The first token of a text has none before it, and so no entry.
        of_choice = [each.chosen for each in result.prompt_logprobs[n_prompt - 1 :]]
        print(f"{choice!r:12} {sum(of_choice):7.2f} over {len(of_choice)} tokens")
