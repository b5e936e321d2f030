"""/completion and its like, in llama-server's own form."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny import rewrite
from tests.server.conftest import Served, serving
from vkmoe.llm import LLM, demo_model_path

PROMPT = "def main():"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(settings={"alias": "b,a", "tags": "y,x"}) as served:
        served.wait()
        yield served


def answer(server: Served, **body: Any) -> Any:
    found = server.post("/completion", {"prompt": PROMPT, "n_predict": 8, "temperature": 0} | body)
    assert found.status_code == 200, found.text
    return found.json()


def test_a_completion_is_that_of_openai_s_form(server: Served) -> None:
    whole = answer(server, return_tokens=True)
    other = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 8, "temperature": 0})
    assert whole["content"] == other.json()["choices"][0]["text"]
    assert server.engine.llm.tokenizer.decode(whole["tokens"]) == whole["content"]
    assert (whole["stop"], whole["stop_type"], whole["truncated"]) == (True, "limit", False)
    assert whole["model"] == "a" and whole["has_new_line"] is ("\n" in whole["content"])
    assert whole["generation_settings"]["n_predict"] == whole["tokens_predicted"] == 8
    assert whole["tokens_evaluated"] == len(server.engine.llm.tokenizer.encode(PROMPT))


def test_a_stream_has_a_token_an_event_and_ends_with_all_figures(server: Served) -> None:
    lines = server.post(
        "/completion",
        {
            "prompt": PROMPT,
            "n_predict": 8,
            "temperature": 0,
            "stream": True,
            "return_progress": True,
        },
    ).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    *parts, last = [event for event in events if "prompt_progress" not in event]
    assert "".join(part["content"] for part in parts) == answer(server)["content"]
    assert all(not part["stop"] and len(part["tokens"]) <= 1 for part in parts)
    assert last["stop"] and last["content"] == "" and last["timings"]["predicted_n"] == 8
    progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert progress[0]["processed"] == progress[0]["cache"]
    assert progress[-1]["processed"] == progress[-1]["total"] == last["tokens_evaluated"]


def test_prompts_may_be_texts_tokens_and_both_mixed(server: Served) -> None:
    tokens = server.engine.llm.tokenizer.encode(PROMPT)
    alone = answer(server)["content"]
    for prompt in (
        tokens,
        {"prompt_string": PROMPT},
        [server.engine.llm.tokenizer.decode(tokens[:1]), *tokens[1:]],
    ):
        assert answer(server, prompt=prompt)["content"] == alone
    both = answer(server, prompt=[PROMPT, tokens, "x = ["])
    assert [each["content"] for each in both[:2]] == [alone, alone] != both[2]["content"]
    media = {"prompt_string": PROMPT, "multimodal_data": ["AAAA"]}
    assert server.post("/completion", {"prompt": media}).status_code == 400


def test_biases_may_be_pairs_texts_and_never(server: Served) -> None:
    tokenizer = server.engine.llm.tokenizer
    first = answer(server, n_predict=1, return_tokens=True)["tokens"][0]
    word = tokenizer.decode([first])
    found = [
        answer(server, n_predict=1, return_tokens=True, logit_bias=bias)["tokens"]
        for bias in ([[first, -100]], {str(first): -100}, [[word, False]], {word: False})
    ]
    assert found[0] != [first] and found.count(found[0]) == 4
    settings = answer(server, logit_bias=[[first, False]])["generation_settings"]
    assert settings["logit_bias"] == [{"token": first, "bias": None}]
    ended = answer(server, ignore_eos=True)["generation_settings"]["logit_bias"]
    assert [each["token"] for each in ended] == sorted(tokenizer.end_ids)


def test_probabilities_are_the_model_s_or_those_of_the_draw(server: Served) -> None:
    raw = answer(server, n_probs=5, seed=1, temperature=0.5)["completion_probabilities"]
    drawn = answer(server, n_probs=5, seed=1, temperature=0.5, post_sampling_probs=True, top_k=3)
    drawn = drawn["completion_probabilities"]
    assert [len(each["top_logprobs"]) for each in raw] == [5] * 8
    for each in drawn:
        assert 0 < len(each["top_probs"]) <= 3
        assert sum(top["prob"] for top in each["top_probs"]) == pytest.approx(1)
        assert each["prob"] in [top["prob"] for top in each["top_probs"]]
    first, second = (each["logprob"] for each in raw[0]["top_logprobs"][:2])
    sharper = [each["prob"] for each in drawn[0]["top_probs"][:2]]
    if len(sharper) == 2:  # temperature 0.5 doubles the distance
        assert math.log(sharper[0] / sharper[1]) == pytest.approx(2 * (first - second), rel=1e-4)
    assert (
        answer(server, n_probs=5, post_sampling_probs=True)["completion_probabilities"][0]["prob"]
        == 1.0
    )


def test_response_fields_are_all_that_is_sent(server: Served) -> None:
    found = answer(server, response_fields=["content", "timings/prompt_n", "nothing/there"])
    assert found.keys() == {"content", "timings/prompt_n"}


def test_a_gap_is_filled_by_models_with_marks_for_it(server: Served, tmp_path: Path) -> None:
    body = {"input_prefix": "def ", "input_suffix": "return 1", "n_predict": 4, "temperature": 0}
    refused = server.post("/infill", body)
    assert refused.status_code == 501 and "fills no gaps" in refused.text
    names = ("fim_pre", "fim_suf", "fim_mid", "fim_rep", "fim_sep")

    def mark(metadata: dict[str, Any], _: Any) -> None:
        ids = enumerate(names, 300)
        metadata |= {f"tokenizer.ggml.{name}_token_id": token for token, name in ids}

    path = rewrite(demo_model_path(), tmp_path / "gaps.gguf", mark)
    with serving(lambda: LLM(path, ctx_size=256)) as served:
        served.wait()
        tokenizer = served.engine.llm.tokenizer
        encode = partial(tokenizer.encode, add_special=False)
        gap = [300, *encode("def "), 301, *encode("return 1"), 302]
        file = [304, *encode("a.py\n"), *encode("x = 1\n"), 304, *encode("file\n")]
        extra = {"input_extra": [{"filename": "a.py", "text": "x = 1\n"}]}
        for tokens, more in ((gap, {}), ([303, *encode("project\n"), *file, *gap], extra)):
            by_hand = answer(served, prompt=[*tokenizer.added_first, *tokens], n_predict=4)
            filled = served.post("/infill", {**body, **more}).json()
            assert filled["content"] == by_hand["content"]
            assert filled["tokens_evaluated"] == by_hand["tokens_evaluated"]


def test_names_and_tags_are_listed(server: Served) -> None:
    (model,) = server.client.get("/models").json()["data"]
    assert (model["id"], model["aliases"], model["tags"]) == ("a", ["a", "b"], ["x", "y"])
    assert server.client.get("/v1/models/b").status_code == 200
    assert server.client.get("/v1/models/c").status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions/input_tokens", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses/input_tokens", {"input": "Hi"}),
    ],
)
def test_tokens_of_a_prompt_are_counted(server: Served, path: str, body: dict[str, Any]) -> None:
    counted = server.post(path, body).json()["input_tokens"]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    assert counted == server.post("/chat/completions", chat).json()["usage"]["prompt_tokens"]


def test_counts_have_llama_server_s_names_too(server: Served) -> None:
    before = counts(server)
    done = answer(server, prompt="import numpy as np\n", n_predict=5)
    after = counts(server)
    for name, more in (
        ("prompt_tokens_total", done["timings"]["prompt_n"]),
        ("prompt_tokens_cached_total", done["timings"]["cache_n"]),
        ("tokens_predicted_total", 5),
    ):
        assert after[name] - before[name] == more
    assert after["n_decode_total"] > before["n_decode_total"]
    assert after["predicted_tokens_seconds"] > 0 == counts(server)["predicted_tokens_seconds"]


def counts(server: Served) -> dict[str, float]:
    lines = server.client.get("/metrics").text.splitlines()
    pairs = (line.split() for line in lines if line.startswith("llamacpp:"))
    return {name.removeprefix("llamacpp:"): float(value) for name, value in pairs}


def test_a_prefix_is_before_all_paths_and_parts_may_be_off() -> None:
    stated = {"api_prefix": "/llm", "slots": False, "metrics": False, "webui": False}
    with serving(settings=stated) as served:
        served.wait("/health")
        bare = served.address.removesuffix("/llm")
        for path, status in (
            (f"{bare}/health", 404),
            (f"{bare}/llmhealth", 404),
            ("/slots", 501),
            ("/metrics", 501),
            ("/", 404),
            ("/v1/models", 200),
        ):
            assert served.client.get(path).status_code == status, path


def test_a_limit_of_the_server_holds_where_a_request_has_none() -> None:
    with serving(settings={"max_tokens": 3}) as served:
        served.wait()
        lengths = [answer(served, **body)["tokens_predicted"] for body in ({"n_predict": None}, {})]
        assert lengths == [3, 8]
