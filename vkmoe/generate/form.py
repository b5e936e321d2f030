"""This module says what form a reply is to have, before that is compiled for a vocabulary."""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

from vkmoe.generate.constraint import Constraint, Constraints

FormKind = Literal["json", "regex", "grammar", "choice"]


class Form(NamedTuple):
    """Holds the form of a reply."""

    kind: FormKind
    value: Any  # a schema, a regular expression, a grammar (GBNF or Lark), texts

    def constraint(self, constraints: Constraints) -> Constraint:
        """Return what keeps a whole reply to it. Raises VkmoeError."""
        if self.kind == "json":
            return constraints.json_schema(self.value)
        if self.kind == "regex":
            return constraints.regex(self.value)
        if self.kind == "grammar":
            return constraints.grammar(self.value)
        return constraints.lark(f"start: {self.in_lark(constraints)}")

    def in_lark(self, constraints: Constraints, lenient: bool = False) -> str:
        """Write it as a Lark grammar wants it amid its rules. Raises VkmoeError."""
        if self.kind == "json":
            return constraints.json_in_lark(self.value, lenient)
        if self.kind == "choice":
            return f"({' | '.join(json.dumps(each, ensure_ascii=False) for each in self.value)})"
        if self.kind == "regex":
            return constraints.regex_in_lark(self.value)
        return constraints.grammar_in_lark(self.value)
