"""This package has text go in and out: tokenizer, chat, sampler, detokenizer. It touches no GPU."""
