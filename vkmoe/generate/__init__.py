"""Text in, text out: tokenizer, chat template, sampler and detokenizer. No GPU is touched here."""
