"""Ollama's own client is served: chats, prompts, tools, thoughts, forms, questions about models.

Texts are those that OpenAI's API gives for the same request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import ollama
import pytest
from gguf.constants import LlamaFileType

from tests.server.calls import ASK, TEMPLATE, TOOL, WEATHER, is_asked
from tests.server.conftest import Served, listening, run_async, serving
from tests.server.hosting.test_models import hosted
from vkmoe.config import EngineConfig
from vkmoe.llm import LLM
from vkmoe.server.api.ollama import replies
from vkmoe.server.api.ollama.fields import ChatFields
from vkmoe.server.facts import FILE_TYPES
from vkmoe.server.hosting.models import Models
from vkmoe.server.hosting.peers import Peers
from vkmoe.server.hosting.roster import Peer

THINKS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}"
    "{{ reasoning_effort }}[assistant]<think>"
)
END = 0  # of a text, and its beginning
HI: Any = [{"role": "user", "content": "def main():"}]
SHORT = {"num_predict": 12, "temperature": 0}
DRAWN = {"num_predict": 12, "temperature": 1.5, "seed": 7, "top_k": 30, "min_p": 0.01}
DRAWN |= {"repeat_penalty": 1.3, "repeat_last_n": 16, "presence_penalty": 0.2}


def client_of(served: Served) -> ollama.Client:
    return ollama.Client(served.address)


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[ollama.Client]:
    with client_of(server) as made:
        yield made


@pytest.fixture(scope="module")
def thinking() -> Iterator[Served]:
    config = EngineConfig(ctx_size=256, parallel=2)
    with serving(lambda: LLM(None, config, chat_template=THINKS)) as served:
        served.wait()
        yield served


def openai_message(served: Served, **body: Any) -> dict[str, Any]:
    """What OpenAI's API answers; its names of options differ in one."""
    options = body.pop("options", SHORT)
    options = {"max_tokens" if name == "num_predict" else name: v for name, v in options.items()}
    answer = served.post("/v1/chat/completions", {"messages": HI, **options, **body})
    assert answer.status_code == 200, answer.text
    return {**answer.json()["choices"][0]["message"], "usage": answer.json()["usage"]}


@pytest.mark.parametrize("options", [SHORT, DRAWN, {**SHORT, "stop": ["#\n"]}])
def test_a_chat_has_the_text_of_other_apis(
    server: Served, client: ollama.Client, options: dict[str, Any]
) -> None:
    """At once and streamed, with counts, and with options that say nothing of the text."""
    same = openai_message(server, options=options)
    noise = {"num_ctx": 8192, "num_gpu": 99, "unheard_of": {"a": []}, "top_k": 40.0}
    whole = client.chat("demo", HI, options=noise | options)
    assert whole.message.content == same["content"] and whole.message.role == "assistant"
    assert whole.message.thinking is None and whole.message.tool_calls is None
    assert whole.done and whole.done_reason == ("stop" if "stop" in options else "length")
    assert whole.prompt_eval_count == same["usage"]["prompt_tokens"]
    assert whole.eval_count == same["usage"]["completion_tokens"]
    assert whole.total_duration and whole.prompt_eval_duration and whole.load_duration is not None
    spent = whole.load_duration + whole.prompt_eval_duration + (whole.eval_duration or 0)
    assert spent < whole.total_duration < 60e9, "nanoseconds"
    assert whole.model == "demo" and whole.created_at
    written = datetime.fromisoformat(whole.created_at)
    assert abs(datetime.now(UTC) - written) < timedelta(minutes=5)
    *parts, last = client.chat("demo", HI, options=options, stream=True)
    assert "".join(part.message.content or "" for part in parts) == same["content"]
    assert len(parts) > ("stop" not in options) and not any(
        part.done or part.done_reason for part in parts
    )
    assert (last.done, last.done_reason) == (True, whole.done_reason)
    assert last.message.content == "" and last.eval_count == whole.eval_count


