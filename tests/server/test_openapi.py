"""The document at /openapi.json is what the server does: requests made from it, right and wrong,
are answered with the statuses, types and fields that it names.
"""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode, checks
from schemathesis.schemas import APIOperation

from tests.server.conftest import Served
from vkmoe.server.app import ANSWERS, OPEN_PATHS
from vkmoe.server.openapi import document

DOCUMENT = document(ANSWERS, "0", OPEN_PATHS)
SCHEMA: Any = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS: list[APIOperation[Any, Any, Any, Any]] = [
    found.ok() for found in SCHEMA.get_all_operations()
]


def not_a_failure(context: Any, response: Any, case: Case[Any]) -> bool | None:
    """No status of 500 and above, unless the server says that it does not do this (501)."""
    if response.status_code == 501 and "501" in case.operation.definition.raw["responses"]:
        return None
    return checks.not_a_server_error(context, response, case)


CHECKS: list[Any] = [
    not_a_failure,
    *(
        check
        for check in checks.CHECKS.get_all()
        if check.__name__
        in (
            "status_code_conformance",
            "content_type_conformance",
            "response_schema_conformance",
            "negative_data_rejection",
        )
    ),
]
N_EXAMPLES = 15  # of each kind
MOST_TOKENS = 3
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
OLLAMA = ("/api/chat", "/api/generate")
# Where a request need not say how long its reply may be.
ENDLESS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/chat/completions"),
    *("/completion", "/completions", "/responses", "/infill"),
)
FINITE = [each for each in OPERATIONS if each.path != "/experts/stream"]


def test_the_document_has_every_answer_with_a_summary() -> None:
    SCHEMA.validate()
    paths = {(each.method.upper(), each.path) for each in OPERATIONS}
    assert paths == {(method, path.replace(":path}", "}")) for method, path, _ in ANSWERS}
    for operation in OPERATIONS:
        summary = operation.definition.raw["summary"]
        assert summary.endswith(".") and "\n" not in summary
    chat = DOCUMENT["components"]["schemas"]["answer_chat"]
    assert chat["required"] == ["messages"] and "temperature" in chat["properties"]


def test_answers_have_names_of_their_own() -> None:
    """Schemas are called by them."""
    answers = {answer for _, _, answer in ANSWERS}
    assert len({answer.__name__ for answer in answers}) == len(answers)


def test_the_server_sends_it(server: Served) -> None:
    found = server.client.get("/openapi.json").json()
    assert {**found, "info": {}} == {**DOCUMENT, "info": {}}


@pytest.mark.parametrize(
    ("operation", "mode"),
    [
        *((each, GenerationMode.POSITIVE) for each in FINITE),
        *((each, GenerationMode.NEGATIVE) for each in FINITE if each.body),
    ],
    ids=lambda each: getattr(each, "label", None) or each.value,
)
@pytest.mark.sample(10)
def test_answers_are_those_of_the_document(server: Served, operation: Any, mode: Any) -> None:
    """Requests that it allows, and those that it does not."""
    settled = settings(
        max_examples=N_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )

    @settled
    @given(operation.as_strategy(mode))
    def ask(case: Case[Any]) -> None:
        _keep_short(case)
        case.call_and_validate(base_url=server.address, checks=CHECKS, timeout=60)

    ask()
    assert not any(slot["is_processing"] for slot in server.client.get("/slots").json())


def _keep_short(case: Case[Any]) -> None:
    """Let replies have few tokens, where the request would have been one for more."""
    body = case.body
    if isinstance(body, dict) and case.path in OLLAMA:
        if body.get("options") is None:
            body["options"] = {}
        _shorten(body["options"], ("num_predict",), (None, -1, -2))
    elif isinstance(body, dict) and (case.path.startswith("/v1/") or case.path in ENDLESS):
        _shorten(body, LENGTHS, (None, -1) if case.path in ENDLESS else ())


def _shorten(fields: Any, names: tuple[str, ...], endless: tuple[int | None, ...]) -> None:
    for name in names if isinstance(fields, dict) else ():
        asked = fields.get(name)
        is_endless = asked in endless and type(asked) in (int, type(None))
        if is_endless or (type(asked) is int and asked > MOST_TOKENS):
            fields[name] = MOST_TOKENS
