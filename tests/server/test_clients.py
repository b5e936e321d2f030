"""The official clients of OpenAI and Anthropic are served, with tools and forms, on a model that
writes as Qwen does: its template and marks on the demo model, which can be made to call.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.server.calls import ASK, TOOL, WEATHER, is_asked, with_template
from tests.server.conftest import Served, serving
from vkmoe.llm import LLM


@pytest.fixture(scope="module")
def client(calling: Served) -> Iterator[openai.OpenAI]:
    address = f"{calling.address}/v1"
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def claude(calling: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=calling.address, api_key="none", max_retries=0) as made:
        yield made


NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_that_is_demanded_comes(client: openai.OpenAI, choice: Any) -> None:
    """At once and streamed, with arguments by their schema."""
    common: Any = {"model": "demo", "messages": ASK, "tools": [TOOL], "tool_choice": choice}
    common |= {"parallel_tool_calls": False, "seed": 1, "max_tokens": 300}
    done = client.chat.completions.create(**common).choices[0]
    assert done.finish_reason == "tool_calls" and done.message.tool_calls
    (call,) = done.message.tool_calls
    assert call.type == "function" and call.function.name == "weather"
    assert call.id.startswith("call_") and is_asked(call.function.arguments)
    chunks = [each.choices[0] for each in client.chat.completions.create(**common, stream=True)]
    assert chunks[-1].finish_reason == "tool_calls"
    deltas = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert deltas[0].function and deltas[0].function.name == "weather" and deltas[0].id
    parts = [each.function.arguments or "" for each in deltas if each.function]
    assert "".join(parts) == call.function.arguments
    assert not any(chunk.delta.content for chunk in chunks)


def test_an_answer_of_a_form_or_calls_come_where_both_are_allowed(
    calling: Served, client: openai.OpenAI
) -> None:
    """At once and streamed, as the model likes; here it is made to like one or the other."""
    mark, brace = (
        calling.post("/tokenize", {"content": text}).json()["tokens"][0] for text in ("<", "{")
    )
    form: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
    common: Any = {"model": "demo", "messages": ASK, "tools": [TOOL], "response_format": form}
    common |= {"parallel_tool_calls": False, "seed": 2, "max_tokens": 300}
    for token, is_call in ((mark, True), (brace, False)):
        asked = {**common, "logit_bias": {str(token): 100}}
        choice = client.chat.completions.create(**asked).choices[0]
        chunks = list(client.chat.completions.create(**asked, stream=True))
        content = "".join(each.choices[0].delta.content or "" for each in chunks)
        if is_call:
            assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
            (call,) = choice.message.tool_calls
            assert call.type == "function" and is_asked(call.function.arguments)
            assert not choice.message.content and not content
        else:
            assert choice.finish_reason == "stop" and not choice.message.tool_calls
            assert is_asked(choice.message.content or "") and content == choice.message.content
    cannot = {"name": "w", "schema": {"not": {"type": "string"}}}
    with pytest.raises(openai.BadRequestError):
        unkept: Any = {"type": "json_schema", "json_schema": cannot}
        client.chat.completions.create(**{**common, "response_format": unkept})
    # Calls that are demanded leave no room for another answer; with none, the form is kept.
    none = client.chat.completions.create(**common, tool_choice="none").choices[0]
    assert is_asked(none.message.content or "") and not none.message.tool_calls
    only = client.chat.completions.create(**common, tool_choice="required").choices[0]
    assert only.message.tool_calls


@pytest.mark.parametrize("n_tokens", [4, 12, 25])
def test_a_call_that_was_cut_is_no_text(
    client: openai.OpenAI, claude: anthropic.Anthropic, n_tokens: int
) -> None:
    common: Any = {"model": "demo", "messages": ASK, "max_tokens": n_tokens, "seed": 1}
    common |= {"tools": [TOOL], "tool_choice": "required"}
    choice = client.chat.completions.create(**common).choices[0]
    assert choice.finish_reason == "length"
    assert not choice.message.content and not choice.message.tool_calls
    chunks = [each.choices[0] for each in client.chat.completions.create(**common, stream=True)]
    assert chunks[-1].finish_reason == "length"
    assert not any(chunk.delta.content for chunk in chunks)
    asked: Any = {"name": "weather", "input_schema": WEATHER}
    common |= {"tools": [asked], "tool_choice": {"type": "any"}}
    found = claude.messages.create(**{n: v for n, v in common.items() if n != "seed"})
    assert found.stop_reason == "max_tokens" and found.content == []


def test_no_tool_is_called_that_is_not_to_be(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model="demo", messages=ASK, tools=[TOOL], tool_choice="none", max_tokens=20, temperature=0
    )
    plain = client.chat.completions.create(model="demo", messages=ASK, max_tokens=20, temperature=0)
    assert done.choices[0].message.content == plain.choices[0].message.content
    assert done.usage and plain.usage and done.usage.prompt_tokens == plain.usage.prompt_tokens


def test_calls_and_results_of_earlier_turns_are_in_the_prompt(calling: Served) -> None:
    call = {"id": "call_1", "type": "function"}
    function = {"name": "weather", "arguments": '{"city": "Rome", "days": 1}'}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [{**call, "function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    body = {"messages": messages, "tools": [TOOL]}
    prompt = calling.post("/apply-template", body).json()["prompt"]
    assert '{"name": "weather", "arguments": {"city": "Rome", "days": 1}}' in prompt
    assert "tool: sunny" in prompt and '"parameters"' in prompt


def test_a_reply_does_not_go_on_in_front_of_a_call(calling: Served) -> None:
    """A prompt that ended behind the text of the last message would lack the call."""
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [*ASK, {"role": "assistant", "content": "I look.", "tool_calls": [call]}]
    body = {"messages": messages, "tools": [TOOL]}
    refused = calling.post("/apply-template", {**body, "continue_final_message": True})
    assert refused.status_code == 400 and "ends with a call" in refused.text
    n_tokens = len(
        calling.post("/tokenize", {"content": prompt_of(calling, body)}).json()["tokens"]
    )
    used = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
    last = {"role": "assistant", "content": [{"type": "text", "text": "I look."}, used]}
    tool = {"name": "weather", "input_schema": WEATHER}
    counted = calling.post("/v1/messages/count_tokens", {"messages": [*ASK, last], "tools": [tool]})
    assert counted.json()["input_tokens"] == n_tokens


def prompt_of(served: Served, body: dict[str, Any]) -> str:
    return str(served.post("/apply-template", body).json()["prompt"])


def test_responses_have_texts_calls_and_events(client: openai.OpenAI) -> None:
    common: Any = {"model": "demo", "input": "How is the weather?", "max_output_tokens": 12}
    common |= {"temperature": 0, "instructions": "Be brief."}
    done = client.responses.create(**common)
    assert done.status == "incomplete" and done.output_text
    assert done.usage and done.usage.output_tokens == 12
    assert done.incomplete_details and done.incomplete_details.reason == "max_output_tokens"
    with client.responses.stream(**common) as stream:
        events = list(stream)
    assert [each.sequence_number for each in events if hasattr(each, "sequence_number")] == list(
        range(len(events))
    )
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == done.output_text
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    flat: Any = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    common |= {"tools": [flat], "tool_choice": "required", "parallel_tool_calls": False}
    common["max_output_tokens"] = 300
    called = client.responses.create(**common)
    (item,) = called.output
    assert item.type == "function_call" and item.name == "weather" and is_asked(item.arguments)
    assert called.status == "completed"
    with client.responses.stream(**common) as stream:
        done_events = [e for e in stream if e.type == "response.function_call_arguments.done"]
        final = stream.get_final_response()
    (ended,) = done_events
    assert ended.to_dict()["name"] == "weather" and ended.arguments == item.arguments
    (streamed,) = final.output
    assert streamed.type == "function_call" and streamed.arguments == item.arguments
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="demo", input="x", previous_response_id="resp_1")


def test_a_response_says_its_form_again(client: openai.OpenAI) -> None:
    """Clients with types of their own cannot read one without its name and schema."""
    form: Any = {"type": "json_schema", "name": "w", "schema": WEATHER, "strict": True}
    common: Any = {"model": "demo", "input": "How is the weather?", "max_output_tokens": 300}
    done = client.responses.create(**common, text={"format": form})
    assert done.text and done.text.format and done.text.format.to_dict() == form
    assert is_asked(done.output_text)
    plain = client.responses.create(**{**common, "max_output_tokens": 1}).text
    assert plain and plain.format and plain.format.to_dict() == {"type": "text"}


def test_an_item_that_is_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    """Clients run calls that are completed."""
    common: Any = {"model": "demo", "input": "How is the weather?", "temperature": 0}
    done = client.responses.create(**common, max_output_tokens=12)
    assert [item.to_dict()["status"] for item in done.output] == ["incomplete"]
    text = {"type": "string", "minLength": 1000}
    schema = {"type": "object", "properties": {"city": text}, "required": ["city"]}
    flat: Any = {"type": "function", "name": "weather", "parameters": schema, "strict": True}
    common |= {"tools": [flat], "tool_choice": "required", "max_output_tokens": 60}
    with client.responses.stream(**common) as stream:
        events = list(stream)
    ended = [each.item for each in events if each.type == "response.output_item.done"]
    last = events[-1]
    assert last.type == "response.incomplete"
    found = [(item.type, item.to_dict()["status"]) for item in (*ended, *last.response.output)]
    assert found == [("function_call", "incomplete")] * 2


def test_anthropic_own_client_is_served(claude: anthropic.Anthropic) -> None:
    common: Any = {
        "model": "demo",
        "messages": ASK,
        "max_tokens": 12,
        "extra_body": {"temperature": 0},
    }
    done = claude.messages.create(**common, system="Be brief.")
    assert done.stop_reason == "max_tokens" and done.usage.output_tokens == 12
    (block,) = done.content
    assert block.type == "text" and block.text
    with claude.messages.stream(**common, system="Be brief.") as stream:
        assert "".join(stream.text_stream) == block.text
        assert stream.get_final_message().stop_reason == "max_tokens"
    counted = claude.messages.count_tokens(model="demo", messages=ASK, system="Be brief.")
    used = done.usage.input_tokens + (done.usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == used
    stop = block.text[3:6]
    stopped = claude.messages.create(**common, system="Be brief.", stop_sequences=[stop])
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == stop


def test_anthropic_own_client_lists_models(claude: anthropic.Anthropic, calling: Served) -> None:
    listed = claude.models.list()
    (model,) = listed
    assert (model.id, model.type, model.display_name) == ("demo", "model", "demo")
    assert model.created_at.timestamp() == calling.service.started
    assert claude.models.retrieve("demo") == model
    assert (listed.has_more, listed.first_id, listed.last_id) == (False, "demo", "demo")


def test_anthropic_tools_are_called(claude: anthropic.Anthropic) -> None:
    """And their results are read."""
    tool: Any = {"name": "weather", "input_schema": WEATHER}
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    common: Any = {"model": "demo", "max_tokens": 300, "tools": [tool]}
    common |= {"extra_body": {"temperature": 0}}
    done = claude.messages.create(messages=ASK, tool_choice=choice, **common)
    (block,) = done.content
    assert done.stop_reason == "tool_use" and block.type == "tool_use"
    assert block.name == "weather" and is_asked(json.dumps(block.input))
    with claude.messages.stream(messages=ASK, tool_choice=choice, **common) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use" and streamed.input == block.input
    result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
    messages: Any = [
        *ASK,
        {"role": "assistant", "content": [block.model_dump()]},
        {"role": "user", "content": [result]},
    ]
    answer = claude.messages.create(messages=messages, **{**common, "max_tokens": 5})
    assert answer.usage.output_tokens <= 5


def test_errors_are_those_that_clients_know(calling: Served, client: openai.OpenAI,
                                            claude: anthropic.Anthropic) -> None:  # fmt: skip
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "word " * 2000}]
        )
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError) as missing:
        client.moderations.create(input="x")
    assert missing.value.status_code == 501
    with pytest.raises(anthropic.BadRequestError, match="no tool"):
        tool: Any = {"name": "weather", "input_schema": WEATHER}
        claude.messages.create(
            model="demo",
            max_tokens=5,
            messages=ASK,
            tools=[tool],
            tool_choice={"type": "tool", "name": "other"},
        )
    with pytest.raises(anthropic.BadRequestError, match=r"tools\.0\.type .* runs no tools"):
        search: Any = {"type": "web_search_20250305", "name": "web_search"}
        claude.messages.create(model="demo", max_tokens=5, messages=ASK, tools=[search])
    with serving(api_keys=("right",)) as locked:
        address = f"{locked.address}/v1"
        wrong = openai.OpenAI(base_url=address, api_key="wrong", max_retries=0)
        with wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        locked.wait()


def refused(error: pytest.ExceptionInfo[Any], kind: str) -> str:
    """The message of an error that has Anthropic's form."""
    body = error.value.body
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"} and body["error"]["type"] == kind
    assert body["request_id"].startswith("req_")
    return str(body["error"]["message"])