def test_a_stream_comes_unasked_as_lines_of_json(server: Served) -> None:
    answer = server.post("/api/chat", {"model": "demo", "messages": HI, "options": SHORT})
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("}\n") and "\n\n" not in answer.text
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert set(lines[0]) == {"model", "created_at", "message", "done"}


def test_the_client_for_event_loops_is_served(server: Served, client: ollama.Client) -> None:
    async def ask() -> tuple[str, str]:
        made = ollama.AsyncClient(server.address)
        parts = [part.response async for part in await made.generate(
            "demo", "def main():", options=SHORT, stream=True)]  # fmt: skip
        whole = await made.chat("demo", HI, options=SHORT)
        await made.close()
        return "".join(map(str, parts)), whole.message.content or ""

    same = openai_message(server)["content"]
    assert run_async(ask()) == (same, same)


def test_a_silent_stream_has_empty_parts(
    server: Served, client: ollama.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "PATIENCE", 0.0)
    parts = list(client.chat("demo", HI, options=SHORT, stream=True))
    texts = [part.message.content for part in parts]
    assert "".join(map(str, texts)) == openai_message(server)["content"]
    assert texts.count("") > 1


def test_tools_are_called_with_arguments_that_are_objects(calling: Served) -> None:
    """Where the form leaves an answer or a call, and the model is made to like the call."""
    mark = calling.post("/tokenize", {"content": "<"}).json()["tokens"][0]
    common: Any = {"model": "demo", "messages": ASK, "tools": [TOOL], "format": WEATHER}
    likes = {str(mark): 50, str(END): 100}
    common["options"] = {"num_predict": 300, "seed": 2, "logit_bias": likes}
    with client_of(calling) as client:
        done = client.chat(**common)
        parts = list(client.chat(**common, stream=True))
        result: Any = {"role": "tool", "tool_name": "weather", "content": "sunny"}
        answer = client.chat("demo", [*ASK, done.message, result], options=SHORT)
    assert done.done_reason == "stop" and not done.message.content and done.message.tool_calls
    call = done.message.tool_calls[0].function
    assert call.name == "weather" and is_asked(json.dumps(call.arguments))
    streamed = [each for part in parts for each in part.message.tool_calls or ()]
    assert [dict(each.function) for each in streamed] == [
        dict(each.function) for each in done.message.tool_calls
    ]
    assert not any(part.message.content for part in parts)
    raw = calling.post("/api/chat", {**common, "stream": False}).json()["message"]["tool_calls"]
    assert [each["function"]["index"] for each in raw] == list(range(len(raw)))
    assert all(each["id"].startswith("call_") for each in raw)
    # The same conversation, as OpenAI's API has it.
    calls = [
        {"id": f"c{i}", "type": "function", "function": dict(each.function)}
        for i, each in enumerate(done.message.tool_calls)
    ]
    told = {"role": "tool", "tool_call_id": "c0", "content": "sunny"}
    given = [*ASK, {"role": "assistant", "tool_calls": calls}, told]
    same = openai_message(calling, messages=given)
    assert answer.message.content == same["content"]
    assert answer.prompt_eval_count == same["usage"]["prompt_tokens"]


def test_results_belong_to_the_calls_of_their_names() -> None:
    def call(name: str, **more: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {}}, **more}

    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [call("a"), call("b"), call("c", id="own")]},
        {"role": "tool", "tool_name": "b", "content": "1"},
        {"role": "tool", "tool_call_id": "own", "content": "2"},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
    ]
    asked = ChatFields.model_validate({"model": "m", "messages": messages})
    calls, *results = asked.conversation(False).messages
    ids = [each["id"] for each in calls["tool_calls"]]
    assert len(set(ids)) == 3 and ids[2] == "own"
    assert [each.get("tool_call_id") for each in results] == [ids[1], "own", ids[0], None]


