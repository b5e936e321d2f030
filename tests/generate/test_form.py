"""Forms amid a grammar, as they stand behind a thought, allow what they allow alone."""

from __future__ import annotations

import pytest

from tests.generate.conftest import tiny_metadata, tokenizer_of
from vkmoe.errors import UsageError
from vkmoe.generate.constraint import Constraint, Constraints
from vkmoe.generate.form import Form

TOKENIZER = tokenizer_of(tiny_metadata())
CONSTRAINTS = Constraints(TOKENIZER)


def allows(constraint: Constraint, text: str) -> bool:
    """Say whether a reply may be this text, and end there."""
    state = constraint.begin()
    try:
        goes_on = True
        for token in TOKENIZER.encode_plain(text):
            allowed = state.allowed() if goes_on else None
            if allowed is None or not allowed[token]:
                return False
            goes_on = state.accept(token)
        allowed = state.allowed() if goes_on else None
        return allowed is None or any(allowed[end] for end in TOKENIZER.end_ids)
    finally:
        state.close()


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (Form("json", {"enum": [1, 2]}), ["1", "2"], ["3", ""]),
        (Form("choice", ['a"b', "c\n/"]), ['a"b', "c\n/"], ["a", "c"]),
        (Form("regex", "a/b|[/x]\\/\n"), ["a/b", "x/\n", "//\n"], ["ab", "x/"]),
        (Form("grammar", 'root ::= x "}"\nx ::= [0-9]{2} | "{"'), ["12}", "{}"], ["1}", "}"]),
        (Form("grammar", 'start: B "-" B\nB: /b+/'), ["b-b", "bb-b"], ["b-", "-"]),
    ],
    ids=lambda each: each.kind if isinstance(each, Form) else None,
)
def test_a_form_behind_a_thought_is_the_form_alone(
    form: Form, right: list[str], wrong: list[str]
) -> None:
    alone = form.constraint(CONSTRAINTS)
    behind = CONSTRAINTS.lark(f'start: "hm" answer\nanswer: {form.in_lark(CONSTRAINTS)}\n')
    for text in right:
        assert allows(alone, text) and allows(behind, f"hm{text}")
    for text in wrong:
        assert not allows(alone, text) and not allows(behind, f"hm{text}")


@pytest.mark.parametrize("grammar", ["", "root ::= (", "x ::= y", "root ::= " + "(" * 5000])
def test_a_grammar_that_cannot_be_read_is_one_clear_error(grammar: str) -> None:
    with pytest.raises(UsageError, match="the grammar"):
        CONSTRAINTS.grammar(grammar)
