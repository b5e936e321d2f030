"""Keep replies to a form: a regular expression, a grammar, or one of several texts."""

from vkmoe import LLM

LIST = """
root ::= "[" number ("," number)* "]"
number ::= [1-9] [0-9]?
"""

with LLM() as llm:
    question = [{"role": "user", "content": "When?"}]
    print(llm.chat(question, regex="[0-2][0-9]:[0-5][0-9]", seed=1).content)
    print(llm.chat(question, choice=["today", "tomorrow"], seed=1).content)
    # A text that goes on, in place of a chat, takes what `constraints` makes of a form.
    numbers = llm.constraints.grammar(LIST)
    print(llm.generate("x = ", constraint=numbers, max_tokens=40, seed=1).text)