@pytest.mark.parametrize("n_tokens", [4, 25])
def test_a_call_that_was_cut_does_not_show(calling: Served, n_tokens: int) -> None:
    mark = calling.post("/tokenize", {"content": "<"}).json()["tokens"][0]
    options = {"num_predict": n_tokens, "seed": 2, "logit_bias": {str(mark): 100}}
    common: Any = {"tools": [TOOL], "format": WEATHER, "options": options}
    with client_of(calling) as client:
        for done in (
            client.chat("demo", ASK, **common),
            *client.chat("demo", ASK, **common, stream=True),
        ):
            assert not done.message.content and not done.message.tool_calls
    assert done.done_reason == "length"


def test_a_reply_goes_on_with_the_last_of_several_answers(calling: Served) -> None:
    """Agents of LangChain send several: they ask again where an answer had no call."""
    said: Any = [{"role": "assistant", "content": text} for text in ("Sunny.", "In Rome")]
    with client_of(calling) as client:
        answer = client.chat("demo", [*ASK, *said], options=SHORT)
    prompt = f"user: {ASK[0]['content']}assistant: Sunny.assistant: In Rome"
    tokens = calling.post("/tokenize", {"content": prompt}).json()["tokens"]
    assert answer.prompt_eval_count == len(tokens)
    assert answer.message.content == completion(calling, tokens)


def test_replies_keep_to_a_form(client: ollama.Client) -> None:
    options = {"num_predict": 200, "seed": 1}
    chat = client.chat("demo", HI, format=WEATHER, options=options)
    assert is_asked(chat.message.content or "") and chat.done_reason == "stop"
    for raw in (False, True):
        text = client.generate("demo", "x =", format=WEATHER, options=options, raw=raw)
        assert is_asked(text.response or "")
    limit = {"num_predict": 30, "temperature": 0}
    assert (client.chat("demo", HI, format="json", options=limit).message.content or "")[0] == "{"
    with pytest.raises(ollama.ResponseError, match="JSON schema") as refused:
        client.chat("demo", HI, format={"not": {}}, options=limit)
    assert refused.value.status_code == 400


@pytest.mark.parametrize("think", [True, "high", None, False])
def test_thoughts_are_apart(thinking: Served, think: Any) -> None:
    """Also in a stream, and of a prompt; a model that is not to think answers at once."""
    kwargs: dict[str, Any] = {"enable_thinking": bool(think)} if think is not None else {}
    kwargs |= {"reasoning_effort": think} if isinstance(think, str) else {}
    same = openai_message(thinking, chat_template_kwargs=kwargs)
    with client_of(thinking) as client:
        whole = client.chat("demo", HI, think=think, options=SHORT)
        parts = list(client.chat("demo", HI, think=think, options=SHORT, stream=True))
        text = client.generate("demo", "def main():", think=think, options=SHORT)
    found = (whole.message.thinking, whole.message.content)
    assert found == (same.get("reasoning_content"), same["content"]) and (found[0] or found[1])
    assert bool(found[0]) == (think is not False)
    streamed = "".join(part.message.thinking or "" for part in parts)
    assert streamed == (found[0] or "")
    assert (text.thinking, text.response) == found
    assert whole.prompt_eval_count == same["usage"]["prompt_tokens"] == text.prompt_eval_count


def prompt_of(served: Served, found: ollama.GenerateResponse) -> str:
    """The prompt of a reply that was given back as tokens."""
    tokens = [*(found.context or ())][: found.prompt_eval_count]
    return str(served.post("/detokenize", {"tokens": tokens}).json()["content"])


def test_what_was_thought_and_asked_is_in_the_prompt(thinking: Served) -> None:
    with client_of(thinking) as client:
        found = client.generate("demo", "Hi", system="Be brief.", think="low", options=SHORT)
        thought = {"role": "assistant", "content": "x", "thinking": "def why(): pass"}
        answer = client.chat("demo", [*HI, thought, *HI], options=SHORT)
    assert prompt_of(thinking, found) == "[system]Be brief.[user]Hilow[assistant]<think>"
    given = [*HI, {**thought, "reasoning_content": thought["thinking"]}, *HI]
    same = openai_message(thinking, messages=given)
    assert answer.prompt_eval_count == same["usage"]["prompt_tokens"]
    assert answer.message.thinking == same["reasoning_content"]


