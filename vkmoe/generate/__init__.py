"""Text in, text out: tokenizer, chat template, sampler and detokenizer. Nothing here touches a GPU."""