def test_errors_of_messages_are_those_of_anthropic(
    calling: Served, claude: anthropic.Anthropic
) -> None:
    common: Any = {"model": "demo", "messages": ASK}
    error: pytest.ExceptionInfo[Any]
    with pytest.raises(anthropic.BadRequestError) as error:
        claude.messages.create(**common, max_tokens=0)
    assert refused(error, "invalid_request_error").startswith("max_tokens: ")
    body: Any = error.value.body
    assert error.value.request_id == body["request_id"]
    with pytest.raises(anthropic.BadRequestError) as error:
        claude.messages.count_tokens(model="demo", messages=[])
    refused(error, "invalid_request_error")
    with pytest.raises(anthropic.NotFoundError) as error:
        claude.post("/v1/messages/batches", cast_to=object, body={})
    refused(error, "not_found_error")
    large = calling.client.post("/v1/messages", content=iter([b" " * (1 << 20)] * 33))
    assert large.status_code == 413 and large.json()["error"]["type"] == "request_too_large"
    with serving(api_keys=("right",)) as locked:
        made = anthropic.Anthropic(base_url=locked.address, api_key="wrong", max_retries=0)
        with made as client, pytest.raises(anthropic.AuthenticationError) as error:
            client.messages.create(**common, max_tokens=1)
        assert refused(error, "authentication_error") == "Invalid API Key"
        locked.wait()


def test_a_server_without_its_model_is_overloaded_to_anthropic() -> None:
    may_load = threading.Event()

    def load() -> LLM:
        may_load.wait(60)
        return with_template()

    with serving(load, settings={"timeout": 0.2}) as served:
        made = anthropic.Anthropic(base_url=served.address, api_key="none", max_retries=0)
        common: Any = {"model": "demo", "messages": ASK, "max_tokens": 900}
        error: pytest.ExceptionInfo[Any]
        with made as client:
            with pytest.raises(anthropic.InternalServerError) as error:
                client.messages.create(**common)
            assert error.value.status_code == 503
            assert refused(error, "overloaded_error") == "Loading model"
            may_load.set()
            served.wait()
            common["extra_body"] = {"ignore_eos": True}
            streamed = client.messages.stream(**common)
            with pytest.raises(anthropic.APIStatusError) as error, streamed as stream:
                list(stream)  # the error is an event
            assert refused(error, "overloaded_error").startswith("the reply took too long")


def test_a_client_that_leaves_ends_its_reply(calling: Served, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="demo", prompt="a", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    calling.is_idle()