def completion(served: Served, prompt: Any) -> str:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
    return str(served.post("/v1/completions", body).json()["choices"][0]["text"])


def test_a_raw_prompt_goes_on_as_it_is(thinking: Served) -> None:
    with client_of(thinking) as client:
        whole = client.generate("demo", "def main():", raw=True, options=SHORT)
        parts = list(client.generate("demo", "def main():", raw=True, options=SHORT, stream=True))
        with pytest.raises(ollama.ResponseError, match="raw mode") as refused:
            client.generate("demo", "x", raw=True, system="y", options=SHORT)
    assert whole.response == completion(thinking, "def main():")
    assert "".join(part.response or "" for part in parts) == whole.response
    assert whole.context is None and whole.done_reason == "length"
    assert refused.value.status_code == 400


def test_a_prompt_goes_on_behind_its_context(server: Served, client: ollama.Client) -> None:
    """The token that begins every text, which the template writes too, comes once."""
    first = client.generate("demo", "def main():", options=SHORT)
    second = client.generate("demo", "def other():", context=first.context, options=SHORT)
    context = [*(first.context or ())]
    assert context[0] == END and first.eval_count == 12
    begin, *asked = [*(client.generate("demo", "def other():", options=SHORT).context or ())]
    n_asked = (second.prompt_eval_count or 0) - len(context)
    assert [*(second.context or ())][: second.prompt_eval_count] == [*context, *asked[:n_asked]]
    assert begin == END and second.response == completion(server, [*context, *asked[:n_asked]])


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{{ .Prompt }}", "a b"),
        ("{{ if .System }}<{{ .System }}>{{ else }}none{{ end }}: {{ .Prompt }}", "<s>: a b"),
        ("x  {{- if .Response }} y {{ end -}}  [{{ .Prompt }}]{{ .Response }} z", "x[a b]"),
        ("{{if .Response}}{{if .Prompt}}no{{end}}{{end}}[{{.Prompt}}]", "[a b]"),
        ("{{if .Prompt}}{{if .Response}}{{.Response}}{{else}}{{.System}}{{end}}{{end}}!", "s!"),
    ],
)
def test_a_template_of_a_request_is_written(
    server: Served, client: ollama.Client, template: str, prompt: str
) -> None:
    found = client.generate("demo", "a b", system="s", template=template, options=SHORT)
    assert prompt_of(server, found) == "<|endoftext|>" + prompt
    assert found.response == completion(server, prompt)


@pytest.mark.parametrize(
    "template",
    ["{{ range .Messages }}{{ end }}", "{{ .Prompt | upper }}", "{{ end }}", "{{ if .Tools }}",
     "{{ else }}", "{{ }}", "{{ .Prompt }}" * 2000, "{{ .Prompt }}" * 99],
)  # fmt: skip
def test_a_template_that_cannot_be_written_is_refused(client: ollama.Client, template: str) -> None:
    with pytest.raises(ollama.ResponseError, match="template") as refused:
        client.generate("demo", "a" * 20, template=template, options=SHORT)
    assert refused.value.status_code == 400


def test_a_gap_is_filled_where_the_model_has_marks_for_it(client: ollama.Client) -> None:
    def load() -> LLM:
        llm = LLM(None, EngineConfig(ctx_size=256))
        llm.tokenizer.gaps = {"fim_pre": 300, "fim_suf": 301, "fim_mid": 302}
        return llm

    with pytest.raises(ollama.ResponseError, match='"demo" does not support insert') as refused:
        client.generate("demo", "a", suffix="b")
    assert refused.value.status_code == 400
    with serving(load) as served, client_of(served) as filling:
        served.wait()
        assert "insert" in (filling.show("demo").capabilities or ())
        found = filling.generate("demo", "def f(", suffix="): pass", options=SHORT)
        texts = [
            served.post("/tokenize", {"content": each}).json()["tokens"]
            for each in ("def f(", "): pass")
        ]
        tokens = [0, 300, *texts[0], 301, *texts[1], 302]
        assert [*(found.context or ())][: found.prompt_eval_count] == tokens
        assert found.response == completion(served, tokens)


def test_tokens_have_the_probabilities_of_other_apis(server: Served, client: ollama.Client) -> None:
    body = {"messages": HI, "max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    choice = server.post("/v1/chat/completions", body).json()["choices"][0]
    same = [
        (each["token"], each["logprob"], [one["token"] for one in each["top_logprobs"]])
        for each in choice["logprobs"]["content"]
    ]
    common: Any = {"logprobs": True, "top_logprobs": 2, "options": {**SHORT, "num_predict": 5}}
    whole = client.chat("demo", HI, **common)
    parts = list(client.chat("demo", HI, **common, stream=True))
    text = client.generate("demo", "def main():", **common)
    for found in (
        whole.logprobs or (),
        [each for part in parts for each in part.logprobs or ()],
        text.logprobs or (),
    ):
        assert [
            (each.token, each.logprob, [one.token for one in each.top_logprobs or ()])
            for each in found
        ] == same


def test_embeddings_are_those_of_other_apis(server: Served, client: ollama.Client) -> None:
    texts = ["def main():", "class A:"]
    data = server.post("/v1/embeddings", {"input": texts}).json()
    same = [each["embedding"] for each in data["data"]]
    found = client.embed("demo", texts)
    assert found.embeddings == same and found.prompt_eval_count == data["usage"]["total_tokens"]
    assert found.total_duration and found.load_duration is not None
    assert client.embed("demo", texts[0]).embeddings == same[:1]
    (cut,) = client.embed("demo", texts[1], dimensions=8).embeddings
    assert len(cut) == 8 and sum(x * x for x in cut) == pytest.approx(1)
    one = client.embeddings("demo", texts[0]).embedding
    length = sum(x * x for x in one) ** 0.5
    assert length != pytest.approx(1) and [x / length for x in one] == pytest.approx(same[0])
    assert client.embed("demo", []).embeddings == [] == client.embeddings("demo", "").embedding
    assert client.embed("demo", "").embeddings == []


def test_texts_to_embed_are_cut_where_they_do_not_fit(
    server: Served, client: ollama.Client
) -> None:
    """Unless that is not wanted; what of them fits counts, however long they are."""
    llm = server.engine.llm
    tokens = llm.tokenize("word " * 900)[: llm.engine.ctx_size]
    data = server.post("/v1/embeddings", {"input": [tokens, "short"]}).json()
    wanted = [each["embedding"] for each in data["data"]]
    for text in ("word " * 900, "word " * 400_000):
        found = client.embed("demo", [text, "short"])
        assert found.embeddings == wanted
        assert found.prompt_eval_count == data["usage"]["total_tokens"]
    with pytest.raises(ollama.ResponseError, match="context holds 256") as refused:
        client.embed("demo", "word " * 900, truncate=False)
    assert refused.value.status_code == 400
    with pytest.MonkeyPatch.context() as patch:  # as a model that wants a token behind every text
        patch.setattr(llm.tokenizer, "added_last", [END])
        cut = server.post("/v1/embeddings", {"input": [[*tokens[:-1], END]]}).json()
        assert client.embed("demo", "word " * 900).embeddings == [cut["data"][0]["embedding"]]


def test_models_of_all_servers_are_listed_and_loaded_by_their_tags() -> None:
    with serving(settings={"alias": "far"}) as far:
        far.wait()
        models = Models([hosted("near"), hosted("next")])
        peers = Peers([Peer(far.address)], timeout=5.0)
        with listening(models, peers) as served, client_of(served) as client:
            names = [each.model for each in client.list().models]
            assert names == ["near:latest", "next:latest", "far:latest"]
            assert client.ps().models == []
            texts = {
                name: client.chat(name, HI, options=SHORT).message.content
                for name in ("far:latest", "next:latest", "next", "far")
            }
            assert len(set(texts.values())) == 1 and "near" not in str(client.ps())
            assert [each.model for each in client.ps().models] == ["next:latest"]
            assert client.list().models[1].size == client.list().models[2].size
            loaded = client.generate("near:latest")
            assert loaded.done_reason == "load"
            assert [each.model for each in client.ps().models] == ["near:latest"]
            first = client.chat("next", HI, options=SHORT)
            assert (first.load_duration or 0) > 10e6, "nanoseconds of loading"
            with pytest.raises(ollama.ResponseError) as missing:
                client.chat("other", HI)
            assert missing.value.status_code == 404
            assert client.list().models[0].details == client.show("near").details


def test_a_request_for_nothing_loads_or_unloads(client: ollama.Client) -> None:
    for keep_alive, reason in (
        (None, "load"),
        ("5m", "load"),
        ("10m", "load"),
        (0, "unload"),
        ("0s", "unload"),
    ):
        text = client.generate("demo", keep_alive=keep_alive)
        assert (text.done, text.done_reason, text.response) == (True, reason, "")
        chat = client.chat("demo", keep_alive=keep_alive)
        assert (chat.done, chat.done_reason, chat.message.content) == (True, reason, "")
    with pytest.raises(ollama.ResponseError, match="invalid duration"):
        client.chat("demo", keep_alive="soon")


def test_keep_alive_says_when_a_model_is_unloaded(client: ollama.Client) -> None:
    for keep_alive, seconds in (("1.5h", 5400), (30, 30), ("-1m", 1e9), (None, 1e9)):
        client.chat("demo", HI, keep_alive=keep_alive, options=SHORT)
        expires = client.ps().models[0].expires_at
        assert expires is not None
        left = (expires - datetime.now(UTC)).total_seconds()
        assert left > 1e9 if seconds == 1e9 else seconds - 20 < left <= seconds
    wanted = client.chat("demo", HI, options=SHORT).message.content
    assert client.chat("demo", HI, keep_alive=0, options=SHORT).message.content == wanted
    for _ in range(200):
        if not client.ps().models:
            break
        time.sleep(0.02)
    assert not client.ps().models
    assert client.chat("demo", HI, options=SHORT).message.content == wanted


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("chat", {"messages": HI}, 400, "model"),
        ("chat", {"model": "", "messages": HI}, 400, "model"),
        ("chat", {"model": "d", "messages": [{"role": "user", "images": ["aGk="]}]}, 400, "images"),
        ("generate", {"model": "d", "prompt": "x", "images": ["aGk="]}, 400, "images"),
        ("chat", {"model": "d", "messages": HI, "tools": [TOOL]}, 400, '"d" does not support t'),
        ("chat", {"model": "d", "messages": HI, "think": True}, 400, "not support thinking"),
        ("chat", {"model": "d", "messages": HI, "think": "very"}, 400, "think"),
        ("chat", {"model": "d", "messages": HI, "format": "xml"}, 400, "format"),
        ("chat", {"model": "d", "messages": HI, "top_logprobs": 21}, 400, "top_logprobs"),
        ("chat", {"model": "d", "messages": HI, "options": {"top_p": 2}}, 400, "options.top_p"),
        ("chat", {"model": "d", "messages": HI, "options": {"seed": 1.5}}, 400, "options.seed"),
        ("generate", {"model": "d", "prompt": "word " * 900}, 400, "context holds 256"),
        ("generate", {"model": "d", "prompt": "a", "context": [1 << 40]}, 400, "token"),
        ("show", {"model": "other"}, 404, "model 'other' not found"),
        ("show", {}, 400, "model is required"),
        ("pull", {"model": "other"}, 501, "vkmoe has no /api/pull"),
        ("embed", {"model": "d", "input": ["x", ""]}, 400, "empty"),
        ("embed", {"model": "d", "input": "x", "dimensions": 257}, 400, "256 dimensions"),
        ("nothing", {}, 404, "there is nothing"),
    ],
)  # fmt: skip
def test_errors_are_texts(
    server: Served, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    answer = server.post(f"/api/{path}", body)
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"} and words in answer.json()["error"]


def test_an_error_within_a_stream_is_its_last_line() -> None:
    with serving(settings={"timeout": 0.2}) as served, client_of(served) as client:
        served.wait()
        forever = {"num_predict": -1, "ignore_eos": True}
        with pytest.raises(ollama.ResponseError, match="took too long"):
            for _ in range(100):
                list(client.generate("demo", "x", options=forever, stream=True))
        served.is_idle()


def test_models_are_listed_described_and_running(server: Served, client: ollama.Client) -> None:
    (listed,), (running,) = client.list().models, client.ps().models
    shown = client.show("demo")
    assert listed.model == running.model == "demo:latest" and listed.digest == running.digest
    assert listed.digest and len(listed.digest) == 64 and int(listed.digest, 16)
    size = server.client.get("/v1/models").json()["data"][0]["meta"]["size"]
    assert listed.size == size and running.size and running.size_vram == 0
    assert listed.modified_at == shown.modified_at
    assert running.expires_at and running.expires_at > datetime.now(UTC) + timedelta(days=9999)
    assert running.context_length == 256
    assert listed.details == running.details == shown.details
    details = shown.details
    assert details and (details.format, details.family) == ("gguf", "qwen3moe")
    assert (details.parameter_size, details.quantization_level) == ("40.0M", "Q4_K_M")
    facts = shown.modelinfo or {}
    assert facts["general.architecture"] == "qwen3moe" and facts["qwen3moe.block_count"] == 6
    assert facts["tokenizer.ggml.tokens"] is None and facts["general.parameter_count"] == 40030208
    assert shown.capabilities == ["completion"] and "bos_token" in (shown.template or "")
    assert "num_ctx" in (shown.parameters or "") and shown.modelfile == "FROM demo.gguf\n"
    named = server.post("/api/show", {"name": "demo:latest", "verbose": True}).json()
    assert len(named["model_info"]["tokenizer.ggml.tokens"]) > 1000
    assert len(named["model_info"]["tokenizer.ggml.token_type"]) > 1000
    assert named["tensors"][0].keys() == {"name", "type", "shape"}


def test_capabilities_are_those_of_the_template(calling: Served, thinking: Served) -> None:
    for served, able, template in ((calling, "tools", TEMPLATE), (thinking, "thinking", THINKS)):
        with client_of(served) as client:
            shown = client.show("demo")
        assert (shown.capabilities, shown.template) == (["completion", able], template)


def test_names_have_the_tag_that_clients_look_for() -> None:
    with serving(settings={"alias": "tiny:q4, tiny"}) as served, client_of(served) as client:
        assert client.ps().models == [] or served.engine.state == "ready"
        served.wait()
        assert [each.model for each in client.list().models] == ["tiny:latest", "tiny:q4"]
        assert client.show("tiny:q4").details == client.show("tiny").details
        with pytest.raises(ollama.ResponseError) as missing:
            client.show("tiny:q8")
        assert missing.value.status_code == 404


def test_clients_find_that_an_ollama_runs(server: Served) -> None:
    asked = server.client
    assert all(asked.head(path).status_code == 200 for path in ("/", "/api/version", "/api/tags"))
    assert "Ollama is running" in asked.get("/").text
    version = asked.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 12, 11), "has logprobs"
    assert asked.request("DELETE", "/api/delete").status_code == 501


def test_types_of_files_have_the_names_of_the_format() -> None:
    named = {
        kind.value: kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in LlamaFileType
    }
    assert len(FILE_TYPES) > 30
    assert FILE_TYPES.items() <= named.items()
